"""Runs the chunks of a step on the model: page tables, page copies, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import PagedBatch, SharedPrefix
from radixcache.kernels.backend import ImageRows, Pair
from radixcache.kernels.cascade import MIN_SAVED, group_by_prefix
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.upload import send
from radixcache.lease import PageCopy, WindowTable
from radixcache.pages import Pages
from radixcache.runtime.engine.sampler import PendingStep
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.model.cuda_graphs import CudaGraphRunner
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel, Unread
from radixcache.runtime.multimodal.features import ImageFeatures
from radixcache.runtime.multimodal.image import EncodeImage
from radixcache.runtime.multimodal.prompt_images import Part
from radixcache.tokens import Tokens


class ModelRunner:
    """One model over one KV pool.

    Attributes:
        graphs: None where there are no CUDA graphs.
    """

    def __init__(
        self,
        model: PagedModel,
        kv_pool: KVPool,
        graphs: CudaGraphRunner | None,
        encode_image: EncodeImage | None = None,
    ) -> None:
        """`encode_image` gives the rows of images, if the model takes some."""
        self._model, self._pool, self.graphs = model, kv_pool, graphs
        self._encode_image = encode_image

    def run(
        self, chunks: list[Chunk], before: PendingStep | None
    ) -> tuple[list[Chunk], torch.Tensor, torch.Tensor | None]:
        """Enqueue a step.

        Args:
            before: the step before; None if its tokens are known here.

        Returns:
            The chunks in the order of the batch, and logits [R, vocab], float32: for the last token
            and the draft of each chunk that ends its sequence, then for the prompt tokens whose
            successors are scored. They are valid until the next call. Last, the rows behind the
            last norm [P, hidden_size] of chunks that end a sequence which asks for its own, or
            None; they have no logits.
        """
        chunks, batch = self._batch(chunks)
        unread = self._unread(chunks, before)
        if unread is not None and len(unread.rows) == len(chunks):  # decodes behind decodes
            ids, rows = np.zeros(len(chunks), np.int32), np.arange(len(chunks))
            return chunks, self._compute(chunks, ids, batch, rows, unread), None
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        wanted, scored, pooled, end = list[int](), list[int](), list[int](), 0
        for chunk in chunks:
            end += chunk.num_new
            if chunk.is_last and chunk.sequence.request.pools:
                pooled.append(end - 1)
            elif chunk.is_last:
                wanted += range(end - 1 - len(chunk.draft), end)
            if chunk.sequence.scoring is not None:
                first = end - chunk.sequence.num_computed  # the row that position 0 would have
                scored += (chunk.scored_positions + first).tolist()
        rows = np.array(wanted + scored + pooled, np.int64)
        place = None
        if pooled:
            place = torch.empty(len(pooled), self._model.hidden_size, device=self._model.device)
        return chunks, self._compute(chunks, tokens, batch, rows, unread, place), place

    def decode(self, chunks: list[Chunk], how: MultiStep) -> Pair:
        """Run several steps of chunks that decode, whose drafts stand for the tokens that are drawn
        on the way; returns what `PagedModel.decode` does."""
        chunks, batch = self._batch(chunks)
        tokens, positions = np.concatenate([chunk.tokens for chunk in chunks]), None
        self._copy_pages(chunks)
        if any(chunk.sequence.request.images is not None for chunk in chunks):
            _, positions = self._place_images(chunks, tokens)
        positions = batch.positions if positions is None else positions
        return self._model.decode(tokens, batch, positions, self._pool, how)

    def _unread(self, chunks: list[Chunk], before: PendingStep | None) -> Unread | None:
        """The unread tokens of the step before that these chunks compute."""
        if before is None:
            return None
        place = {row.sequence: at for at, row in enumerate(before.rows)}
        rows, sources, end = list[int](), list[int](), 0
        for chunk in chunks:
            end += chunk.num_new
            if chunk.is_unread:
                rows.append(end - 1)
                sources.append(place[chunk.sequence])
        return Unread.of(rows, sources, before.tokens) if rows else None

    def _batch(self, chunks: list[Chunk]) -> tuple[list[Chunk], PagedBatch]:
        """The page tables of a step, and its chunks in the order of the batch.

        For CUDA graphs, a decode with a draft becomes several decodes over the same pages, each one
        token longer: a layer writes all new K/V before it attends.
        """
        page_size = self._pool.page_size
        decodes, prefills = list[Chunk](), list[Chunk]()
        for chunk in chunks:
            is_decode = chunk.num_new == 1 or (self.graphs is not None and chunk.num_tokens <= 1)
            (decodes if is_decode else prefills).append(chunk)
        shared: tuple[SharedPrefix, ...] = ()
        if self._model.attention.reads_shared_once:
            min_saved = MIN_SAVED * len(self._pool.layers) // self._pool.page_bytes
            # Without the last page of any row: that of the first one, if there are drafts.
            prefixes = [
                chunk.lease.page_table[: -(-(chunk.end - chunk.num_new + 1) // page_size)]
                for chunk in decodes
            ]
            order, shared = group_by_prefix(prefixes, min_saved)
            decodes = [decodes[i] for i in order]
        chunks = decodes + prefills
        counts = [chunk.num_new for chunk in decodes]
        query_lens = [1] * sum(counts) + [chunk.num_new for chunk in prefills]
        counts += [1] * len(prefills)
        tables, kv_lens = list[Pages](), list[int]()
        for chunk, count in zip(chunks, counts, strict=True):
            end = chunk.end
            tables += [chunk.lease.page_table] * count
            kv_lens += range(end - count + 1, end + 1)
        if shared:
            starts = [0, *accumulate(counts)]
            shared = tuple(
                SharedPrefix(starts[first], starts[first + size] - starts[first], num_pages)
                for first, size, num_pages in shared
            )
        ahead = _ahead(chunks) if self._model.both_ways else None
        batch = PagedBatch.of(tables, query_lens, kv_lens, page_size, shared, ahead=ahead)
        return chunks, self._with_windows(batch, chunks, counts)

    def _with_windows(
        self, batch: PagedBatch, chunks: list[Chunk], counts: list[int]
    ) -> PagedBatch:
        """The batch with the tables of layers with a window, if they are others; a chunk takes so
        many rows."""
        if self._pool.windows is None:
            return batch
        windows = list[WindowTable]()
        for chunk, count in zip(chunks, counts, strict=True):
            assert chunk.lease.window is not None
            windows += [chunk.lease.window] * count
        first = np.array([window.first for window in windows], np.int32)
        window = PagedBatch.of(
            [window.pages for window in windows],
            batch.query_lens.tolist(),
            (batch.kv_lens - first).tolist(),
            self._pool.windows.page_size,
            first=first,
            ahead=batch.ahead,
        )
        starts = (batch.kv_lens - batch.query_lens).tolist()
        spared = [
            window.whole // batch.page_size if start < window.whole else 0
            for window, start in zip(windows, starts, strict=True)
        ]
        return replace(batch.sparing(spared, self._pool.spare_page), window=window)

    def _compute(
        self,
        chunks: list[Chunk],
        tokens: Tokens,
        batch: PagedBatch,
        rows: NDArray[np.integer],
        unread: Unread | None,
        pooled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits of these rows, by a CUDA graph if there is one for the batch; the last of
        them go into `pooled` without logits."""
        self._copy_pages(chunks)
        states = [chunk.states for chunk in chunks if chunk.states is not None]
        more: dict[str, Any] = {} if pooled is None else {"pooled": pooled}
        positions = None
        if any(chunk.sequence.request.images is not None for chunk in chunks):
            images, positions = self._place_images(chunks, tokens)
            more |= {"positions": positions} | ({} if images is None else {"images": images})
        if self.graphs is not None and not more.keys() - {"positions"}:  # others need more room
            logits = self.graphs.run(tokens, batch, rows, unread, states, positions)
            if logits is not None:
                return logits
        return self._model.forward(tokens, batch, rows, self._pool, states, unread, **more)

    def _copy_pages(self, chunks: list[Chunk]) -> None:
        """Copy the pages that the chunks' leases ask for, before they are computed, all in the
        device's order: a page may be evicted and written again while the step before reads it."""
        copies, window_copies = list[PageCopy](), list[PageCopy]()
        for chunk in chunks:
            copies += chunk.lease.take_copies()
            window_copies += chunk.lease.take_window_copies()
        if copies or window_copies:
            self._pool.copy(copies, window_copies)

    def _place_images(
        self, chunks: list[Chunk], tokens: Tokens
    ) -> tuple[ImageRows | None, NDArray[np.int64] | None]:
        """The rows of images in a step, whose `tokens` become 0, and the step's positions if RoPE
        has others than the batch."""
        assert self._encode_image is not None
        device, parts, at = self._model.device, list[tuple[Part, ImageFeatures]](), 0
        places, rows = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        for chunk in chunks:
            start, end, images = chunk.end - chunk.num_new, chunk.end, chunk.sequence.request.images
            found = None if images is None else images.positions(start, end)
            places.append(np.tile(np.arange(start, end), (3, 1)) if found is None else found)
            if images is not None:
                for part in images.parts(start, end):
                    rows.append(part.rows + at)
                    features = images.features.get(part.image.digest)
                    parts.append((part, features or self._encode_image(part.image)))
            at += end - start
        for request in {chunk.sequence.request for chunk in chunks}:
            if request.images is not None:
                request.images.drop_features(request.num_computed)
        positions = np.concatenate(places, axis=1) if self._model.rope_axes else None
        if not parts:
            return None, None if positions is None else positions[0]
        numbers = np.concatenate(rows)
        tokens[numbers] = 0
        images_of_step = ImageRows(
            send(numbers, device),
            torch.cat([features.rows[part.of_image] for part, features in parts]).float(),
            torch.cat([features.deep[:, part.of_image] for part, features in parts], 1).float(),
            None if positions is None else send(positions, device),
        )
        return images_of_step, None if positions is None else positions[0]


def _ahead(chunks: list[Chunk]) -> NDArray[np.int32] | None:
    """`PagedBatch.ahead` of a step."""
    found = list[NDArray[np.int32] | None]()
    for chunk in chunks:
        images = chunk.sequence.request.images
        span = chunk.end - chunk.num_new, chunk.end
        found.append(None if images is None else images.ahead(*span))
    if all(ahead is None for ahead in found):
        return None
    pairs = zip(found, chunks, strict=True)
    return np.concatenate([np.zeros(c.num_new, np.int32) if a is None else a for a, c in pairs])
