"""The settings of an engine. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from radixcache.errors import InvalidRequest
from radixcache.runtime.config.flags import Rule, check, setting
from radixcache.runtime.config.sizes import parse_memory
from radixcache.runtime.kv_events.config import KVEventsConfig


def _is_memory(amount: Any) -> bool:
    try:
        return parse_memory(amount) > 0
    except InvalidRequest:
        return False


def _auto_or_off(value: Any) -> Any:
    """YAML reads `off` as False."""
    return ("off", "auto")[value] if isinstance(value, bool) else value


def _on_or_off(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value


KV_DIR_SIZE = "10GB"

_COUNT = Rule(lambda n: isinstance(n, int | np.integer) and bool(n >= 1), "must be at least 1")
_MEMORY = Rule(_is_memory, "must be an amount like 2GB or 512MiB, or bytes")


@dataclass(frozen=True)
class EngineArgs:
    """The settings of an engine: arguments of `LLM`, flags of the command line, variables such as
    RADIXCACHE_PAGE_SIZE, and names in the settings file of `radixcache serve`.

    Raises:
        InvalidRequest: a value makes no sense.
    """

    model: str | Path | None = setting(
        None, "folder, .gguf file or hub id (the bundled model)", metavar="M"
    )
    cache: Literal["radix", "hash-block", "none"] = setting(
        "radix", "prefix cache: a token-exact radix tree, vLLM's whole blocks, or none"
    )
    page_size: int = setting(16, "tokens per KV page", metavar="N", rule=_COUNT)
    kv_cache_memory_bytes: int | str | None = setting(
        None,
        "memory for KV pages, like 2GB; a CPU's is taken as it fills (a quarter of what is free, "
        "half of what a container has left, 16 GiB at most; most of a GPU's)",
        metavar="SIZE",
        rule=_MEMORY,
    )
    state_memory: int | str | None = setting(
        None,
        "part of the KV memory for states of recurrent layers (a quarter)",
        metavar="SIZE",
        rule=_MEMORY,
    )
    host_memory: int | str | None = setting(
        None,
        "pinned host memory for KV pages that a GPU evicts, like 32GB",
        metavar="SIZE",
        rule=_MEMORY,
    )
    kv_dir: str | Path | None = setting(
        None, "folder for evicted KV pages, which outlive a restart", metavar="DIR"
    )
    kv_dir_size: int | str | None = setting(
        None,
        f"disk space to preallocate for kv_dir ({KV_DIR_SIZE})",
        metavar="SIZE",
        rule=_MEMORY,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "number format; auto is float32 on a CPU, the checkpoint's on a GPU"
    )
    kv_cache_dtype: Literal["auto", "float16", "bfloat16", "int8", "fp8"] = setting(
        "auto", "number format of KV pages; auto is the model's, int8 takes half of 16 bits"
    )
    quantized_activations: Literal["auto", "on", "off"] = setting(
        "auto",
        "round activations to 8 bits before quantized weights (auto: where it is faster; on a CPU)",
        parse=_on_or_off,
    )
    device: str = setting("auto", "cpu, cuda, or auto: a GPU if there is one", metavar="D")
    exact: bool = setting(
        False, "make tokens the same bits whatever is cached or in the batch (on a CPU)"
    )
    max_model_len: int | None = setting(
        None, "tokens of a prompt and its answer (the model's context)", metavar="N", rule=_COUNT
    )
    max_num_batched_tokens: int = setting(
        2048, "tokens per step; longer prompts are prefilled in chunks", metavar="N", rule=_COUNT
    )
    max_num_seqs: int = setting(64, "running sequences", metavar="N", rule=_COUNT)
    schedule_policy: Literal["lpm", "fcfs"] = setting("lpm", "order of admission")
    speculate: Literal["off", "auto"] = setting(
        "off",
        "auto: draft tokens from earlier text where that is faster (off)",
        parse=_auto_or_off,
    )
    seed: int = setting(0, "seed of the sampling noise", flag=False)
    kv_events_config: Mapping[str, Any] | str | KVEventsConfig | None = setting(
        None,
        """publish what is cached, as vLLM does: '{"enable_kv_cache_events": true}'""",
        metavar="JSON",
        parse=KVEventsConfig.read,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.kv_dir is not None and not str(self.kv_dir).strip():
            raise InvalidRequest("kv_dir is the name of a folder, not empty")
        for name in ("host_memory", "kv_dir"):
            if getattr(self, name) is not None and self.cache != "radix":
                raise InvalidRequest(f"{name} is for cache='radix', not {self.cache!r}")
        if self.kv_dir is None and self.kv_dir_size is not None:
            raise InvalidRequest("kv_dir_size is the size of a kv_dir: name one")
        if self.kv_dir is not None and self.kv_dir_size is None:
            object.__setattr__(self, "kv_dir_size", KV_DIR_SIZE)
        if None not in (self.host_memory, self.kv_dir, self.kv_events_config):
            raise InvalidRequest("kv_events_config goes with host_memory or kv_dir, not with both")
