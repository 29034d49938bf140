"""radixcache: a token-exact radix-tree prefix cache over KV pages, and a runtime that uses it.

The index (`RadixCache`, `HashBlockCache`, `NoCache`, `PagePool`) needs only NumPy and
sortedcontainers. The runtime (`LLM`, `Chat`, `SamplingParams`) loads torch and transformers when it
is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixcache.base import PrefixCache
from radixcache.errors import (
    Busy,
    CacheBroken,
    ContextExceeded,
    EngineFailed,
    EngineStopped,
    InvalidRequest,
    LeaseError,
    MissingDependency,
    ModelError,
    OutOfPages,
    PinError,
    RadixCacheError,
    WrongThread,
)
from radixcache.events import Cleared, Evicted, Stored
from radixcache.hash_block.cache import HashBlockCache
from radixcache.lease import Lease, PageCopy
from radixcache.no_cache import NoCache
from radixcache.pages import PagePool
from radixcache.radix.cache import RadixCache
from radixcache.stats import CacheStats

if TYPE_CHECKING:
    from radixcache.runtime.async_llm import AsyncLLM
    from radixcache.runtime.chat import Chat
    from radixcache.runtime.llm import LLM
    from radixcache.runtime.outputs import RequestOutput
    from radixcache.runtime.sampling.params import SamplingParams
    from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_RUNTIME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Chat": "chat",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling.params",
    "StructuredOutputsParams": "sampling.structured_outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Busy",
    "CacheBroken",
    "CacheStats",
    "Chat",
    "Cleared",
    "ContextExceeded",
    "EngineFailed",
    "EngineStopped",
    "Evicted",
    "HashBlockCache",
    "InvalidRequest",
    "Lease",
    "LeaseError",
    "MissingDependency",
    "ModelError",
    "NoCache",
    "OutOfPages",
    "PageCopy",
    "PagePool",
    "PinError",
    "PrefixCache",
    "RadixCache",
    "RadixCacheError",
    "RequestOutput",
    "SamplingParams",
    "Stored",
    "StructuredOutputsParams",
    "WrongThread",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name not in _RUNTIME:
        raise AttributeError(f"module 'radixcache' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"radixcache.runtime.{_RUNTIME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "transformers", "tokenizers"):
            raise MissingDependency(
                f"radixcache.{name} needs {error.name}: pip install '.[runtime]' in a checkout"
            ) from error
        raise
