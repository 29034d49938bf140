"""vLLM's names for what is called otherwise here, or is not there."""

from __future__ import annotations

from typing import Any

from radixcache.errors import InvalidRequest

_PARALLEL = "one process uses one device here: start one for each and balance the requests"
_CODE = "code of a checkpoint is never run: take a model that transformers has itself"

_INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "gpu_memory_utilization": ((), "say kv_memory, the size of the KV pages, as in '2GB'"),
    "kv_cache_memory_bytes": ((), "say kv_memory"),
    "max_model_len": ((None, -1), "the context is the model's: say max_tokens, kv_memory"),
    "enable_prefix_caching": ((True, None), "say cache='none'"),
    "enable_chunked_prefill": ((True, None), "say max_num_batched_tokens, the size of a chunk"),
    "scheduling_policy": (("fcfs",), "say schedule='fcfs' or 'longest-prefix'"),
    "enforce_eager": ((True, False, None), "it is True or False"),
    "disable_log_stats": ((True, False), "it is True or False"),
    "tokenizer": ((None,), "the tokenizer is the one in the model's folder"),
    "tokenizer_mode": (("auto",), "the tokenizer is the one that transformers takes"),
    "tensor_parallel_size": ((1,), _PARALLEL),
    "pipeline_parallel_size": ((1,), _PARALLEL),
    "data_parallel_size": ((1,), _PARALLEL),
    "quantization": ((None,), "a quantised checkpoint says so in its own config"),
    "kv_cache_dtype": (("auto",), "KV has the dtype of the model: say dtype"),
    "trust_remote_code": ((False,), _CODE),
    "revision": ((None,), "download that revision and name its folder"),
    "download_dir": ((None,), "set the variable HF_HUB_CACHE"),
    "hf_token": ((None,), "set the variable HF_TOKEN"),
    "swap_space": ((0,), "preempted sequences keep their pages, or compute them again"),
    "enable_lora": ((False,), "merge the adapter into the weights (peft's merge_and_unload)"),
    "speculative_config": ((None,), "there is no speculative decoding here"),
}
"""Values that ask for nothing, and what to do for the others."""


def instead(name: str) -> str | None:
    """What to do here for an argument of vLLM's; None if it is none."""
    return _INSTEAD[name][1] if name in _INSTEAD else None


def check(arguments: dict[str, Any]) -> None:
    """Let arguments pass that ask for nothing.

    Raises:
        InvalidRequest: one of vLLM's that would not be obeyed.
        TypeError: a name that neither has.
    """
    for name, value in arguments.items():
        if name not in _INSTEAD:
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}")
        harmless, sentence = _INSTEAD[name]
        if not any(value is one or (value == one and type(value) is type(one)) for one in harmless):
            raise InvalidRequest(f"{name}={value!r} is not supported: {sentence}")
