"""The tensors of a checkpoint, read one by one from its safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from radixcache.runtime.checkpoints.model_files import INDEX, find_file, shards

_WHOLE = "model.safetensors"


class Checkpoint:
    """The open files of a checkpoint. Tensors are copies, so that none keeps a file open."""

    def __init__(self, files: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        """`files` by the names of their tensors, which are given as `dtype` on `device`."""
        self._files, self._device, self._dtype = files, device, dtype

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name, without reading them."""
        return {n: tuple(f.get_slice(n).get_shape()) for n, f in self._files.items()}

    def tensor(self, name: str, exact: bool = False) -> torch.Tensor:
        """A tensor in the dtype of the steps, or as it is stored, if `exact`; for float32, a
        bfloat16 matrix stays as it is, which loses nothing and takes half the memory."""
        found: torch.Tensor = self._files[name].get_tensor(name)
        narrow = found.ndim > 1 and found.dtype == torch.bfloat16
        keep = exact or not found.is_floating_point() or (narrow and self._dtype == torch.float32)
        return found.to(self._device, None if keep else self._dtype, copy=True)


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


def checkpoint_files(name_or_path: str) -> list[str]:
    """The safetensors files of a folder or hub id; none if it has none."""
    if whole := find_file(name_or_path, _WHOLE):
        return [whole]
    if index := find_file(name_or_path, INDEX):
        return [path for name in shards(index) if (path := find_file(name_or_path, name))]
    return []
