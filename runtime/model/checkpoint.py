"""The tensors of a checkpoint, read one by one from its safetensors files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from radixcache.kernels.quantized import Quantized
from radixcache.runtime.checkpoints.model_files import INDEX, find_file, shards

_WHOLE, _PICKLED = "model.safetensors", "pytorch_model.bin"

Shape = tuple[int, ...]
Read = torch.Tensor | Quantized | list[Quantized]
"""A tensor, or the weight that it stands for; a list has one for each of its experts."""

FLOATS = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")

is_spare = re.compile(
    r"(^|\.)(mtp|visual|vision_|audio_|talker|v_head|rotary_emb|causal_mask|position_ids$)"
    r"|\.[kv]_scale$|\.(attn|attention)\.(masked_)?bias$"
).search
"""Whether a tensor is not for a text's next token, computed anew, or a scale for `kv_dtype`."""


class Checkpoint:
    """The open files of a checkpoint. Tensors are copies, so that none keeps a file open."""

    def __init__(self, files: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        """`files` by the names of their tensors, which are given as `dtype` on `device`."""
        self.files, self.device, self.dtype = files, device, dtype

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of all tensors by name, without reading them."""
        return {n: tuple(f.get_slice(n).get_shape()) for n, f in self.files.items()}

    @property
    def headers(self) -> dict[str, tuple[str, Shape]]:
        """Their dtypes as safetensors spells them, such as F8_E4M3, and their shapes."""
        shapes = self.shapes
        return {n: (f.get_slice(n).get_dtype(), shapes[n]) for n, f in self.files.items()}

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is stored."""
        found: torch.Tensor = self.files[name].get_tensor(name)
        return found.to(self.device, copy=True)

    def tensor(self, name: str, exact: bool = False) -> Read:
        """A tensor in the dtype of the steps, or as it is stored, if `exact`; for float32, a
        bfloat16 matrix stays as it is, which loses nothing and takes half the memory."""
        found: torch.Tensor = self.files[name].get_tensor(name)
        narrow = found.ndim > 1 and found.dtype == torch.bfloat16
        keep = exact or not found.is_floating_point() or (narrow and self.dtype == torch.float32)
        return found.to(self.device, None if keep else self.dtype, copy=True)


@contextmanager
def open_checkpoint(
    name_or_path: str | Path, device: torch.device, dtype: torch.dtype
) -> Iterator[Checkpoint]:
    """The checkpoint of a folder or hub id; without tensors if none can be read."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        try:
            for path in checkpoint_files(str(name_or_path)):
                opened = stack.enter_context(safe_open(path, framework="pt"))
                files.update(dict.fromkeys(opened.keys(), opened))
        except Exception:  # loading by transformers explains a broken file
            files = {}
        yield Checkpoint(files, device, dtype)


def headers(name_or_path: str | Path) -> dict[str, tuple[str, Shape]]:
    """The dtypes and shapes of a checkpoint's tensors, also of torch's own files."""
    with open_checkpoint(name_or_path, torch.device("cpu"), torch.float32) as checkpoint:
        found = checkpoint.headers
    if found:
        return found
    with suppress(Exception):  # loading by transformers explains a broken file
        for path in checkpoint_files(str(name_or_path), _PICKLED, f"{_PICKLED}.index.json"):
            for name, tensor in torch.load(path, "meta", weights_only=True).items():
                found[name] = str(tensor.dtype)[6:], tuple(tensor.shape)
    return found


def checkpoint_files(name_or_path: str, whole: str = _WHOLE, index: str = INDEX) -> list[str]:
    """The safetensors files of a folder or hub id, or others of these names; none if none are."""
    if path := find_file(name_or_path, whole):
        return [path]
    if found := find_file(name_or_path, index):
        return [path for name in shards(found) if (path := find_file(name_or_path, name))]
    return []
