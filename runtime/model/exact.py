"""Exact mode: where it runs, and a check of this model on this machine.

In exact mode a token's KV and logits are bit for bit those of its sequence computed alone, in one
chunk, with nothing cached: a row's arithmetic depends only on its own tokens. The reasons are:

- attention, RoPE and norms by the native kernels, in which a row is one chain of operations;
- linear layers on packed weights, in which a row's sums have one order in any company;
- a row's experts are added in the order of their numbers, and recurrent layers go token by token.

So it holds by construction where the native loop runs a model; each load compares, too.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels.native.library import DTYPES, problem
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.selfcheck import PagedTexts

_PAGE_SIZE = 4
_TOKENS = 24  # of a sequence that is compared
_HIT = 14  # tokens of a hit that ends in mid-page

# Forward passes: (sequence, tokens) of each part. The others are compared with sequence 0: 1 and 2
# come in chunks, and 3 continues from a hit on 0. Sequence 4 is only company.
_PASSES = (
    ((0, _TOKENS),),
    ((1, 1),),
    ((1, 1),),
    ((2, 1),),
    ((1, 1), (2, 1)),
    ((4, 1), (1, 2)),
    ((1, 3), (2, 2), (4, 2)),
    ((4, 9), (1, 5), (2, 3)),
    ((2, 18), (4, 12), (3, _TOKENS - _HIT), (1, 12)),
)


def require(device: torch.device, dtype: torch.dtype | Literal["auto"]) -> None:
    """Refuse devices, dtypes and machines without an exact mode.

    Raises:
        InvalidRequest: another device than a CPU, or another dtype than float32 and bfloat16.
        ModelError: this machine lacks what exact mode needs.
    """
    if device.type != "cpu":
        raise InvalidRequest(f"exact mode runs on a CPU only, not on {device}: say device cpu")
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise InvalidRequest(f"exact mode computes in float32 or bfloat16, not in {name}")
    if (reason := problem()) is not None:
        raise ModelError(f"exact mode needs the native kernels, which are not here: {reason}")


def describe() -> str:
    """Whether this machine has an exact mode, and in which dtypes; or why not."""
    try:
        require(torch.device("cpu"), torch.float32)
    except ModelError as error:
        return f"no: {error}"
    return f"yes, in {' and '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"


def check(model: PagedModel) -> None:
    """Compare, as integers, a sequence in chunks, in company and behind a hit with itself alone.

    Nine forward passes over 1 to 50 tokens, 106 in all, with the threads that torch has now.

    Raises:
        ModelError: KV or logits differ.
    """
    found = _compare(model)
    if found is not None:
        raise ModelError(
            f"exact mode does not hold for {model.placement}: {found} of a token are other bits in "
            "other chunks or company than alone"
        )


def _compare(model: PagedModel) -> str | None:
    """The name of the first thing whose bits differ from those alone; None if all agree."""
    length, size = min(_TOKENS, model.max_context), _PAGE_SIZE
    same, other = np.random.default_rng(0).integers(0, model.vocab_size, (2, length)).tolist()
    texts, hit = PagedTexts(model, [same] * 4 + [other], size), min(_HIT, length - 1)
    logits: list[dict[int, torch.Tensor]] = [{} for _ in texts.tables]
    for number, parts in enumerate(_PASSES):
        if number == len(_PASSES) - 1:  # the last page of the hit is copied
            texts.done[3] = hit
            (whole, rest), (from_0, to_3) = divmod(hit, size), texts.tables[::3]
            texts.pool.copy([(int(from_0[whole]), int(to_3[whole]), rest)])
            to_3[:whole] = from_0[:whole]
        counts = {s: min(count, length - texts.done[s]) for s, count in parts}
        counts = {s: count for s, count in counts.items() if count}
        places = [(s, texts.done[s] + i) for s, count in counts.items() for i in range(count)]
        if not places:
            continue
        wanted = np.arange(len(places))[-1 if number % 2 else 0 :]  # now one row, now all
        # A recurrent model keeps sequence 0's state where sequence 3 goes on.
        found = texts.run(counts, wanted, () if number else ((hit, 3),))
        for row, values in zip(wanted, found, strict=True):
            sequence, at = places[row]
            logits[sequence][at] = values
    at = np.arange(length)
    tables = np.array(texts.tables[:4], np.int64)
    slots = torch.from_numpy(tables[:, at // size] * size + at % size)
    return _difference(texts.pool, slots, logits)


def _difference(
    pool: KVPool, slots: torch.Tensor, logits: list[dict[int, torch.Tensor]]
) -> str | None:
    """The name of the first thing in sequences 1 to 3 that differs from sequence 0."""
    for number, layer in enumerate(pool.layers):
        for name, pages in zip(("keys", "values"), layer, strict=True):
            alone, *others = _bits(pages.flatten(0, 1)[slots])
            if not all(torch.equal(alone, other) for other in others):
                return f"the {name} of layer {number}"
    alone_logits, *others_logits = logits[:4]
    for found in others_logits:
        if not all(torch.equal(_bits(v), _bits(alone_logits[at])) for at, v in found.items()):
            return "the logits"
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as bytes: the two zeros differ, and a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)
