"""All layers of a decoder's step in one native call: a chain of sublayers, mixers and MLPs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import LayerPages
from radixcache.kernels.backend import ImageRows, Pair, SlotUse
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.native.attention import NO_WINDOW, Heads, NativePlan, Pages, pages_of
from radixcache.kernels.native.library import check, kernel
from radixcache.kernels.native.linear import PackedLinear, Weight
from radixcache.kernels.native.sampling import draw_table

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "clamped")  # in the order of operators.h
SCORES = ("softmax", "sigmoid", "softmax of chosen")  # in the order of experts.h
RECURRENCES = ("ShortConv", "DeltaNet", "Mamba2")  # in the order of recurrence.h

_Field = tuple[str, Any]


def _fields(kind: Any, names: str) -> list[_Field]:
    return [(name, kind) for name in names.split()]


class AttentionLayer(ctypes.Structure):
    """`AttentionLayer` of model.h."""

    _fields_ = [
        *(("heads", Heads), ("inputs", Weight * 4), ("out", Weight)),
        *_fields(c_void_p, "query_norm key_norm sinks"),
        *_fields(c_int32, "pages shares rope gated whole_norms value_norm scaled_length"),
        ("scaling", c_float),
    ]


class LatentLayer(ctypes.Structure):
    """`LatentLayer` of model.h."""

    _fields_ = [
        *(("heads", Heads), ("inputs", Weight * 2), *_fields(Weight, "q_b gate out")),
        *_fields(c_void_p, "k_b v_b q_a_norm kv_a_norm"),
        *_fields(c_int32, "pages rope nope value scaled_length"),
        *_fields(c_float, "scaling eps"),
    ]


class RecurrentLayer(ctypes.Structure):
    """`RecurrentLayer` of recurrence.h."""

    _fields_ = [
        *(("inputs", Weight * 6), ("out", Weight), ("of_latents", Weight * 2)),
        *_fields(c_void_p, "conv conv_bias rate rate_bias skip norm"),
        *_fields(c_float, "least most bound"),
        *_fields(c_int32, "kind width channels key_heads heads key value by_channel"),
    ]


class MLP(ctypes.Structure):
    """`MLP` of experts.h."""

    _fields_ = [
        *(("inputs", Weight * 2), ("down", Weight)),
        *_fields(c_int32, "inner gated activation"),
    ]


class Experts(ctypes.Structure):
    """`Experts` of experts.h."""

    _fields_ = [
        *_fields(c_void_p, "each shared"),
        *_fields(Weight, "router shared_gate latent_in latent_out"),
        *_fields(c_void_p, "correction each_scale"),
        *_fields(c_int32, "scores count active groups kept_groups group_best renormalise"),
        *_fields(c_float, "epsilon scale"),
    ]


class Beside(ctypes.Structure):
    """`Beside` of model.h."""

    _fields_ = [("experts", Experts), *_fields(c_void_p, "before router after mlp_after")]


class Joint(ctypes.Structure):
    """`Joint` of operators.h: what follows a sublayer."""

    _fields_ = [
        *_fields(c_void_p, "after before"),
        *_fields(c_float, "scale sum_scale"),
        ("parallel", c_int32),
    ]


class PerLayer(ctypes.Structure):
    """`PerLayer` of model.h."""

    _fields_ = [*_fields(Weight, "table projection"), ("norm", c_void_p), ("size", c_int32)]


class RopeTable(ctypes.Structure):
    """`RopeTable` of model.h."""

    _fields_ = [*_fields(c_void_p, "frequencies axes"), ("scale", c_float), ("half", c_int32)]


class _Sublayer(ctypes.Structure):
    _fields_ = [
        *(*_fields(c_void_p, "layer beside"), ("joint", Joint)),
        *_fields(c_int32, "kind input layer_end"),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "sublayers ropes per_layer"),
        *_fields(c_int32, "count rope_count last_mixer hidden mixer_in mixer_out inner centred"),
        *_fields(c_float, "eps logit_scale logit_softcap"),
        ("first", Joint),
        *_fields(Weight, "embedding head"),
    ]


class _Images(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "rows embeddings deep positions"),
        *_fields(ctypes.c_int64, "count layers"),
    ]


class _Decode(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "ids positions draws stops interrupt tokens highest logits"),
        *_fields(ctypes.c_int64, "steps stop_count done"),
    ]


class _States(ctypes.Structure):
    _fields_ = _fields(c_void_p, "read write keep_starts keep_counts keep_slots tensors")


_Attends = AttentionLayer | LatentLayer
Layer = _Attends | RecurrentLayer | MLP | Experts
_KINDS = (AttentionLayer, RecurrentLayer, MLP, Experts, LatentLayer)  # in the order of model.h


class Sublayer(NamedTuple):
    """A layer's mixer or MLP, the joint behind it, the experts beside it, where in a row's inputs
    its own stand, if it has any, and the number of the layer if it is its last."""

    layer: Layer
    joint: Joint
    beside: Beside | None = None
    input: int = -1
    ends: int = -1


class NativeModel:
    """A model of sublayers that were made of weights of the right shapes, which outlive it.

    Args:
        sublayers: at least one attends.
        ropes: the tables that `AttentionLayer.rope` counts.
        first: the joint behind the embedding.
        embedding, head: [vocab_size, hidden] each; one object if they are tied.
        dtype: of the step: float32 or bfloat16.
        per_layer: of the inputs of all layers, if they have some.
        settings: `eps`, `centred`, `logit_scale` and `logit_softcap` (0 for none).
    """

    def __init__(
        self,
        sublayers: Sequence[Sublayer],
        ropes: Sequence[RopeTable],
        first: Joint,
        embedding: PackedLinear,
        head: PackedLinear,
        dtype: torch.dtype,
        per_layer: PerLayer | None = None,
        **settings: float,
    ) -> None:
        self._dtype, self._vocab_size = dtype, head.out_features
        layers = [sublayer.layer for sublayer in sublayers]
        mixers = [x for x in layers if isinstance(x, _Attends | RecurrentLayer)]
        attends = [layer for layer in layers if isinstance(layer, _Attends)]
        self._attends = [
            layer for layer in attends if isinstance(layer, LatentLayer) or not layer.shares
        ]
        self._recurs = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        if not self._attends:
            raise ValueError("no layer attends")
        for layer in attends:
            if bytes(self._attends[layer.pages].heads) != bytes(layer.heads):
                raise ValueError("a layer attends over pages of other heads")
        self._first_of = {
            layer.heads.window != NO_WINDOW: at
            for at, layer in reversed([*enumerate(self._attends)])
        }
        """The first layer without a window, and the first with one."""
        made = [
            _Sublayer(
                ctypes.addressof(layer),
                None if beside is None else ctypes.addressof(beside),
                *(joint, _KINDS.index(type(layer)), at, ends),
            )
            for layer, joint, beside, at, ends in sublayers
        ]
        self._sublayers = (_Sublayer * len(made))(*made)
        self._ropes = (RopeTable * len(ropes))(*ropes)
        self._held = sublayers, embedding, head, per_layer
        self._model = _Model(
            *(ctypes.addressof(self._sublayers), ctypes.addressof(self._ropes)),
            None if per_layer is None else ctypes.addressof(per_layer),
            *(len(sublayers), len(ropes), layers.index(mixers[-1]), embedding.in_features),
            mixer_in=max(map(_columns_in, mixers)),
            mixer_out=max(mixer.out.depth for mixer in mixers),
            inner=max((x.inner for x in layers if isinstance(x, MLP)), default=0),
            first=first,
            embedding=embedding.struct,
            head=head.struct,
            **settings,
        )
        self._pages: Sequence[LayerPages] | None = None
        self._states: Sequence[torch.Tensor] | None = None

    def forward(
        self,
        plan: NativePlan,
        window: NativePlan,
        pages: Sequence[LayerPages],
        states: Sequence[torch.Tensor],
        slots: Sequence[SlotUse],
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        logit_rows: NDArray[np.int64],
        *,
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
    ) -> torch.Tensor:
        """[R, vocab_size] float32 logits of a planned step.

        Args:
            window: the plan of the layers with a window; or the same.
            pages: of each layer that has some; the same object is checked only once.
            states: of each recurrent layer, float32: [slots, width - 1, channels], and unless it is
                a short convolution [slots, heads, key, value]; likewise.
            slots: of each sequence; none if no layer is recurrent.
            token_ids, positions, logit_rows: [T], [T] and [R], contiguous.
            pooled: [P, hidden] float32, which takes the last P of these rows behind the last norm;
                they have no logits.
            images: the rows of images.

        Raises:
            ValueError: the tensors do not fit together, or to the plan.
            IndexError: a token or row that does not exist.
            MemoryError: what the step computes does not fit into memory.
        """
        rows, tokens = len(logit_rows), len(token_ids)
        tables = self._tables(plan, window, pages, token_ids, positions)
        if states is not self._states:
            self._state_addresses, self._states = self._check_states(states), states
        used_slots = _slot_tables(slots, plan, len(states[0])) if self._recurs else []
        used = _States(*(table.ctypes.data for table in used_slots))
        used.tensors = ctypes.addressof(self._state_addresses)
        count = 0 if pooled is None else len(pooled)
        if pooled is not None:
            check(pooled, torch.float32, (min(count, rows), self._model.hidden))
        given = None if images is None else self._check_images(images, tokens)
        logits = torch.empty(rows - count, self._vocab_size)
        kernel("forward", self._dtype)(
            *(*tables, ctypes.addressof(used)),
            *(token_ids.ctypes.data, positions.ctypes.data, logit_rows.ctypes.data, rows),
            *(logits.data_ptr(), None if pooled is None else pooled.data_ptr(), count),
            None if given is None else ctypes.addressof(given),
        )
        return logits

    def decode(
        self,
        plan: NativePlan,
        window: NativePlan,
        pages: Sequence[LayerPages],
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        how: MultiStep,
    ) -> Pair:
        """Run up to S steps of B sequences that decode, none recurrent: the tokens, [B, D] int64,
        and the highest logit of each, [B, D] float32 (`draw_tokens`), of the D steps that were run.

        Args:
            plan, window, pages, positions: as in `forward`, for S new tokens of each sequence.
            token_ids: [B * S], of which the first of each sequence is read.

        Raises:
            ValueError: the tensors do not fit together, or to the plan.
            IndexError: a token that does not exist.
            MemoryError: what the steps compute does not fit into memory.
        """
        tables = self._tables(plan, window, pages, token_ids, positions)
        lens, tokens = plan.query_lens.tolist(), len(token_ids)
        count, steps = len(lens), tokens // max(len(lens), 1)
        fits = len(how.draws) == tokens and lens == [steps] * count
        fits = fits and (window is plan or window.query_lens.tolist() == lens)
        if self._recurs or not steps or not fits:
            raise ValueError(f"{tokens} tokens of {count} sequences are no decodes of one length")
        drawn, highest = torch.empty(count, steps, dtype=torch.int64), torch.empty(count, steps)
        logits, draws = torch.empty(count, self._vocab_size), draw_table(how.draws)
        stops = np.array(how.stops, np.int64)
        use = _Decode(
            *(array.ctypes.data for array in (token_ids, positions, draws, stops)),
            *(ctypes.addressof(how.interrupt), drawn.data_ptr(), highest.data_ptr()),
            *(logits.data_ptr(), steps, len(stops)),
        )
        kernel("decode", self._dtype)(*tables, ctypes.addressof(use))
        return drawn[:, : use.done], highest[:, : use.done]

    def _tables(
        self,
        plan: NativePlan,
        window: NativePlan,
        pages: Sequence[LayerPages],
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> tuple[int | ctypes.Array[Pages], ...]:
        """The addresses of the model, of both batches and of the pages, which fit together."""
        tokens = len(token_ids)
        if positions.shape != (tokens,):
            raise ValueError(f"{tokens} tokens at {len(positions)} positions")
        if pages is not self._pages:
            self._page_structs, self._pages = self._check_pages(pages), pages
        firsts = {windowed: pages[at].k for windowed, at in self._first_of.items()}
        batch = plan.address_for(tokens, firsts.get(False, pages[0].k))
        window_batch = window.address_for(tokens, firsts.get(True, pages[0].k))
        return ctypes.addressof(self._model), batch, window_batch, self._page_structs

    def _check_images(self, images: ImageRows, tokens: int) -> _Images:
        rows, embeddings, deep, positions = images
        count, hidden, (layers, *_) = len(rows), self._model.hidden, deep.shape
        check(rows, torch.int64, (count,))
        check(embeddings, torch.float32, (count, hidden))
        check(deep, torch.float32, (layers, count, hidden))
        if count and not 0 <= int(rows.min()) <= int(rows.max()) < tokens:
            raise IndexError(f"rows of images in a step of {tokens}")
        if positions is not None:
            check(positions, torch.int64, (3, tokens))
        places = (None if t is None else t.data_ptr() for t in images)
        return _Images(*places, count, layers)

    def _check_pages(self, pages: Sequence[LayerPages]) -> ctypes.Array[Pages]:
        """The structures of all pages, layer by layer; those with a window may have other sizes."""
        found = []
        for layer, pair in zip(self._attends, pages, strict=True):
            heads = layer.heads
            first = pages[self._first_of[heads.window != NO_WINDOW]].k
            dims = (*first.shape[:2], *heads.stored_dims)
            found.append(pages_of(pair, first.dtype, dims))
        return (Pages * len(found))(*found)

    def _check_states(self, states: Sequence[torch.Tensor]) -> ctypes.Array[c_void_p]:
        """The addresses of all states: two for each recurrent layer, the second perhaps 0."""
        addresses: list[int] = []
        left = iter(states)
        for layer in self._recurs:
            shapes = [(layer.width - 1, layer.channels), (layer.heads, layer.key, layer.value)]
            for shape in shapes if layer.heads else shapes[:1]:
                tensor = next(left, torch.empty(0))
                check(tensor, torch.float32, (len(states[0]), *shape))
                addresses.append(tensor.data_ptr())
            addresses += [] if layer.heads else [0]
        return (c_void_p * len(addresses))(*addresses)


def _columns_in(mixer: _Attends | RecurrentLayer) -> int:
    """Columns before a mixer's own work; of MLA, as `attend` in model.h says."""
    columns = sum(weight.columns for weight in mixer.inputs)
    if isinstance(mixer, RecurrentLayer):
        columns += sum(weight.columns for weight in mixer.of_latents)
    if not isinstance(mixer, LatentLayer):
        return columns
    heads = mixer.heads
    return heads.heads * heads.dim + max(columns + mixer.q_b.columns, heads.heads * heads.value_dim)


def _slot_tables(slots: Sequence[SlotUse], plan: NativePlan, count: int) -> list[NDArray[np.int64]]:
    """The arrays of `States` in recurrence.h, of slots below `count`.

    Raises:
        ValueError: a slot that does not exist, or a state that no new token leaves.
    """
    keeps = [keep for _, _, of_sequence in slots for keep in of_sequence]
    lens = [len(of_sequence) for _, _, of_sequence in slots]
    read, write, ends, counts, kept = tables = [
        np.array(values, np.int64)
        for values in (
            [read for read, _, _ in slots],
            [write for _, write, _ in slots],
            np.cumsum([0, *lens]),
            [n for n, _ in keeps],
            [slot for _, slot in keeps],
        )
    ]
    used = np.concatenate([read[read != -1], write, kept])
    if len(read) != len(plan.query_lens) or used.min(initial=0) < 0 or used.max(initial=0) >= count:
        raise ValueError(f"the step's states are not in {count} slots, or of other sequences")
    if ((counts < 0) | (counts > np.repeat(plan.query_lens, np.diff(ends)))).any():
        raise ValueError("a state to be kept comes after tokens that the step does not have")
    return tables
