"""Finds the merges of a SentencePiece vocabulary, of which there are some half a million."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from radixcache.kernels.native.library import kernel


def find_merges(pieces: Mapping[str, float], others: list[str]) -> list[tuple[str, str]]:
    """All pairs of texts that make a piece: the best score first, then the longest left text.

    Args:
        pieces: scores by the texts that are made.
        others: texts that pieces may be made of, beside the pieces.
    """
    texts = [*pieces, *others]
    counts = np.fromiter(map(len, texts), np.int64, len(texts))
    scores = np.fromiter(pieces.values(), np.float64, len(pieces))
    left, right = np.empty((2, int(counts[: len(pieces)].sum())), np.int32)
    found, text = np.zeros(1, np.int64), "".join(texts).encode()
    arrays = (array.ctypes.data for array in (counts, scores))
    sizes = len(pieces), len(texts), left.ctypes.data, right.ctypes.data, found.ctypes.data
    kernel("find_merges")(text, *arrays, *sizes)
    numbers = (side[: found[0]].tolist() for side in (left, right))
    return list(zip(*(map(texts.__getitem__, side) for side in numbers), strict=True))
