"""The weights of a GGUF file under the names that the decoder loop asks for."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from radixcache.errors import ModelError
from radixcache.kernels.quantized import Quantized
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.checkpoints.model_files import find_gguf
from radixcache.runtime.model.gguf.blocks import read_tensor

FAMILIES = ("llama", "qwen2", "qwen3")

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_NO_WEIGHTS = ("rope_freqs.weight",)  # `with_rope_factors` reads it


def open_gguf(name_or_path: str | Path) -> GGUFFile | None:
    """The GGUF file of that name, if the loop knows its architecture.

    Raises:
        ModelError: it is a GGUF file, and cannot be read.
    """
    path = find_gguf(str(name_or_path))
    file = GGUFFile(path) if path is not None else None
    if file is None or file.get("general.architecture", str) not in FAMILIES:
        return None
    if (count := file.get("split.count", int, 1)) > 1:
        raise ModelError(
            f"{path} is one of {count} parts of a GGUF file: llama-gguf-split --merge joins them"
        )
    return file


class GGUFCheckpoint:
    """`Checkpoint` for a GGUF file; on a CPU, quantized matrices stay quantized."""

    def __init__(self, file: GGUFFile, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is for vectors; on another device than a CPU, for all weights."""
        self._file, self._device, self._dtype = file, device, dtype
        self._names = {_name(name): name for name in file.tensors if name not in _NO_WEIGHTS}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by the loop's names; others keep their own names."""
        return {name: self._file.tensors[found].shape for name, found in self._names.items()}

    def tensor(self, name: str) -> torch.Tensor | Quantized:
        tensor = self._file.tensors[self._names[name]]
        found = read_tensor(name, tensor, self._order(name, tensor.shape[0]))
        if self._device.type == "cpu" and len(tensor.shape) > 1:
            return found
        dense = found.dense() if isinstance(found, Quantized) else found
        return dense.to(self._device, self._dtype, copy=True)

    def _order(self, name: str, rows: int) -> torch.Tensor | None:
        """The file's row for each row: in Llama's queries and keys, the two rows of a RoPE pair are
        adjacent in the file, and half a head apart in the loop."""
        family = self._file.get("general.architecture", str)
        if family != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return None
        heads = self._file.get("llama.attention.head_count", int)
        if ".k_proj." in name:
            heads = self._file.get("llama.attention.head_count_kv", int, heads)
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _name(name: str) -> str:
    """The loop's name of a tensor, or the tensor's own."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, end = match.groups()
        return f"model.layers.{layer}.{_PARTS[part]}.{end}" if part in _PARTS else name
    return _WHOLE.get(name, name)
