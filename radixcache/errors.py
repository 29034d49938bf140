"""Every error that radixcache raises on purpose; all derive from `RadixCacheError`."""

from __future__ import annotations


class RadixCacheError(Exception):
    """Base class of the errors below."""


class OutOfPages(RadixCacheError):
    """There are not enough free or evictable pages; the call has changed nothing."""


class LeaseError(RadixCacheError, ValueError):
    """A lease was used against its contract, for example after it was released."""


class CacheBroken(RadixCacheError, RuntimeError):
    """A call that changes the cache was cut off half-way; `PrefixCache.recover` makes it usable."""


class WrongThread(RadixCacheError, RuntimeError):
    """A cache or an engine was called from a second thread."""


class EngineFailed(RadixCacheError, RuntimeError):
    """The steps of a request failed again and again; the message says how."""


class EngineStopped(RadixCacheError, RuntimeError):
    """The engine was closed, or its thread has ended."""


class Busy(RadixCacheError, RuntimeError):
    """There is no capacity for this right now; try again later."""


class PinError(RadixCacheError, ValueError):
    """A named prefix is unknown, exists already, is not cached in full, or exceeds the budget."""


class InvalidRequest(RadixCacheError, ValueError):
    """An argument is never valid: a prompt, a sampling parameter, a pool's size."""


class ContextExceeded(InvalidRequest):
    """A prompt leaves no room for an answer in the model's context."""

    @classmethod
    def of(cls, context: float, problem: str) -> ContextExceeded:
        """The error in words by which clients know that they must cut their prompts."""
        most = f"This model's maximum context length is {context} tokens"
        return cls(f"{most}. However, the prompt is too long: {problem}")


class ModelError(RadixCacheError, ValueError):
    """A model cannot be loaded, or would silently compute wrong results over KV pages."""


class MissingDependency(RadixCacheError, ImportError):
    """A request needs an optional package; the message names the extra to install."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the error's class where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message, to be quoted in another one."""
    return first_line(error).partition(". ")[0].rstrip(".: ")
