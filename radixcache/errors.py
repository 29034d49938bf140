"""Every error that radixcache raises on purpose; all derive from `RadixCacheError`."""

from __future__ import annotations


class RadixCacheError(Exception):
    """Base class of the errors below."""


class OutOfPages(RadixCacheError):
    """Not enough free or evictable pages; nothing has changed by the call."""


class LeaseError(RadixCacheError, ValueError):
    """A lease was used against its contract, for example after it was released."""


class CacheBroken(RadixCacheError, RuntimeError):
    """A call that changes the cache was cut off half-way; `PrefixCache.recover` makes it usable."""


class WrongThread(RadixCacheError, RuntimeError):
    """A cache or an engine is for one thread, and another one called it."""


class EngineFailed(RadixCacheError, RuntimeError):
    """The steps of a request failed again and again; the message says how."""


class EngineStopped(RadixCacheError, RuntimeError):
    """The engine was closed, or its thread has ended."""


class Busy(RadixCacheError, RuntimeError):
    """There is no capacity for this right now; the same will do later."""


class RanksLost(RadixCacheError, RuntimeError):
    """A process of a tensor-parallel model has ended or failed: it can compute nothing more."""


class PinError(RadixCacheError, ValueError):
    """A named prefix is unknown, exists already, is not cached in full, or exceeds the budget."""


class InvalidRequest(RadixCacheError, ValueError):
    """An argument that no state could make valid: a prompt, a sampling parameter, a pool's size."""


class ContextExceeded(InvalidRequest):
    """A prompt that leaves no room to answer in the model's context."""


class ModelError(RadixCacheError, ValueError):
    """A model that cannot be loaded, or that would silently compute wrong results over KV pages."""


class MissingDependency(RadixCacheError, ImportError):
    """An optional package is needed for what was asked; the message names the extra to install."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the error's class where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message, for one of our own that quotes it."""
    return first_line(error).partition(". ")[0].rstrip(".: ")
