"""What several steps in one call must give: the same steps, one call each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import PagedBatch, offsets
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.native.sampling import draw_tokens


def one_step(batch: PagedBatch, left: int) -> PagedBatch:
    """A batch whose sequences have one new token each, and `left` fewer tokens than in `batch`."""
    lens, size = batch.kv_lens - left, batch.page_size
    counts = -(-lens // size)
    starts = batch.kv_indptr.tolist()
    kept = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=False)])
    window, to = batch.window, batch.write_indices
    return PagedBatch(
        qo_indptr=offsets([1] * len(lens)),
        kv_indptr=offsets(counts.tolist()),
        kv_indices=batch.kv_indices[kept],
        kv_last_page_len=((lens - 1) % size + 1).astype(np.int32),
        page_size=size,
        window=None if window is None else one_step(window, left),
        first=batch.first,
        write_indices=None if to is None else to[kept],
    )


def decode_by_steps(
    model: Any,
    token_ids: NDArray[np.integer],
    batch: PagedBatch,
    positions: NDArray[np.integer],
    pool: Any,
    how: MultiStep,
    most: int = 1 << 30,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`PagedModel.decode` by `forward`, of `most` steps."""
    count = len(batch.query_lens)
    steps, rows = len(token_ids) // count, np.arange(count)
    ids, places = (np.array(table).reshape(count, steps) for table in (token_ids, positions))
    draws = [how.draws[s * steps : (s + 1) * steps] for s in range(count)]
    drawn, highest, step = list[torch.Tensor](), list[torch.Tensor](), 0
    last = ids[:, 0].copy()
    while step < min(steps, most):
        now = one_step(batch, steps - 1 - step)
        assert np.array_equal(now.positions, places[:, step]) or now.window is not None
        logits = model.forward(last.copy(), now, rows, pool)
        tokens, best = draw_tokens(logits, [row[step] for row in draws])
        drawn.append(tokens)
        highest.append(best)
        last, step = tokens.numpy().astype(last.dtype), step + 1
        if how.interrupt.value or not best.isfinite().all() or {*last.tolist()} & {*how.stops}:
            break
    return torch.stack(drawn, 1), torch.stack(highest, 1)
