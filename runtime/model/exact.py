"""Exact mode: what may run in it, and whether this model does, on this machine.

In exact mode the KV of a token, and its logits, are bit for bit those of its sequence computed alone,
in one chunk, with nothing cached: a row's arithmetic depends on its own tokens only. What gives that:

- attention, RoPE and norms by the native kernels, in which a row is one chain of operations;
- products on packed weights, whatever their size, whose rows are equal in any number from two on;
- steps and logits of one row are filled up to two (`PagedModel.forward`);
- in transformers' layers, activations that no row shares a vector in (`exact_layers.py`).

None of it is promised by whoever wrote torch and oneDNN. So each load compares, too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels import native
from radixcache.kernels.attention import PagedBatch
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.packed_linear import can_pack
from radixcache.runtime.model.paged_model import PagedModel

_PAGE_SIZE = 4
_TOKENS = 24  # of a sequence that is compared
_HIT = 14  # tokens of a hit that ends in mid-page

# Passes over pages: (sequence, tokens) of each. 0 is the one that the others are compared with, 1
# and 2 come in chunks, 3 goes on from a hit on 0, and of 4, a stranger, nothing is compared.
_PASSES = (
    ((0, _TOKENS),),
    ((1, 1),),
    ((1, 1), (2, 1)),
    ((1, 2), (4, 1)),
    ((1, 3), (2, 2), (4, 2)),
    ((4, 9), (1, 5), (2, 3)),
    ((2, 18), (4, 12), (3, _TOKENS - _HIT), (1, 12)),
)


def require(device: torch.device, dtype: torch.dtype | Literal["auto"]) -> None:
    """Refuse what nothing exact runs on.

    Raises:
        InvalidRequest: another device than a CPU, or another dtype than float32 and bfloat16.
        ModelError: this machine lacks what exact mode needs.
    """
    if device.type != "cpu":
        raise InvalidRequest(f"exact mode runs on a CPU only, not on {device}: say device cpu")
    if dtype not in native.DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise InvalidRequest(f"exact mode computes in float32 or bfloat16, not in {name}")
    if (problem := native.problem()) is not None:
        raise ModelError(f"exact mode needs the native kernels, which are not here: {problem}")
    if not can_pack(dtype):
        name = str(dtype).removeprefix("torch.")
        raise ModelError(f"exact mode needs oneDNN's packed weights, and has none here for {name}")


def describe() -> str:
    """Whether there is an exact mode on this machine, and in which dtypes; or why there is none."""
    cpu, names, reason = torch.device("cpu"), [], ""
    for dtype in native.DTYPES:
        try:
            require(cpu, dtype)
        except ModelError as error:
            reason = str(error)
        else:
            names.append(str(dtype).removeprefix("torch."))
    return f"yes, in {' and '.join(names)}" if names else f"no: {reason}"


def check(model: PagedModel) -> None:
    """Compare, as integers, a sequence in chunks, in company and behind a hit with itself alone.

    Seven forward passes over 1 to 52 tokens, 99 in all, with the threads that torch has now.

    Raises:
        ModelError: KV or logits differ.
    """
    length = min(_TOKENS, model.max_context)
    trial = _Trial(model, length)
    for number, parts in enumerate(_PASSES):
        if any(sequence == 3 for sequence, _ in parts):
            trial.hit(min(_HIT, length - 1))
        trial.run(parts, all_logits=number % 2 == 0)
    if (found := trial.difference()) is not None:
        raise ModelError(
            f"exact mode does not hold for {model.placement}: {found} of a token are other bits in "
            "other chunks or company than alone"
        )


class _Trial:
    """Sequences 0 to 3 of the same tokens, and 4 of others, each in pages of its own."""

    def __init__(self, model: PagedModel, length: int) -> None:
        rng = np.random.default_rng(0)
        self._model, self._length, self._done = model, length, [0] * 5
        same, other = (rng.integers(0, model.vocab_size, length) for _ in range(2))
        self._tokens = [same, same, same, same, other]
        each = -(-length // _PAGE_SIZE)
        self._tables = np.split(rng.permutation(5 * each).astype(np.int32), 5)
        self._pool = model.allocate(5 * each, _PAGE_SIZE)
        self._logits: list[dict[int, torch.Tensor]] = [{} for _ in range(5)]

    def hit(self, count: int) -> None:
        """Let sequence 3 begin behind `count` tokens of sequence 0, the last page of which it copies."""
        whole, rest = divmod(count, _PAGE_SIZE)
        self._tables[3][:whole] = self._tables[0][:whole]
        if rest:
            self._pool.copy([(int(self._tables[0][whole]), int(self._tables[3][whole]), rest)])
        self._done[3] = count

    def run(self, parts: tuple[tuple[int, int], ...], *, all_logits: bool) -> None:
        """One forward pass; logits of all rows, or of the last."""
        starts = {s: self._done[s] for s, _ in parts}
        ends = {s: min(self._length, self._done[s] + count) for s, count in parts}
        ends = {s: end for s, end in ends.items() if end > starts[s]}
        if not ends:
            return
        tables = [self._tables[s][: -(-end // _PAGE_SIZE)] for s, end in ends.items()]
        rows = [(s, at) for s, end in ends.items() for at in range(starts[s], end)]
        batch = PagedBatch(
            qo_indptr=np.cumsum([0, *(end - starts[s] for s, end in ends.items())], dtype=np.int32),
            kv_indptr=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            kv_indices=np.concatenate(tables),
            kv_last_page_len=np.array([(e - 1) % _PAGE_SIZE + 1 for e in ends.values()], np.int32),
            page_size=_PAGE_SIZE,
        )
        wanted = np.arange(len(rows))[0 if all_logits else -1 :]
        tokens = np.array([self._tokens[s][at] for s, at in rows])
        logits = self._model.forward(tokens, batch, wanted, self._pool)
        for row, values in zip(wanted.tolist(), logits, strict=True):
            sequence, at = rows[row]
            self._logits[sequence][at] = values
        for s, end in ends.items():
            self._done[s] = end

    def difference(self) -> str | None:
        """What of sequences 1 to 3 is not as in sequence 0, by its name; the first thing."""
        at = np.arange(self._length)
        slots = [
            torch.from_numpy(t[at // _PAGE_SIZE].astype(np.int64) * _PAGE_SIZE + at % _PAGE_SIZE)
            for t in self._tables[:4]
        ]
        for number, layer in enumerate(self._pool.layers):
            for name, pages in zip(("keys", "values"), layer, strict=True):
                alone, *others = (_bits(pages.flatten(0, 1)[s]) for s in slots)
                if not all(torch.equal(alone, other) for other in others):
                    return f"the {name} of layer {number}"
        for found in self._logits[1:4]:
            for position, logits in found.items():
                if not torch.equal(_bits(logits), _bits(self._logits[0][position])):
                    return "the logits"
        return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as integers: zeros of two signs differ, and a NaN is equal to itself."""
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)
