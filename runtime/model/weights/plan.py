"""Plans where each weight of a layer is in a file: one logic for safetensors and GGUF.

Families join, reorder and name their weights in many ways. A naming says how a file calls a layer's
tensors; `plan_layer` says which of them, and which of their rows and columns, make up a weight of
`Architecture.layer_shapes`; a source reads these pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

import torch

from radixcache.errors import ModelError
from radixcache.kernels.spec import Architecture, Attention, DeltaNet, Latent, Unknown
from radixcache.runtime.model.families.table import FAMILIES

Shape = tuple[int, ...]
Part = torch.Tensor | slice | None
"""The rows or columns to take, in this order; None takes all."""

_HEADS = ("q", "k", "v", "q_gate", "query_norm", "key_norm")
_LATENTS = ("q", "q_b", "kv_a", "k_b", "v_b")
SHARED = ("k", "v", "key_norm")
"""What a layer that attends over K/V of another does not read, though files may have it."""
_VALUE_HEADS = ("in", "z", "ba", "conv", "rate", "rate_bias", "o")
CONVS = ("q_conv", "k_conv", "v_conv")
"""The convolutions of a delta net whose queries, keys and values have one each."""


class Piece(NamedTuple):
    """Where a weight is in a file: a tensor, or some of its rows or columns, then changed.

    Attributes:
        shape: the tensor's expected shape; dimensions of 1 do not count.
        expert: which of the experts in the tensor; None if it has none.
        then: "transpose", "negative exp", "over root of size" or "plus offset".
        vector: it becomes float32, as all but matrices do.
    """

    tensor: str
    shape: Shape
    rows: Part = None
    columns: Part = None
    expert: int | None = None
    then: str = ""
    vector: bool = False


class Names(NamedTuple):
    """How a file calls the tensors of a layer, and in what they differ from the description.

    Attributes:
        tensors: by the names of `layer_shapes`, or of what a file may have in their place: `qkv`;
            `gate_up`, also of experts; `experts.0.up` for one alone; `q_gate` with a row a head; a
            delta net's `qkvz` and `ba`, which are ordered by key heads, or `b` and `a`. Not all
            need be in the file.
        then: what is done with a tensor (`Piece.then`); a convolution's has a row a channel.
        alternating: gate and up take turns.
        converted: RoPE's pairs stand side by side in whole heads, whatever the family.
        tiled: a delta net's value heads are ordered by their place within a key head first.
    """

    tensors: Mapping[str, str]
    then: Mapping[str, str]
    alternating: bool = False
    converted: bool = False
    tiled: bool = False


class Naming(NamedTuple):
    """How a file calls its tensors; each of those outside of layers may have one of some names.

    Attributes:
        then: what is done with the last norm (`Piece.then`).
        is_spare: whether no text's next token needs a tensor.
        per_layer: by the names of `per_layer_shapes`.
    """

    embeddings: list[str]
    heads: list[str]
    last_norms: list[str]
    then: str
    layers: list[Names]
    is_spare: Callable[[str], bool]
    per_layer: Mapping[str, str]


class Tensors:
    """The tensors of a file, and which of them are used.

    Errors call the file by the name `file`, and what states its sizes by `says`.
    """

    def __init__(self, shapes: Mapping[str, Shape], file: str, says: str) -> None:
        self.shapes, self.file, self._says, self.used = shapes, file, says, set[str]()
        self.most = max(map(prod, shapes.values()), default=0)

    def use(self, name: str, shape: Shape) -> None:
        """Use a tensor, which must have this shape; dimensions of 1 do not count."""
        found = self.shapes[name]
        same = found == shape or [n for n in found if n != 1] == [n for n in shape if n != 1]
        if not same and (len(shape) > 1 or prod(found) != shape[0]):
            says = f"where its {self._says} says {list(shape)}"
            raise ModelError(f"the {self.file} has {name} as {list(found)}, {says}")
        self.used.add(name)

    def use_one(self, names: list[str], shape: Shape, then: str = "") -> Piece:
        """The only one of these tensors that the file has."""
        found = [name for name in names if name in self.shapes]
        if len(found) != 1:
            reason = f"it has {' and '.join(found)}" if found else f"it lacks {names[0]}"
            raise Unknown(f"its checkpoint has other weights: {reason}")
        self.use(found[0], shape)
        return Piece(found[0], shape, then=then, vector=len(shape) == 1)


def plan_layer(
    architecture: Architecture, number: int, names: Names, tensors: Tensors
) -> dict[str, list[Piece]]:
    """The pieces of each weight, which are joined by rows; of experts, a piece for each.

    Raises:
        Unknown: the file lacks a tensor.
        ModelError: one has another shape.
    """
    layer = _Layer(architecture, number, names, tensors)
    for name, shape in layer.shapes.items():
        if prod(shape) > tensors.most:  # before orders of that size are made
            raise ModelError(f"the {tensors.file} has no weights for {name} of {list(shape)}")
    return {name: layer.pieces(name, shape) for name, shape in layer.shapes.items()}


class _Layer:
    def __init__(self, architecture: Architecture, number: int, names: Names, tensors: Tensors):
        self.shapes, self._number = architecture.layer_shapes(number), number
        self._layer, self._ropes = architecture.layers[number], architecture.ropes
        self._family, self._names, self._tensors = FAMILIES[architecture.family], names, tensors

    def pieces(self, name: str, shape: Shape) -> list[Piece]:
        stem, mixer = name.removesuffix(".bias"), self._layer.mixer
        end = name[len(stem) :]
        if isinstance(mixer, Attention) and stem in _HEADS:
            return [self._attention(stem, end, mixer, shape)]
        if isinstance(mixer, Latent) and stem in _LATENTS:
            return self._latent(stem, end, mixer, shape)
        if isinstance(mixer, DeltaNet) and stem in _VALUE_HEADS:
            return self._delta(stem, mixer, shape)
        prefix, dot, part = stem.rpartition(".")
        mixture = self._layer.experts if prefix == "experts" else None
        experts = 0 if mixture is None else mixture.count
        if experts and self._has("experts.0.up"):
            return [self._piece(f"experts.{n}.{part}{end}", shape) for n in range(experts)]
        rows: Part = None
        gate, joined = (f"{prefix}{dot}{x}{end}" for x in ("gate", "gate_up"))
        halved = part in ("gate", "up") and gate in self.shapes and not self._has(gate)
        if halved and self._has(joined):
            up, count, name = int(part == "up"), shape[0], joined
            rows = slice(up * count, (up + 1) * count)
            rows = slice(up, None, 2) if self._names.alternating else rows
            shape = 2 * count, *shape[1:]
        if not experts:
            return [self._piece(name, shape, rows)]
        piece = self._piece(name, (experts, *shape), rows)
        return [piece._replace(expert=number) for number in range(experts)]

    def _has(self, name: str) -> bool:
        return self._names.tensors.get(name) in self._tensors.shapes

    def _piece(self, name: str, shape: Shape, rows: Part = None, columns: Part = None) -> Piece:
        """A part of a tensor of this shape, once it is transposed if it must be."""
        tensor, then = self._names.tensors.get(name, ""), self._names.then.get(name, "")
        if tensor not in self._tensors.shapes:
            lacking = tensor or f"{name} in layer {self._number}"
            raise Unknown(f"its checkpoint has other weights: it lacks {lacking}")
        if then == "transpose":
            shape, rows, columns = (*shape[:-2], shape[-1], shape[-2]), columns, rows
        self._tensors.use(tensor, shape)
        vector = len(shape) == 1 or name.endswith(("conv", ".bias"))
        return Piece(tensor, shape, rows, columns, None, then, vector)

    def _attention(self, stem: str, end: str, mixer: Attention, shape: Shape) -> Piece:
        kind, (count, *rest), name, rows = mixer.kind, shape, f"{stem}{end}", None
        dim, turned = kind.head_dim, kind.head_dim if self._names.converted else 0
        if not turned and self._family.pairs and mixer.rope is not None:
            turned = 2 * len(self._ropes[mixer.rope].frequencies)
        if turned and stem not in ("v", "q_gate"):
            rows = halves(count // dim, dim, turned)
        if len(stem) == 1 and self._has(f"qkv{end}"):
            sizes = [kind.query_heads * dim, kind.kv_heads * dim, kind.kv_heads * kind.value_dim]
            at = sum(sizes[: "qkv".index(stem)])
            part = slice(at, at + count) if rows is None else rows + at
            return self._piece(f"qkv{end}", (sum(sizes), *rest), part)
        if stem == "q_gate" and self._has(stem):
            rows = torch.arange(kind.query_heads).repeat_interleave(kind.value_dim)
            return self._piece(name, (kind.query_heads, *rest), rows)
        if stem in ("q", "q_gate") and mixer.gated and not self._has("q_gate"):
            both = torch.arange(2 * count).view(kind.query_heads, 2, -1)  # of each head
            part = both[:, int(stem == "q_gate")].flatten()
            return self._piece(f"q{end}", (2 * count, *rest), part if rows is None else part[rows])
        if stem == "v" and mixer.value_is_key:
            name = f"k{end}"
        return self._piece(name, shape, rows)

    def _latent(self, stem: str, end: str, mixer: Latent, shape: Shape) -> list[Piece]:
        heads, rank, turned = mixer.kind.query_heads, mixer.kind.head_dim, mixer.kind.value_dim
        if stem not in ("k_b", "v_b"):  # rotated rows are the last of each head, or of all
            heads, first = (1, rank) if stem == "kv_a" else (heads, mixer.nope)
            rows = halves(heads, first + turned, turned, first)
            return [self._piece(f"{stem}{end}", shape, rows if self._family.pairs else None)]
        if self._has(stem):
            piece = self._piece(stem, (heads, shape[0] // heads, shape[1]))
            return [piece._replace(shape=shape)]
        each = torch.arange(heads * (mixer.nope + mixer.value)).view(heads, -1)
        whole = each.numel(), rank
        if stem == "v_b":
            return [self._piece("kv_b", whole, each[:, mixer.nope :].flatten())]
        keys = (self._piece("kv_b", whole, rows) for rows in each[:, : mixer.nope])
        return [piece._replace(then="transpose") for piece in keys]

    def _delta(self, stem: str, mixer: DeltaNet, shape: Shape) -> list[Piece]:
        keys, each, rest = mixer.key_heads, mixer.heads // mixer.key_heads, shape[1:]
        if stem == "conv" and self._has("q_conv"):
            columns = [mixer.products[0][name] for name in "qkv"]
            pairs = zip(CONVS, columns, strict=True)
            return [self._piece(name, (mixer.width, count)) for name, count in pairs]
        if mixer.heads % keys:
            raise Unknown(f"its {mixer.heads} value heads are of {keys} key heads")
        if stem in ("in", "z") and self._has("qkvz"):
            sizes = [mixer.key, mixer.key, each * mixer.value, each * mixer.value]
            by_heads = torch.arange(mixer.channels + mixer.out_width).view(keys, -1)
            *qkv, z = (part.flatten() for part in by_heads.split(sizes, 1))
            rows = z if stem == "z" else torch.cat(qkv)
            return [self._piece("qkvz", (by_heads.numel(), *rest), rows)]
        if stem == "ba" and self._has("ba"):
            rows = torch.arange(shape[0]).view(keys, 2, each).transpose(0, 1).flatten()
            return [self._piece("ba", shape, rows)]
        heads = values = channels = None
        if self._names.tiled:
            heads = torch.arange(mixer.heads).view(each, keys).T.flatten()
            values = (heads[:, None] * mixer.value + torch.arange(mixer.value)).flatten()
            channels = torch.arange(mixer.channels)
            channels[-len(values) :] = values + 2 * keys * mixer.key
        if stem == "ba":
            return [self._piece(name, (mixer.heads, *rest), heads) for name in "ba"]
        if stem in ("o", "conv"):
            return [self._piece(stem, shape, None, values if stem == "o" else channels)]
        return [self._piece(stem, shape, {"in": channels, "z": values}.get(stem, heads))]


def halves(heads: int, head_dim: int, turned: int, first: int = 0) -> torch.Tensor:
    """The order of heads' rows that puts the pairs of `turned` ones, from `first` on, into
    halves."""
    rows = torch.arange(heads * head_dim).view(heads, head_dim)
    before, pairs, after = rows.split([first, turned, head_dim - first - turned], 1)
    return torch.cat([before, pairs[:, ::2], pairs[:, 1::2], after], 1).flatten()
