"""What a machine's kernels compute of a layer: one `Backend` per machine, in a folder of its own.

`torch/`, `native/`, `flashinfer/` and `triton/` have the same files, as far as they have kernels:
`attention`, `operators` (linear, RMS norm, add_norm, RoPE, activation), `experts`, `recurrence`,
`top_p`, as `.py`, or `.h` in C++. A kernel that a folder lacks is torch's. `choose.py` finds out
what runs; the loop over the layers is `runtime/model/layer_loop.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int32
from typing import Any, NamedTuple, Protocol

import torch

from radixcache.kernels.attention import AttentionBackend, AttentionPlan, LayerPages
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.recurrence import Recurrence, StateName, StepStates
from radixcache.kernels.spec import (
    MLP,
    RECURRENT,
    Architecture,
    Attention,
    Experts,
    Weight,
    Weights,
)

Part = tuple[Weight, torch.Tensor | None]
"""A linear's [out, in], in any dtype or quantized, and its bias [out]."""

Linear = Callable[[torch.Tensor], torch.Tensor]

Pair = tuple[torch.Tensor, torch.Tensor]

Heads = tuple[torch.Tensor, ...]
"""Queries and keys, or queries alone."""

ExpertLinear = Callable[..., torch.Tensor]
"""Experts: rows [T, hidden] to their weighted sum; a second argument is what the router reads, if
it is not the rows."""

Mixer = Callable[[torch.Tensor, Mapping[StateName, torch.Tensor], StepStates], torch.Tensor]
"""A recurrent layer without its output linear: rows [T, hidden], the layer's states, which it
updates, and the step's; gives [T, columns of the output]."""

SlotUse = tuple[int, int, Sequence[tuple[int, int]]]
"""A sequence's state slots, as `SequenceStates`: the one that a step reads (-1: zeros), the one
that it writes, and (n, slot), ascending, for the state after the first n new tokens."""


class ImageRows(NamedTuple):
    """The rows of a step that images give, in place of embeddings, and its positions.

    Attributes:
        rows: [N] int64, which of the step's rows, ascending; like the others on its device.
        embeddings: [N, hidden_size] float32, not times `Architecture.embed_scale`.
        deep: [L, N, hidden_size] float32, added to them behind each of the first L layers, which
            are not all (DeepStack).
        positions: [3, T] int64, of RoPE with three axes; None: those of the plan.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor
    deep: torch.Tensor
    positions: torch.Tensor | None = None


class TritonKernels(NamedTuple):
    """Triton's kernels that other backends take; None where they do not run, or nothing asks.

    Attributes:
        recur: the recurrence of delta nets and Mamba 2.
        grouped_product: of rows with the weights of their experts.
        find_linear: finds `triton/linear.py`'s class for quantized weights, if it runs.
    """

    recur: Recurrence | None = None
    grouped_product: Callable[..., torch.Tensor] | None = None
    find_linear: Callable[[], Any] = lambda: None


class Pool(Protocol):
    """The memory that layers write: KV pages, and states if the model is recurrent."""

    @property
    def layers(self) -> Sequence[LayerPages]: ...
    @property
    def states(self) -> Any: ...


class Layers(ABC):
    """All layers of a model, their weights in the form that a backend wants.

    Attributes:
        rounds: not 0 while linears with quantized weights round their rows to 8 bits; None if none
            can.
        multi_step: whether `decode` runs.
    """

    multi_step = False
    rounds: c_int32 | None = None

    @abstractmethod
    def embedding(self, embedding: Weight, head: Weight | None) -> None:
        """At load: take the embedding [vocab_size, hidden_size], and the lm_head's weight; None if
        it is the embedding."""

    @abstractmethod
    def per_layer(self, weights: Weights) -> None:
        """At load: take the weights of the layers' inputs, by the names of `per_layer_shapes`; the
        table stays in its format."""

    @abstractmethod
    def layer(self, number: int, weights: Weights) -> None:
        """At load: take the weights of the next layer, by the names of `layer_shapes`."""

    @abstractmethod
    def loaded(self, last_norm: torch.Tensor) -> None:
        """At load: take the norm before the lm_head, once all layers are read."""

    @abstractmethod
    def run(
        self,
        pool: Pool,
        plan: AttentionPlan,
        states: Sequence[SlotUse] = (),
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocab_size] of a planned step, whose arrays are token ids, positions, logit
        rows, and of a recurrent model those of `slot_arrays`.

        Args:
            states: of a recurrent model, for each sequence of the step; where the plan has the
                arrays, they say the same.
            pooled: [P, hidden_size] float32, which takes the last P of the R rows as they are
                behind the last norm; these have no logits.
            images: of the step; their tokens are any that a layer's own inputs take.
        """

    def decode(self, pool: Pool, plan: AttentionPlan, how: MultiStep) -> Pair:
        """`PagedModel.decode` of steps that are planned, where `multi_step`."""
        raise NotImplementedError


class Backend(ABC):
    """The kernels of one machine for a model's layers; hidden states are [T, hidden_size].

    Args:
        attention: of the same machine; it plans the steps.

    Attributes:
        name: the library and its version, for users.
        weights_by: what multiplies quantized weights, or which are dense, for users.
    """

    name: str

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend,
        triton: TritonKernels = TritonKernels(),  # noqa: B008 - a constant
    ) -> None:
        self.architecture, self.dtype, self.device = architecture, dtype, device
        self.attention, self.triton = attention, triton
        self.weights_by = set[str]()

    def whole(self) -> Layers | None:
        """All layers as one kernel, if there is one; else the loop calls what stands below."""
        return None

    def threads(self) -> AbstractContextManager[None]:
        """The context for a thread that runs steps: it sets the threads that torch uses."""
        return nullcontext()

    # -- at load -------------------------------------------------------------------------------

    @abstractmethod
    def linear(self, *parts: Part) -> Linear:
        """One linear of the rows of all parts."""

    @abstractmethod
    def heads_linear(self, weight: Weight, heads: int) -> Linear:
        """A linear for each head, of a weight [heads * out, in] that has them below each other:
        [T, heads, in] to [T, heads, out]."""

    @abstractmethod
    def gate_up(self, gate: Part, up: Part) -> Any:
        """The linears whose results `activation` takes."""

    @abstractmethod
    def experts(self, spec: Experts, weights: Weights) -> ExpertLinear:
        """The experts of a layer with these weights."""

    @abstractmethod
    def mixer(self, spec: RECURRENT, weights: Weights) -> Mixer:
        """A recurrent layer with these weights."""

    @abstractmethod
    def norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A norm's weight as `norm` takes it."""

    # -- in a step -----------------------------------------------------------------------------

    @abstractmethod
    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        """RMSNorm, or LayerNorm where the architecture is centred, over the last dimension; `eps`
        is the architecture's where it is None."""

    @abstractmethod
    def add_norm(self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
        """The sum of both, which may be overwritten, and its norm."""

    @abstractmethod
    def head_norms(self, spec: Attention, heads: Heads, norms: Mapping[str, torch.Tensor]) -> Heads:
        """Queries and keys [T, heads * head_dim], normed each or all heads at once, by the norms of
        these names; they may be overwritten."""

    @abstractmethod
    def rope_positions(self, positions: torch.Tensor) -> list[Any]:
        """Once per step, for each RoPE: the rows' positions [T], or [3, T] in a step with images,
        in the form that `rope` needs."""

    @abstractmethod
    def rope(self, heads: Heads, positions: Any) -> Heads:
        """Queries and keys [T, heads, head_dim] with RoPE; they may be overwritten."""

    @abstractmethod
    def activation(self, mlp: MLP, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        """The activations [T, inner] between the linears of an MLP (SwiGLU and its kin), by those
        of `gate_up`, or of `linear` where there is no gate."""
