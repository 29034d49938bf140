"""vLLM's names for what is called otherwise here, or is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from radixcache.errors import InvalidRequest

_BEAMS = "it is for beam search: ask for n answers and choose"
_FORM = "say structured=Structured.json(schema), .regex(...), .choice(...) or .grammar(...)"
_TEMPLATE = "render the prompt yourself and give it to generate"
_TEXT = "models here read and write text"
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
    "tensor_parallel_size": ((1,), "say tensor_parallel, the number of devices"),
    "pipeline_parallel_size": ((1,), "say tensor_parallel: each layer is shared out then"),
    "data_parallel_size": ((1,), "start a process for each and balance the requests"),
    "quantization": ((None,), "a quantised checkpoint says so in its own config"),
    "kv_cache_dtype": (("auto",), "KV has the dtype of the model: say dtype"),
    "trust_remote_code": ((False,), _CODE),
    "revision": ((None,), "download that revision and name its folder"),
    "download_dir": ((None,), "set the variable HF_HUB_CACHE"),
    "hf_token": ((None,), "set the variable HF_TOKEN"),
    "swap_space": ((0,), "preempted sequences keep their pages, or compute them again"),
    "enable_lora": ((False,), "merge the adapter into the weights (peft's merge_and_unload)"),
    "speculative_config": ((None,), "there is no speculative decoding here"),
    "load_format": (("auto",), "what a checkpoint is its files say"),
    "hf_overrides": ((None,), "change the config in the model's folder"),
    "cpu_offload_gb": ((0,), "weights and pages stay on the device"),
    "num_gpu_blocks_override": ((None,), "say kv_memory"),
    "compilation_config": ((None,), "there is nothing to compile"),
    "guided_decoding": ((None,), _FORM),
    "structured_outputs": ((None,), _FORM),
    "best_of": ((None, 1), "ask for n answers and choose"),
    "use_beam_search": ((False,), "ask for n answers and choose"),
    "length_penalty": ((1.0,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "logits_processors": ((None, []), "say logit_bias, bad_words, allowed_token_ids, structured"),
    "truncate_prompt_tokens": ((None,), "cut the prompt before, if possible not at its start"),
    "detokenize": ((True,), "the text is made as tokens come; read token_ids"),
    "output_kind": ((None,), "generate gives whole outputs; stream has new_text, and the whole"),
    "spaces_between_special_tokens": ((True, None), "the tokenizer writes the spaces"),
    "extra_args": ((None,), "only vLLM's plugins know what it says"),
    "lora_request": ((None,), "merge the adapter into the weights (peft's merge_and_unload)"),
    "priority": ((None, 0), "requests run by the schedule of LLM(schedule=...)"),
    "request_id": ((None,), "leave it out: closing a stream aborts its request"),
    "tokenization_kwargs": ((None,), "tokenise it yourself: a prompt may be token ids"),
    "chat_template": ((None,), _TEMPLATE),
    "chat_template_content_format": (("auto", "string"), _TEXT),
    "mm_processor_kwargs": ((None,), _TEXT),
}
"""Values that ask for nothing, and what to do for the others."""


def instead(name: str) -> str | None:
    """What to do here for an argument of vLLM's; None if it is none."""
    return _INSTEAD[name][1] if name in _INSTEAD else None


def check(called: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Let arguments pass that `called` does not have, and that ask for nothing.

    Raises:
        InvalidRequest: one of vLLM's that would not be obeyed.
        TypeError: a name that neither has.
    """
    for name, value in given.items():
        if name not in _INSTEAD:
            near = get_close_matches(name, signature(called).parameters, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            called_as = called.__name__
            raise TypeError(f"{called_as}() got an unexpected keyword argument {name!r}{hint}")
        harmless, sentence = _INSTEAD[name]
        if not any(value is one or (value == one and type(value) is type(one)) for one in harmless):
            raise InvalidRequest(f"{name}={value!r} is not supported: {sentence}")
