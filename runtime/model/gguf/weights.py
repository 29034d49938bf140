"""Reads the weights of a GGUF file under the names that `Architecture.layer_shapes` uses."""

from __future__ import annotations

import re
from collections.abc import Container
from math import prod
from typing import NamedTuple

import torch

from radixcache.errors import ModelError
from radixcache.kernels.quantized import Quantized, Stored, dense
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.model.description import (
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Layer,
    Mamba2,
    Shapes,
    ShortConv,
    Unknown,
    Weight,
    Weights,
)
from radixcache.runtime.model.families.table import FAMILIES
from radixcache.runtime.model.gguf.architectures import ROWS, Row
from radixcache.runtime.model.gguf.blocks import read_tensor

_PARTS = {
    "input_norm": "attn_norm", "attended_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
    "after_norm": "post_ffw_norm", "layer_scale": "layer_output_scale",
    "q": "attn_q", "q_gate": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "query_norm": "attn_q_norm", "key_norm": "attn_k_norm", "sinks": "attn_sinks",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down": "ffn_down_exps",
    "shared.gate": "ffn_gate_shexp", "shared.up": "ffn_up_shexp", "shared.down": "ffn_down_shexp",
    "shared.router": "ffn_gate_inp_shexp", "correction": "exp_probs_b",
}  # fmt: skip
_SHORT_CONV = {"in": "shortconv.in_proj", "conv": "shortconv.conv", "o": "shortconv.out_proj"}
_RECURRENT = {
    "in": "ssm_in", "z": "attn_gate", "ba": "ssm_ba", "conv": "ssm_conv1d", "rate": "ssm_a",
    "rate_bias": "ssm_dt", "skip": "ssm_d", "mixer_norm": "ssm_norm", "o": "ssm_out",
}  # fmt: skip
_ENDS = {"rate": "", "skip": "", "rate_bias": ".bias", "correction": ".bias"}
_UNUSED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_BLOCK = re.compile(r"blk\.(\d+)\.")
_ATTENTION = {"q", "q_gate", "k", "v", "query_norm", "key_norm"}


class _Piece(NamedTuple):
    """Where a weight is in the file: a tensor, or some of its rows or columns.

    Attributes:
        shape: the tensor's expected shape; dimensions of 1 do not count.
        rows: the rows to take, in this order; None takes all in the file's order.
        columns: the columns to take, likewise.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None


class GGUFWeights:
    """Reads the weights of a GGUF file; on a CPU, quantized matrices stay quantized."""

    def __init__(
        self, file: GGUFFile, architecture: Architecture, device: torch.device, dtype: torch.dtype
    ) -> None:
        """
        Args:
            dtype: dtype of matrices on a GPU.

        Raises:
            Unknown: the file lacks weights, or has unknown ones.
            ModelError: a weight's shape disagrees with the metadata.
        """
        self._file, self._architecture = file, architecture
        self._device, self._dtype = device, dtype
        table = (architecture.vocab_size, architecture.hidden_size)
        self._embedding = [_Piece("token_embd.weight", table)]
        self._head = [] if architecture.tied else [_Piece("output.weight", table)]
        last = "token_embd_norm.weight"  # LFM's name for the norm behind its last layer
        last = last if last in file.tensors else "output_norm.weight"
        self._last = [_Piece(last, table[1:])]
        row = ROWS[file.get("general.architecture", str)]
        self._layers: list[dict[str, list[_Piece]]] = []
        most = max(prod(tensor.shape) for tensor in file.tensors.values())
        for number, layer in enumerate(architecture.layers):
            names = _Names(f"blk.{number}.", layer, architecture, row, file.tensors)
            shapes = architecture.layer_shapes(number)
            for name, shape in shapes.items():  # checked before row orders of that size are made
                if prod(shape) > most:
                    raise ModelError(f"the GGUF file has no weights for {name} of {list(shape)}")
            self._layers.append({name: names.pieces(name, shapes) for name in shapes})
        found = [x for layer in self._layers for pieces in layer.values() for x in pieces]
        self._check([*self._embedding, *self._head, *self._last, *found])

    def _check(self, pieces: list[_Piece]) -> None:
        tensors, count = self._file.tensors, len(self._layers)
        name = self._file.get("general.architecture", str)
        last = self._file.get(f"{name}.block_count", int)
        for name, wanted, *_ in pieces:
            if name not in tensors:
                raise Unknown(f"its checkpoint has other weights: it lacks {name}")
            found = tensors[name].shape
            same = [n for n in found if n > 1] == [n for n in wanted if n > 1]
            if not same and (len(wanted) > 1 or prod(found) != wanted[0]):
                raise ModelError(
                    f"the GGUF file has {name} as {list(found)}, "
                    f"where its metadata says {list(wanted)}"
                )
        for name in tensors.keys() - _UNUSED - {piece.tensor for piece in pieces}:
            block = _BLOCK.match(name)  # blocks behind the last layer predict further tokens (MTP)
            if block is None or not count <= int(block[1]) < last:
                raise Unknown(f"its checkpoint has other weights: it has {name}")

    @property
    def bits(self) -> float:
        """Average bits per weight in the file."""
        tensors = self._file.tensors.values()
        return sum(8 * len(one.data) for one in tensors) / sum(prod(one.shape) for one in tensors)

    def embedding(self) -> Weight:
        return self._matrix(self._embedding)

    def head(self) -> Weight | None:
        return self._matrix(self._head) if self._head else None

    def last_norm(self) -> torch.Tensor:
        self._file.release()
        return self._vector(self._last)

    def layer(self, number: int) -> Weights:
        """A layer's weights, by the names of `Architecture.layer_shapes`."""
        shapes, mlp = self._architecture.layer_shapes(number), self._architecture.layers[number].mlp
        weights: Weights = {}
        self._file.release()  # of the layer before, which is packed by now
        for name, pieces in self._layers[number].items():
            shape, one = shapes[name], len(shapes[name]) == 1
            if name.startswith("experts."):
                assert isinstance(mlp, Experts)
                read = self._vector if one else self._matrix
                weights[name] = [read(pieces, expert) for expert in range(mlp.count)]
            elif name == "conv":  # a channel's taps are a row of the file
                weights[name] = self._vector(pieces).view(shape[::-1]).T.contiguous()
            elif one:
                weights[name] = self._vector(pieces).view(shape)
            else:
                weights[name] = self._matrix(pieces)
        return weights

    def _vector(self, pieces: list[_Piece], expert: int | None = None) -> torch.Tensor:
        (part,) = (self._part(piece, expert) for piece in pieces)
        return dense(part).to(self._device, torch.float32, copy=True)  # the file may close

    def _matrix(self, pieces: list[_Piece], expert: int | None = None) -> Weight:
        """A matrix of the pieces, stacked by rows."""
        parts = [self._part(piece, expert) for piece in pieces]
        weight = parts[0] if len(parts) == 1 else torch.cat([dense(part) for part in parts])
        if isinstance(weight, Stored):
            weight.release = self._file.release
        if isinstance(weight, torch.Tensor):  # a router of one row may be a vector
            weight = weight.reshape(-1, weight.shape[-1])
        if self._device.type == "cpu":
            return weight
        return dense(weight).to(self._device, self._dtype)

    def _part(self, piece: _Piece, expert: int | None) -> Weight:
        tensor = self._file.tensors[piece.tensor]
        if expert is not None:
            size = len(tensor.data) // tensor.shape[0]
            data = tensor.data[expert * size : (expert + 1) * size]
            tensor = tensor._replace(shape=tensor.shape[1:], data=data)
        found = read_tensor(piece.tensor, tensor, piece.rows)
        if piece.columns is None:
            return found
        moved = found.columns(piece.columns) if isinstance(found, Quantized) else None
        return dense(found)[:, piece.columns].contiguous() if moved is None else moved


class _Names:
    """Finds a layer's weights in a file: their names there, and the order of rows."""

    def __init__(
        self,
        at: str,
        layer: Layer,
        architecture: Architecture,
        row: Row,
        tensors: Container[str],
    ) -> None:
        self._at, self._layer, self._row, self._tensors = at, layer, row, tensors
        self._architecture = architecture
        self._parts = _PARTS
        if isinstance(layer.mixer, ShortConv):
            self._parts = _PARTS | _SHORT_CONV
        elif isinstance(layer.mixer, DeltaNet | Mamba2):
            self._parts = _PARTS | _RECURRENT
        if "ffn_norm.weight" not in self and "attended_norm" not in layer.norms:
            # Some files name the MLP's norm by its place behind attention.
            self._parts = {**self._parts, "mlp_norm": "post_attention_norm"}
        if layer.mixer is None:
            self._parts = {**self._parts, "mlp_norm": "attn_norm"}

    def __contains__(self, part: str) -> bool:
        return f"{self._at}{part}" in self._tensors

    def pieces(self, name: str, shapes: Shapes) -> list[_Piece]:
        """The pieces of the file that make up a weight."""
        stem, mixer, shape = name.removesuffix(".bias"), self._layer.mixer, shapes[name]
        end = ".bias" if stem != name else _ENDS.get(stem, ".weight")
        part = self._parts[stem]
        if isinstance(mixer, Attention) and stem in _ATTENTION:
            return [self._attention(stem, end, mixer, shape)]
        if isinstance(mixer, DeltaNet) and stem in _RECURRENT:
            return self._delta(stem, end, mixer, shape)
        if name == "conv":
            return [_Piece(f"{self._at}{part}{end}", shape[::-1])]
        count: tuple[int, ...] = ()
        if stem.startswith("experts."):
            assert isinstance(self._layer.mlp, Experts)
            count = (self._layer.mlp.count,)
        prefix, _, side = stem.rpartition(".")
        gate = f"{prefix}.gate" if prefix else "gate"
        if side in ("gate", "up") and gate in shapes and f"{self._parts[gate]}{end}" not in self:
            part = "ffn_gate_up_exps" if count else self._parts[gate].replace("gate", "up")
            rows = torch.arange(shape[0]) + (shape[0] if side == "up" else 0)
            shape = (2 * shape[0], *shape[1:])
            return [_Piece(f"{self._at}{part}{end}", (*count, *shape), rows)]
        return [_Piece(f"{self._at}{part}{end}", (*count, *shape))]

    def _attention(self, stem: str, end: str, mixer: Attention, shape: tuple[int, ...]) -> _Piece:
        kind, part = mixer.kind, self._parts[stem]
        rows = None if stem == "v" else self._turned(mixer, shape[0] // kind.head_dim)
        if stem in ("query_norm", "key_norm"):
            return _Piece(f"{self._at}{part}{end}", shape, rows)
        sizes = [kind.query_heads * kind.head_dim, kind.kv_heads * kind.head_dim]
        sizes.append(kind.kv_heads * kind.value_dim)
        if f"attn_qkv{end}" in self and not mixer.gated:
            rows = torch.arange(shape[0]) if rows is None else rows
            before = sum(sizes[: "qkv".index(stem)])
            return _Piece(f"{self._at}attn_qkv{end}", (sum(sizes), *shape[1:]), rows + before)
        if mixer.gated and stem in ("q", "q_gate"):  # of each head, queries then gate
            both = torch.arange(2 * shape[0]).view(kind.query_heads, 2, -1)
            rows = both[:, int(stem == "q_gate")].flatten()
            return _Piece(f"{self._at}{part}{end}", (2 * shape[0], *shape[1:]), rows)
        keys = FAMILIES[self._architecture.family].value_is_key and kind.window is None
        if stem == "v" and keys and "attn_v.weight" not in self:
            part = self._parts["k"]
        return _Piece(f"{self._at}{part}{end}", shape, rows)

    def _turned(self, mixer: Attention, heads: int) -> torch.Tensor | None:
        """The order of rows that puts RoPE's pairs, side by side in some files, into halves."""
        if (pairs := self._row.pairs) is None or (pairs == "stored" and mixer.rope is None):
            return None
        dim = turned = mixer.kind.head_dim
        if pairs == "stored" and mixer.rope is not None:
            turned = 2 * len(self._architecture.ropes[mixer.rope].frequencies)
        one = torch.arange(dim)
        one[:turned] = one[:turned].view(-1, 2).T.flatten()
        return (torch.arange(heads)[:, None] * dim + one).flatten()

    def _delta(self, stem: str, end: str, mixer: DeltaNet, shape: tuple[int, ...]) -> list[_Piece]:
        """A delta net's weights; `tiled` files order value heads by place in a key head first."""
        keys, each = mixer.key_heads, mixer.heads // mixer.key_heads
        if mixer.heads % keys:
            raise Unknown(f"its {mixer.heads} value heads are of {keys} key heads")
        heads = torch.arange(mixer.heads)
        if self._row.tiled:
            heads = heads.view(each, keys).T.flatten()
        values = (heads[:, None] * mixer.value + torch.arange(mixer.value)).flatten()
        before = torch.arange(2 * keys * mixer.key)
        channels = torch.cat([before, values + len(before)])

        def piece(part: str, rows: torch.Tensor | None, stored: tuple[int, ...] = shape) -> _Piece:
            tiled = self._row.tiled or "ssm_ba" in part or "ssm_in" in part
            return _Piece(f"{self._at}{part}{end}", stored, rows if tiled else None)

        if stem in ("in", "z") and f"ssm_in{end}" in self:  # of each key head: q, k, v and z
            sizes = [mixer.key, mixer.key, each * mixer.value, each * mixer.value]
            by_heads = torch.arange(mixer.channels + mixer.out_width).view(keys, -1)
            parts = [part.flatten() for part in by_heads.split(sizes, 1)]
            rows = parts[3] if stem == "z" else torch.cat(parts[:3])
            return [piece("ssm_in", rows, (by_heads.numel(), *shape[1:]))]
        if stem == "ba" and f"ssm_ba{end}" in self:  # of each key head: b and a
            both = torch.arange(shape[0]).view(keys, 2, each)
            return [piece("ssm_ba", both.transpose(0, 1).flatten())]
        if stem == "ba":
            half = (mixer.heads, *shape[1:])
            return [piece(part, heads, half) for part in ("ssm_beta", "ssm_alpha")]
        part = self._parts[stem]
        if stem == "o":
            columns = values if self._row.tiled else None
            return [_Piece(f"{self._at}{part}{end}", shape, None, columns)]
        if stem == "in":
            return [piece("attn_qkv", channels)]
        if stem == "conv":
            return [piece(part, channels, shape[::-1])]
        return [piece(part, {"z": values, "mixer_norm": None}.get(stem, heads))]
