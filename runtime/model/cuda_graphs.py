"""CUDA graphs of decode steps, and of steps with some hundred tokens of prompts.

A step is hundreds of small kernels, which Python launches more slowly than a GPU runs them. A graph
replays them in one launch, for one batch shape and fixed addresses. So a few shapes have graphs, a
batch is padded to the next shape with rows on the pool's spare page and spare state, and the
attention backend plans into buffers at fixed addresses. All graphs share one memory pool.

vLLM and SGLang also capture prefills (full and piecewise graphs).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import first_line
from radixcache.kernels.attention import AttentionBackend, AttentionPlan, PagedBatch, SharedPrefix
from radixcache.kernels.capture import Capture, Compute
from radixcache.kernels.cascade import MIN_ROWS
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel, Unread
from radixcache.runtime.model.state_pool import slot_arrays
from radixcache.states.recurrent import SequenceStates
from radixcache.tokens import Tokens

_log = logging.getLogger("radixcache")

MAX_INDICES = 1 << 24
"""Page numbers in the tables of one batch; a batch with more runs without a graph."""

PREFILL_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Sizes in new tokens of the graphs with prefill; longer steps keep a GPU busy without one."""

PREFILL_SEQUENCES = (2, 8, 24, 64)
"""Sizes in sequences of the graphs with prefill; at least one sequence is padding."""

_SLOT_ARRAYS = 9 * (PREFILL_TOKENS[-1] + 8)
"""int32s of `slot_arrays` at most."""

_SAMPLING_COPIES = 6  # of the logits: noise, probabilities, what filters take
_GRAPH_BYTES = 8 << 20  # a guess: nodes, and what the pool of all graphs cannot use twice


class Shape(NamedTuple):
    """The shape of one graph.

    Attributes:
        tokens: rows of the step.
        sequences: sequences, and rows that give logits; with decodes only, as many as tokens.
        cascade: whether decodes read a shared prefix once per group.
    """

    tokens: int
    sequences: int
    cascade: bool = False

    @property
    def only_decodes(self) -> bool:
        return self.tokens == self.sequences


class CudaGraphRunner:
    """Runs steps through graphs, captured by `capture` or when first needed.

    Args:
        model: its attention backend can `plan_fixed`.
        max_rows: the most sequences of a step, with each drafted token counted as one; steps with
            more than the model's `max_graph_rows` run without a graph.
    """

    def __init__(self, model: PagedModel, pool: KVPool, max_rows: int) -> None:
        self._model, self._pool = model, pool
        self._sizes, self._prefills, most = _limits(model, pool.page_size, max_rows)
        most = min(most, self._sizes[-1] * pool.num_pages)
        self._max_indices = most + _spare_indices(self._prefills, pool.page_size)
        most = self._max_indices + _SLOT_ARRAYS * bool(model.state_shapes)
        model.attention.allocate_fixed(self._sizes[-1], most)
        self._capture = Capture(model.device)
        self._replays: dict[Shape, Compute | None] = {}  # None: cannot be captured
        rows = max([self._sizes[-1], *(shape.sequences for shape in self._prefills)])
        self._logits = torch.empty(
            (rows, model.vocab_size), dtype=torch.float32, device=model.device
        )

    def capture(self) -> None:
        """Capture all graphs, the largest first, because the others reuse its memory.

        Call it before the first request: each capture waits for the device and empties torch's
        memory cache.
        """
        start = time.perf_counter()
        free = _free_memory(self._model.device)
        decodes = [
            Shape(size, size, cascade)
            for size in reversed(self._sizes)
            for cascade in (False, True)[: 1 + self._takes_cascade(size)]
        ]
        for shape in [*reversed(self._prefills), *decodes]:
            self._capture_shape(shape)
        count = sum(replay is not None for replay in self._replays.values())
        _log.info(
            "captured %d CUDA graphs in %.1f s; they take %.0f MiB", count,
            time.perf_counter() - start, (free - _free_memory(self._model.device)) / 2**20,
        )  # fmt: skip

    def _spare_batch(self, shape: Shape) -> PagedBatch:
        """A batch of padding; with a cascade, all its sequences share one more page."""
        none = np.empty(0, np.int32)
        start, page = np.zeros(1, np.int32), self._pool.spare_page
        batch = PagedBatch(start, start, none, none, self._pool.page_size)
        if self._pool.windows is not None:
            size = self._pool.windows.page_size
            batch = replace(batch, window=PagedBatch(start, start, none, none, size, first=none))
        batch = pad(batch, shape, page)
        if not shape.cascade:
            return batch
        return replace(
            batch,
            kv_indptr=2 * batch.kv_indptr,
            kv_indices=np.repeat(batch.kv_indices, 2),
            shared=(SharedPrefix(0, shape.sequences, 1),),
        )

    def _takes_cascade(self, size: int) -> bool:
        return self._model.attention.reads_shared_once and size >= MIN_ROWS

    def run(
        self,
        token_ids: Tokens,
        batch: PagedBatch,
        logit_rows: NDArray[np.integer],
        unread: Unread | None = None,
        states: Sequence[SequenceStates] = (),
        positions: NDArray[np.integer] | None = None,
    ) -> torch.Tensor | None:
        """Logits [R, vocab_size], float32, valid until the next call; None if no graph fits.

        Args:
            token_ids: [T] the step's new tokens.
            batch: the step's page tables.
            logit_rows: [R] rows of the flat batch that give logits.
            unread: those of `token_ids` that only the device knows.
            states: of a recurrent model, for each sequence of `batch`.
            positions: [T] of RoPE, if they are others than the batch's.
        """
        shape = self._shape(len(token_ids), batch, len(logit_rows))
        if batch.write_indices is not None:  # has more page numbers than there are buffers for
            return None
        if shape is None or (shape in self._replays and self._replays[shape] is None):
            return None
        padded = pad(batch, shape, self._pool.spare_page)
        tables = [table for table in (padded, padded.window) if table is not None]
        if max(len(table.kv_indices) for table in tables) > self._max_indices:
            return None
        if shape not in self._replays:
            self._capture_shape(shape)
        return self._run(shape, token_ids, padded, logit_rows, unread, states, positions)

    def _shape(self, tokens: int, batch: PagedBatch, rows: int) -> Shape | None:
        """The smallest shape that holds a step."""
        sequences = len(batch.query_lens)
        if batch.num_decodes == sequences:
            size = next((size for size in self._sizes if size >= tokens), None)
            return None if size is None else Shape(size, size, bool(batch.shared))
        if batch.shared:  # a cascade saves more than a graph
            return None
        for shape in self._prefills:
            if shape.tokens >= tokens and shape.sequences > sequences and shape.sequences >= rows:
                return shape
        return None

    @torch.inference_mode()
    def _capture_shape(self, shape: Shape) -> None:
        """Capture a step of padding alone: it runs once before, which would move states on."""
        none = np.empty(0, np.int32)
        plan = self._plan(shape, none, self._spare_batch(shape), none, ())
        assert plan is not None
        self._replays[shape] = self._try_capture(partial(self._compute, shape, plan))

    @torch.inference_mode()
    def _run(
        self,
        shape: Shape,
        token_ids: Tokens,
        batch: PagedBatch,
        logit_rows: NDArray[np.integer],
        unread: Unread | None,
        states: Sequence[SequenceStates],
        positions: NDArray[np.integer] | None,
    ) -> torch.Tensor | None:
        """`run` for a batch that is padded to `shape`."""
        replay = self._replays[shape]
        plan = replay and self._plan(shape, token_ids, batch, logit_rows, states, positions)
        if replay is None or plan is None:
            return None
        if unread is not None:
            unread.write(plan.arrays[0])
        return replay()[: len(logit_rows)]

    def _plan(
        self,
        shape: Shape,
        token_ids: Tokens,
        batch: PagedBatch,
        logit_rows: NDArray[np.integer],
        states: Sequence[SequenceStates],
        given: NDArray[np.integer] | None = None,
    ) -> AttentionPlan | None:
        """A plan at the addresses that a graph reads; None if it keeps too many states."""
        count, arrays = len(token_ids), []
        ids, rows = np.zeros(shape.tokens, np.int32), np.zeros(shape.sequences, np.int32)
        rows[: len(logit_rows)] = logit_rows
        # All padding is one token at one position, so that all of it writes the same K/V.
        positions = batch.positions.copy()
        positions[count:] = 0
        if given is not None:
            positions[:count] = given
        ids[:count] = token_ids
        if self._pool.states is not None:
            spare = self._pool.states.num_slots
            padding = [SequenceStates(-1, spare)] * (shape.sequences - len(states))
            found = slot_arrays(batch, [*states, *padding], spare)
            if found is None:
                return None
            arrays = found
        return self._model.attention.plan_fixed(batch, ids, positions, rows, *arrays)

    @torch.inference_mode()
    def _compute(self, shape: Shape, plan: AttentionPlan) -> torch.Tensor:
        """The logits, in the tensor that all graphs write."""
        return self._model.compute(self._pool, plan, self._logits[: shape.sequences])

    def _try_capture(self, compute: Compute) -> Compute | None:
        try:
            return self._capture(compute)
        except Exception as error:  # out of memory, or a model that synchronises
            if None not in self._replays.values():  # warn once
                _log.warning("some steps run without a CUDA graph: %s", first_line(error))
            return None


def bytes_beside_pages(model: PagedModel, page_size: int, max_rows: int) -> int:
    """Bytes on the device that an engine takes besides the KV pages and a step's activations.

    Logits, index buffers and FlashInfer's wrappers are computed; a graph's own memory is a guess.
    """
    logits = max_rows * model.vocab_size
    count = 4 * (1 + _SAMPLING_COPIES) * logits
    if model.max_graph_rows:
        sizes, prefills, most = _limits(model, page_size, max_rows)
        count += model.attention.fixed_bytes(sizes, most + _spare_indices(prefills, page_size))
        count += (2 * len(sizes) + len(prefills)) * _GRAPH_BYTES + model.dtype.itemsize * logits
        count += model.bytes_per_state  # the spare slot
    return count


def _limits(model: PagedModel, page_size: int, max_rows: int) -> tuple[list[int], list[Shape], int]:
    """Batch sizes of decodes, shapes with prefill, and the most page numbers of a batch if the pool
    has enough pages."""
    sizes = batch_sizes(min(max_rows, model.max_graph_rows))
    most = min(MAX_INDICES, sizes[-1] * (model.max_context // page_size + 1))
    return sizes, prefill_shapes(model.attention, max_rows), most


def _spare_indices(prefills: list[Shape], page_size: int) -> int:
    """Page numbers that pad an empty step, however few pages the pool has."""
    fills = (-(-shape.tokens // page_size) + shape.sequences for shape in prefills)
    return max(fills, default=0)


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes that get a graph, up to `largest`: dense where one row matters most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 32)]
    return [size for size in sizes if size < largest] + [largest]


def prefill_shapes(attention: AttentionBackend, max_rows: int) -> list[Shape]:
    """The shapes of steps with prefill that get a graph, the smallest first.

    fa2 sizes its query tiles for the rows that one sequence could have if the others have one each.
    So there are two rows or more per sequence: else a chunk would read its pages in small tiles.
    """
    largest = next((n for n in PREFILL_SEQUENCES if n > max_rows), PREFILL_SEQUENCES[-1])
    return [
        Shape(tokens, sequences)
        for tokens in PREFILL_TOKENS
        for sequences in PREFILL_SEQUENCES
        if tokens <= attention.max_fixed_tokens and 2 * sequences <= tokens
        if sequences <= largest
    ]


def pad(batch: PagedBatch, shape: Shape, spare_page: int) -> PagedBatch:
    """A batch padded on the spare page: with decodes of one token, or with one prefill of all
    missing tokens and sequences without new tokens."""
    missing = shape.sequences - len(batch.kv_last_page_len)
    if not missing:
        return batch
    tokens, end, size = batch.qo_indptr.item(-1), batch.kv_indptr.item(-1), batch.page_size
    length, ends = 1, [*range(tokens + 1, tokens + 1 + missing)]
    if not shape.only_decodes:
        length, ends = max(1, shape.tokens - tokens), [shape.tokens] * missing
    first, others = -(-length // size), missing - 1  # pages of the first, one for each other
    last_page_len = [(length - 1) % size + 1, *[1] * others]
    return PagedBatch(
        qo_indptr=_extended(batch.qo_indptr, ends),
        kv_indptr=_extended(batch.kv_indptr, range(end + first, end + first + missing)),
        kv_indices=_extended(batch.kv_indices, [spare_page] * (first + others)),
        kv_last_page_len=_extended(batch.kv_last_page_len, last_page_len),
        page_size=size,
        shared=batch.shared,
        window=None if batch.window is None else pad(batch.window, shape, spare_page),
        first=None if batch.first is None else _extended(batch.first, [0] * missing),
    )


def _extended(array: NDArray[np.int32], numbers: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate([array, np.array(numbers, np.int32)])


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
