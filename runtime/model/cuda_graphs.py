"""CUDA graphs of the decode step.

A decode step is hundreds of small kernels, which Python launches slower than a GPU runs them. A
graph replays them in one launch, for one batch size and fixed addresses: so there is a graph for
each of a few sizes, a batch is filled up to the next one with rows on the pool's spare page, and
the attention backend plans into buffers that stay where they are. All graphs share one memory pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from radixcache.base import Tokens
from radixcache.kernels.attention import PagedBatch, SharedPrefix
from radixcache.kernels.cascade import MIN_ROWS
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel

_log = logging.getLogger("radixcache")

MAX_INDICES = 1 << 24
"""Page numbers in the tables of one batch; a batch with more runs without a graph."""

_SAMPLING_COPIES = 6  # of the logits: noise, probabilities, what filters take
_GRAPH_BYTES = 8 << 20  # a guess: nodes, and what the pool of all graphs cannot use twice

Compute = Callable[[], torch.Tensor]


class CudaGraphRunner:
    """Runs batches of decodes through graphs, captured by `capture` or when first needed.

    Args:
        model: its attention backend can `plan_fixed`.
        max_num_seqs: the largest batch that the engine makes; larger than the backend's
            `max_fixed_rows`, it runs without a graph.
    """

    def __init__(self, model: PagedModel, pool: KVPool, max_num_seqs: int) -> None:
        self._model, self._pool = model, pool
        self._sizes, most = _limits(model, pool.page_size, max_num_seqs)
        self._max_indices = min(most, self._sizes[-1] * pool.num_pages)
        model.attention.allocate_fixed(self._sizes[-1], self._max_indices)
        self._capture = _Capture(model.device)
        self._replays: dict[tuple[int, bool], Compute | None] = {}  # None: cannot be captured
        self._logits = torch.empty(
            (self._sizes[-1], model.vocab_size), dtype=torch.float32, device=model.device
        )

    def capture(self) -> None:
        """Capture all graphs, the largest first, whose memory the others use again.

        Before the first request: each waits for the device and empties torch's cache of memory.
        """
        start = time.perf_counter()
        for size in reversed(self._sizes):
            for pages in (1, 2) if self._takes_cascade(size) else (1,):
                batch = PagedBatch(
                    qo_indptr=np.arange(size + 1, dtype=np.int32),
                    kv_indptr=np.arange(0, pages * size + 1, pages, dtype=np.int32),
                    kv_indices=np.full(pages * size, self._pool.spare_page, np.int32),
                    kv_last_page_len=np.ones(size, np.int32),
                    page_size=self._pool.page_size,
                    shared=(SharedPrefix(0, size, 1),) * (pages - 1),
                )
                self.run(np.zeros(size, np.int32), batch)
        count = sum(replay is not None for replay in self._replays.values())
        _log.info("captured %d CUDA graphs in %.1f s", count, time.perf_counter() - start)

    def _takes_cascade(self, size: int) -> bool:
        return self._model.attention.reads_shared_once and size >= MIN_ROWS

    @torch.inference_mode()
    def run(self, token_ids: Tokens | torch.Tensor, batch: PagedBatch) -> torch.Tensor | None:
        """Logits [B, vocab] of a batch of decodes, or None if it takes no graph.

        `token_ids` [B] are on the host as an array, or on the device as a tensor.
        The logits are valid until the next call, whatever its batch.
        """
        count = len(token_ids)
        size = next((size for size in self._sizes if size >= count), 0)
        if count != batch.num_decodes or count != len(batch.query_lens) or not size:
            return None
        key = (size, bool(batch.shared))
        if key in self._replays and self._replays[key] is None:
            return None
        if len(batch.kv_indices) + size - count > self._max_indices:
            return None
        batch = pad(batch, size, self._pool.spare_page)
        ids = np.zeros(size, dtype=np.int32)
        if isinstance(token_ids, np.ndarray):
            ids[:count] = token_ids
        inputs = self._model.attention.plan_fixed(batch, ids, batch.positions(), np.arange(size))
        if isinstance(token_ids, torch.Tensor):
            inputs[0][:count].copy_(token_ids)
        if key not in self._replays:
            self._replays[key] = self._try_capture(partial(self._compute, *inputs))
        replay = self._replays[key]
        return None if replay is None else replay()[:count]

    @torch.inference_mode()
    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """The logits, in the one tensor that all graphs write."""
        out = self._logits[: len(token_ids)]
        return self._model.compute(self._pool, token_ids, positions, rows, out)

    def _try_capture(self, compute: Compute) -> Compute | None:
        try:
            return self._capture(compute)
        except Exception as error:  # out of memory, or a model that synchronises
            if None not in self._replays.values():  # tell the first time
                first = str(error).partition("\n")[0]
                _log.warning("some batch sizes of decodes run without a CUDA graph: %s", first)
            return None


def bytes_beside_pages(model: PagedModel, page_size: int, max_num_seqs: int) -> int:
    """Bytes on the device that an engine takes besides the KV pages and a step's activations.

    That is arithmetic for logits, index buffers and FlashInfer's wrappers; for what a graph itself
    keeps, it is a guess.
    """
    logits = max_num_seqs * model.vocab_size
    count = 4 * (1 + _SAMPLING_COPIES) * logits
    if model.attention.max_fixed_rows:
        sizes, most = _limits(model, page_size, max_num_seqs)
        count += model.attention.fixed_bytes(sizes, most)
        count += 2 * len(sizes) * _GRAPH_BYTES + model.dtype.itemsize * logits
    return count


def _limits(model: PagedModel, page_size: int, max_num_seqs: int) -> tuple[list[int], int]:
    """Batch sizes, and page numbers in the tables of a batch if the pool has enough pages."""
    sizes = batch_sizes(min(max_num_seqs, model.attention.max_fixed_rows))
    return sizes, min(MAX_INDICES, sizes[-1] * (model.max_context // page_size + 1))


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes that get a graph, up to `largest`: dense where a row matters most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 32)]
    return [size for size in sizes if size < largest] + [largest]


def pad(batch: PagedBatch, size: int, spare_page: int) -> PagedBatch:
    """A batch of decodes filled up to `size` with sequences of one token on the spare page."""
    missing = size - len(batch.query_lens)
    ends = np.arange(1, missing + 1, dtype=np.int32)
    return PagedBatch(
        qo_indptr=np.arange(size + 1, dtype=np.int32),
        kv_indptr=np.concatenate([batch.kv_indptr, batch.kv_indptr[-1] + ends]),
        kv_indices=np.concatenate([batch.kv_indices, np.full(missing, spare_page, np.int32)]),
        kv_last_page_len=np.concatenate([batch.kv_last_page_len, np.ones(missing, np.int32)]),
        page_size=batch.page_size,
        shared=batch.shared,
    )


class _Capture:
    """Captures computations into CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # one for all: libraries keep memory for each

    def __call__(self, compute: Compute) -> Compute:
        # Once outside of a graph, on another stream: libraries set themselves up in their first
        # run. It writes what the replay will write again.
        side, main = self._side, torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            compute()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device in the meantime.
            with torch.cuda.graph(
                graph, pool=self._memory, stream=side, capture_error_mode="thread_local"
            ):
                result = compute()
        except BaseException:  # an interrupt, too
            torch.cuda.set_stream(main)  # a capture that broke leaves its own
            self._memory = torch.cuda.graph_pool_handle()  # nothing may be left in the old one
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
