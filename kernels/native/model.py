"""All layers of a decoder's step in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from typing import NamedTuple

import torch

from radixcache.kernels.attention import LayerKind, LayerPages
from radixcache.kernels.native.attention import Heads, NativePlan, heads_of
from radixcache.kernels.native.library import check, kernel
from radixcache.kernels.native.linear import PackedLinear, Weight

Linears = tuple[PackedLinear, ...]
"""Linear layers whose results are concatenated."""


class _Layer(ctypes.Structure):
    _fields_ = [
        ("heads", Heads),
        ("qkv", Weight * 3),
        ("out", Weight),
        ("gate_up", Weight * 2),
        ("down", Weight),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "mlp_norm", "norm_after")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        *((name, c_int32) for name in ("count", "hidden", "inner", "half")),
        *((name, c_float) for name in ("eps", "rope_scale")),
        *((name, c_void_p) for name in ("frequencies", "first_norm")),
        *((name, Weight) for name in ("embedding", "head")),
    ]


class NativeLayer(NamedTuple):
    """A layer's weights; norms have the model's dtype; those of heads are [head_dim] or None."""

    kind: LayerKind
    qkv: Linears
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: Linears
    down: PackedLinear
    norm_after: torch.Tensor


class NativeModel:
    """A pre-norm decoder with RMSNorm, RoPE by halves and a gated MLP with SiLU.

    Args:
        embedding, head: [vocab_size, hidden] each; one object if they are tied.
        first_norm: [hidden] of the model's dtype, float32 or bfloat16.
        frequencies: [head_dim / 2] float32; pair i turns by position times the i-th.
        rope_scale: factor on the cosines and sines.

    Raises:
        ValueError: the weights do not fit together.
    """

    def __init__(
        self,
        embedding: PackedLinear,
        first_norm: torch.Tensor,
        layers: Sequence[NativeLayer],
        head: PackedLinear,
        frequencies: torch.Tensor,
        rope_scale: float,
        eps: float,
    ) -> None:
        self._dtype, self._vocab_size = first_norm.dtype, head.out_features
        self._kinds = [layer.kind for layer in layers]
        self._held = embedding, first_norm, layers, head, frequencies
        hidden, inner = first_norm.numel(), layers[0].down.in_features
        _check_depth(embedding, hidden)
        _check_depth(head, hidden)
        check(first_norm, self._dtype, (hidden,))
        check(frequencies, torch.float32, (layers[0].kind.head_dim // 2,))
        self._layers = (_Layer * len(layers))()
        for to, layer in zip(self._layers, layers, strict=True):
            self._fill(to, layer, hidden, inner, len(frequencies))
        self._model = _Model(
            ctypes.addressof(self._layers),
            *(len(layers), hidden, inner, len(frequencies), eps, rope_scale),
            *(frequencies.data_ptr(), first_norm.data_ptr(), embedding.struct, head.struct),
        )

        self._pages: Sequence[LayerPages] | None = None

    def _fill(self, to: _Layer, layer: NativeLayer, hidden: int, inner: int, half: int) -> None:
        kind = layer.kind
        if kind.head_dim != 2 * half:
            raise ValueError(f"RoPE of {2 * half} elements in heads of {kind.head_dim}")
        queries, keys = kind.query_heads * kind.head_dim, kind.kv_heads * kind.head_dim
        columns = queries + keys + kind.kv_heads * kind.value_dim
        for linears, depth, total in (
            (layer.qkv, hidden, columns),
            ((layer.out,), kind.query_heads * kind.value_dim, hidden),
            (layer.gate_up, hidden, 2 * inner),
            ((layer.down,), inner, hidden),
        ):
            if sum(linear.out_features for linear in linears) != total:
                raise ValueError(f"products of {len(linears)} weights do not give {total}")
            for linear in linears:
                _check_depth(linear, depth)
        to.heads = heads_of(kind)
        for name, linears in (("qkv", layer.qkv), ("gate_up", layer.gate_up)):
            for i, linear in enumerate(linears):
                getattr(to, name)[i] = linear.struct
        to.out, to.down = layer.out.struct, layer.down.struct
        for name, size in (
            *(("query_norm", kind.head_dim), ("key_norm", kind.head_dim)),
            *(("mlp_norm", hidden), ("norm_after", hidden)),
        ):
            weight: torch.Tensor | None = getattr(layer, name)
            if weight is not None:
                check(weight, self._dtype, (size,))
                setattr(to, name, weight.data_ptr())

    def forward(
        self,
        plan: NativePlan,
        pages: Sequence[LayerPages],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """[R, vocab_size] float32 logits of a planned step.

        Args:
            pages: of each layer; the same object is checked only once.
            token_ids, positions, logit_rows: [T], [T] and [R] int64.

        Raises:
            ValueError: the tensors do not fit together, or to the plan.
            IndexError: a token or row that does not exist.
            MemoryError: what the step computes does not fit into memory.
        """
        tokens, rows = len(token_ids), len(logit_rows)
        for table, count in ((token_ids, tokens), (positions, tokens), (logit_rows, rows)):
            check(table, torch.int64, (count,))
        batch = plan.address_for(tokens, pages[0].k)
        if pages is not self._pages:
            self._addresses, self._pages = self._check_pages(pages), pages
        logits = torch.empty(rows, self._vocab_size)
        kernel("forward", self._dtype)(
            *(ctypes.addressof(self._model), batch, self._addresses),
            *(token_ids.data_ptr(), positions.data_ptr(), logit_rows.data_ptr(), rows),
            logits.data_ptr(),
        )
        return logits

    def _check_pages(self, pages: Sequence[LayerPages]) -> ctypes.Array[c_void_p]:
        """The addresses of all pages, layer by layer."""
        addresses = []
        for kind, layer in zip(self._kinds, pages, strict=True):
            for tensor, dim in zip(layer, (kind.head_dim, kind.value_dim), strict=True):
                check(tensor, self._dtype, (*pages[0].k.shape[:2], kind.kv_heads, dim))
                addresses.append(tensor.data_ptr())
        return (c_void_p * len(addresses))(*addresses)


def _check_depth(linear: PackedLinear, depth: int) -> None:
    if linear.in_features != depth:
        raise ValueError(f"a weight of rows of {linear.in_features}, not of {depth}")
