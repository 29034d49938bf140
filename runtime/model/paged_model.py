"""The interface of a model to an engine: it runs over KV pages, one flat step at a time.

The step's tokens are rows with explicit positions, as if they were one text. Only attention knows
which sequence a row belongs to, and finds its keys by the step's page tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int32
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import ModelError
from radixcache.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
    LayerKind,
    PagedBatch,
    fp8_pages,
)
from radixcache.kernels.backend import ImageRows, Pair
from radixcache.kernels.choose import choose_attention
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.kv_format import FP8, stored_dim
from radixcache.kernels.native.library import problem
from radixcache.kernels.recurrence import StateShapes
from radixcache.kernels.upload import send
from radixcache.runtime.checkpoints.pooling import Pooling
from radixcache.runtime.model.generation import GenerationDefaults
from radixcache.runtime.model.kv_pool import (
    KVPool,
    LayerShape,
    WindowLayout,
    bytes_per_page,
    bytes_per_token,
)
from radixcache.runtime.model.pooler import Pooler
from radixcache.runtime.model.state_pool import StatePool, slot_arrays

if TYPE_CHECKING:
    from radixcache.states.recurrent import SequenceStates


class Unread(NamedTuple):
    """Tokens of a step that only the device knows yet: `tokens` [n] belong in `rows`."""

    rows: list[int]
    tokens: torch.Tensor

    @classmethod
    def of(cls, rows: list[int], sources: list[int], tokens: torch.Tensor) -> Unread:
        """Make it from a step's rows and the places of their tokens in `tokens` [R]."""
        same = sources == list(range(len(tokens)))
        return cls(rows, tokens if same else tokens[send(sources, tokens.device)])

    def write(self, token_ids: torch.Tensor) -> None:
        """Write them into the step's `token_ids` [T]."""
        if self.rows == list(range(len(self.rows))):
            token_ids[: len(self.rows)].copy_(self.tokens)
        else:
            at = send(self.rows, token_ids.device)
            token_ids.index_copy_(0, at, self.tokens.to(token_ids.dtype))


class PagedModel(ABC):
    """A causal LM over KV pages.

    Attributes:
        model_type: transformers' name of the model's family.
        generation_config: the model's default sampling.
        attention: the backend that plans this model's steps.
        dtype, device: of the weights.
        kinds: of all layers that attend, in order.
        kv_dtype: of the KV pages; `kv_cache_dtype` is its name, "auto" that of `dtype`.
        shapes: a token's KV in each layer as it is stored, for `KVPool`.
        windows: of each layer; None sees all tokens.
        vocab_size: width of the logits.
        hidden_size: width of the rows behind the last norm.
        max_context: the most tokens that a sequence may have.
        eos_token_ids: the tokens that end a text, by the model's generation config, without those
            outside its vocabulary.
        exact: whether a row's bits depend only on its own tokens; see `exact.py`.
    """

    state_shapes: StateShapes = MappingProxyType({})
    """The states of a sequence, if the model is recurrent."""

    rope_axes = both_ways = False
    """Whether images have three positions, and whether their rows see each other both ways."""

    multi_step = False
    """Whether `decode` runs."""

    plans_slots = False
    """Whether a plan takes `slot_arrays` to the device."""

    layers_by: str
    """The library whose code computes the layers, for `placement`."""

    rounds: c_int32 | None = None
    """Not 0 while products with quantized weights round their rows to 8 bits; None if none can."""

    hidden_size: int

    pooler = Pooler(Pooling())
    """What becomes of rows behind the last norm."""

    kept = ""
    """The form of stored weights, for `placement`, if it is not the model's dtype."""

    def __init__(
        self,
        model_type: str,
        generation_config: GenerationDefaults,
        dtype: torch.dtype,
        device: torch.device,
        kinds: Sequence[LayerKind],
        vocab_size: int,
        max_context: int | None,
        eos_token_id: int | list[int] | None,
        attention: AttentionBackend | None = None,
        exact: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        """
        Args:
            kinds: of all layers, in order.
            max_model_len: no sequence may be longer; None is no limit.
            eos_token_id: the config's, for a generation config without one.
            attention: the backend; None chooses the fastest that works.
        """
        self.exact = exact
        self.model_type, self.generation_config = model_type, generation_config
        self.dtype, self.device = dtype, device
        self.vocab_size = vocab_size
        self.kinds = list(kinds)
        self.windows = [kind.window for kind in kinds]
        self.store_kv(dtype, "auto")
        self.attention = attention or choose_attention(device, dtype, kinds)
        if max_context is not None and (type(max_context) is not int or max_context < 0):
            raise ModelError(f"the model's max_position_embeddings is {max_context}")
        self.max_context = min(max_context or 1 << 30, max_model_len or 1 << 30)
        eos = generation_config.eos_token_id
        eos = eos_token_id if eos is None else eos
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if any(type(token) is not int for token in ends):
            raise ModelError(f"the tokens that end a text cannot be {eos!r}")
        self.eos_token_ids = [token for token in ends if 0 <= token < vocab_size]

    def store_kv(
        self, dtype: torch.dtype, name: str, scales: Sequence[tuple[float, float]] = ()
    ) -> None:
        """Keep KV in pages of `dtype`, which the backend takes; `scales` are those of each layer's
        keys and values in fp8."""
        self.kv_dtype, self.kv_cache_dtype, self._scales = dtype, name, scales
        self.shapes = [
            LayerShape(k.kv_heads, stored_dim(k.head_dim, dtype), stored_dim(k.value_dim, dtype))
            for k in self.kinds
        ]

    @property
    def quantized_activations(self) -> bool:
        """Whether products with quantized weights round their rows to 8 bits."""
        return self.rounds is not None and bool(self.rounds.value)

    @property
    def max_graph_rows(self) -> int:
        """Sequences of a step that a CUDA graph may run; 0 if there are no graphs."""
        return self.attention.max_fixed_rows

    @property
    def can_overlap(self) -> bool:
        """Whether a step may be enqueued while the one before is computed."""
        return self.device.type != "cpu"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token keeps in all layers."""
        return bytes_per_token(self.shapes, self.kv_dtype)

    @property
    def placement(self) -> str:
        """One line: the model, its device, its layers and its attention."""
        place = str(self.device)
        if self.device.type == "cuda":
            place += f" ({torch.cuda.get_device_name(self.device)})"
        dtype = str(self.dtype).removeprefix("torch.")
        more = "" if self.kv_cache_dtype == "auto" else f", KV in {self.kv_cache_dtype}"
        more += ", activations in 8 bits" if self.quantized_activations else ""
        more += ", exact" if self.exact else ""
        if self.device.type == "cpu" and (reason := problem()) is not None:
            more += f"; slower without the native kernels ({reason})"
        return (
            f"{self.model_type}{self.kept} in {dtype} on {place}, layers by {self.layers_by}, "
            f"attention by {self.attention.name}{more}"
        )

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a sequence's state in all layers; 0 without one, or of one-tap convolutions."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.state_shapes.values())

    def bytes_per_page(self, page_size: int, windows: WindowLayout | None = None) -> int:
        """Bytes of a page in all layers, or in those of either kind."""
        return bytes_per_page(self.shapes, page_size, self.kv_dtype, windows)

    def allocate(
        self,
        num_pages: int,
        page_size: int,
        num_states: int = 0,
        windows: WindowLayout | None = None,
    ) -> KVPool:
        """A pool of KV pages for this model, and of states if it is recurrent."""
        dtype = torch.uint8 if self.kv_dtype == FP8 else self.kv_dtype  # torch copies no fp8
        pool = KVPool(self.shapes, num_pages, page_size, dtype, self.device, windows)
        if self.kv_dtype == FP8:
            pool.layers = [
                fp8_pages(k, v, *scales)
                for (k, v), scales in zip(pool.layers, self._scales, strict=True)
            ]
        if self.state_shapes:
            pool.states = StatePool(self.state_shapes, num_states, self.device)
        return pool

    @torch.inference_mode()
    def forward(
        self,
        token_ids: NDArray[np.integer],
        batch: PagedBatch,
        logit_rows: NDArray[np.integer],
        pool: KVPool,
        states: Sequence[SequenceStates] = (),
        unread: Unread | None = None,
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
        positions: NDArray[np.integer] | None = None,
    ) -> torch.Tensor:
        """Run one step: write the new tokens' KV into `pool` and return logits.

        Args:
            token_ids: [T] the new tokens, in the order of `batch`.
            batch: the step's page tables.
            logit_rows: [R] rows of the flat batch that give logits; may be empty.
            pool: the pages that `batch` numbers.
            states: of a recurrent model, for each sequence of `batch`.
            unread: those of `token_ids` that only the device knows.
            pooled: [P, hidden_size] float32, which takes the last P of `logit_rows` as they are
                behind the last norm; these have no logits.
            images: the rows that images give.
            positions: [T] of RoPE, if they are others than the batch's.

        Returns:
            [R - P, vocab_size] float32, on the model's device.
        """
        arrays = (self.plans_slots and slot_arrays(batch, states)) or []
        positions = batch.positions if positions is None else positions
        plan = self.attention.plan(batch, token_ids, positions, logit_rows, *arrays)
        if unread is not None:
            unread.write(plan.arrays[0])
        with self._step(batch, pool, states):
            logits = self._logits(pool, plan, states, pooled, images)
        return logits if logits.dtype == torch.float32 else logits.float()

    def decode(
        self,
        token_ids: NDArray[np.integer],
        batch: PagedBatch,
        positions: NDArray[np.integer],
        pool: KVPool,
        how: MultiStep,
    ) -> Pair:
        """Run up to S steps of B sequences that decode, one token a step, where `multi_step`.

        Args:
            token_ids: [B * S], of which the first of each sequence is read.
            batch: the tables of S new tokens of each sequence.
            positions: [B * S] of RoPE.

        Returns:
            Of the D steps that were run, the tokens, [B, D] int64, and the highest logit behind
            each, [B, D] float32, not finite where no token could be chosen.
        """
        raise NotImplementedError

    def _step(
        self, batch: PagedBatch, pool: KVPool, states: Sequence[SequenceStates]
    ) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.inference_mode()
    def compute(
        self,
        pool: KVPool,
        plan: AttentionPlan,
        out: torch.Tensor | None = None,
        states: Sequence[SequenceStates] = (),
    ) -> torch.Tensor:
        """`forward` of a planned step, whose arrays are token ids, positions, logit rows and
        perhaps `slot_arrays`; the logits go into `out` if it is given."""
        logits = self._logits(pool, plan, states)
        return logits.float() if out is None else out.copy_(logits)

    def threads(self) -> AbstractContextManager[None]:
        """The context for a thread that runs steps: it sets the threads that torch uses."""
        return nullcontext()

    @abstractmethod
    def _logits(
        self,
        pool: KVPool,
        plan: AttentionPlan,
        states: Sequence[SequenceStates],
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
    ) -> torch.Tensor:
        """[R - P, vocab_size] of the planned step in any dtype."""
