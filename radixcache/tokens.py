"""Token ids, as the interface takes them and as the index keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import InvalidRequest

Tokens = NDArray[np.int32]
"""Token ids, one-dimensional int32."""

TokensLike = Tokens | Sequence[int]
"""The tokens that the interface accepts; it converts anything but an int32 array once."""

_INT32 = np.dtype(np.int32)

_GLANCE, _MANY = 256, 8192
"""More than `_MANY` tokens are compared only if the first `_GLANCE` are equal: most mismatches come
early. With fewer tokens, the second comparison costs more than it saves."""


def as_tokens(tokens: TokensLike) -> Tokens:
    """Convert tokens to a one-dimensional int32 array, without a copy if they are one already;
    `InvalidRequest` unless they are a flat sequence of 32-bit integers."""
    try:
        array = np.asarray(tokens)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # rows of different lengths, or an object that cannot become an array
        raise InvalidRequest("tokens must be a flat sequence of integers") from None
    if array is tokens and array.dtype == _INT32 and array.ndim == 1:
        return array
    hides = isinstance(tokens, np.ma.MaskedArray)  # `array` has the numbers behind the mask, too
    if hides or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest("tokens must be a flat sequence of integers")
    if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise InvalidRequest("token ids must fit 32 bits")
    return array.astype(np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two equally long, non-empty arrays. O(n), vectorised."""
    if len(a) > _MANY:
        same = common_length(a[:_GLANCE], b[:_GLANCE])
        if same < _GLANCE:
            return same
    different = a != b
    first = int(different.argmax())
    return first if different[first] else len(a)
