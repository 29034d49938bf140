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
    texts = [*pieces]
    stored = [text.encode() for text in texts + others]
    ends = np.fromiter(map(len, stored), np.int64, len(stored)).cumsum()
    scores = np.fromiter(pieces.values(), np.float64, len(texts))
    room = int(ends[len(texts) - 1]) if texts else 0
    found, cuts = np.empty((2, room), np.int32)
    count, text = np.zeros(1, np.int64), b"".join(stored)
    arrays = (array.ctypes.data for array in (ends, scores))
    sizes = len(texts), len(stored), found.ctypes.data, cuts.ctypes.data, count.ctypes.data
    kernel("find_merges")(text, *arrays, *sizes)
    numbers = found[: count[0]].tolist(), cuts[: count[0]].tolist()
    return [(texts[i][:cut], texts[i][cut:]) for i, cut in zip(*numbers, strict=True)]
