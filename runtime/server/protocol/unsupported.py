"""Fields of OpenAI's and vLLM's requests that are not supported, and what to do instead.

A value that asks for nothing is accepted, and so is any value of a harmless field: users,
priorities, logging and storage have no effect on an answer here.
"""

from __future__ import annotations

from radixcache.runtime.server.protocol.fields import Unsupported

HARMLESS = frozenset(
    "user metadata store safety_identifier service_tier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options priority request_id session_id stream_interval verbosity "
    "spaces_between_special_tokens".split()  # tokenizers write spaces as they do
)

_PROCESSOR = Unsupported("images are read as the model's processor does", ({}, "tensors", False))
_ONE_PROCESS = Unsupported("leave it out: this server is one process", ({},))
_CUT = Unsupported("cut the prompt yourself: a cut at its start loses all cached tokens", (False,))

REFUSED = {
    "use_beam_search": Unsupported("ask for n answers and choose", (False,)),
    "length_penalty": Unsupported("it is for beam search: ask for n answers and choose", (1,)),
    "truncate_prompt_tokens": _CUT,
    "truncation_side": _CUT,
    "logprob_token_ids": Unsupported("ask for the likeliest tokens' log-probabilities", ([],)),
    "prompt_embeds": Unsupported("send text or token ids", ([],)),
    "thinking_token_budget": Unsupported("limit the answer by max_tokens", (-1,)),
    "repetition_detection": Unsupported("use repetition_penalty or frequency_penalty", ({},)),
    "watermarking": Unsupported("mark the text yourself", (False,)),
    "return_token_offsets": Unsupported("ask /tokenize for return_token_strs", (False,)),
    "routed_experts_prompt_start": Unsupported("the experts chosen are not returned", (0,)),
    "mm_processor_kwargs": _PROCESSOR,
    "media_io_kwargs": _PROCESSOR,
    "mm_payload": _PROCESSOR,
    "return_mm_kwargs": _PROCESSOR,
    "kv_transfer_params": _ONE_PROCESS,
    "ec_transfer_params": _ONE_PROCESS,
    "vllm_xargs": Unsupported("only vLLM's plugins read it", ({},)),
}


def _others(names: str) -> dict[str, Unsupported]:
    """Fields of other APIs, with their names in this one."""
    pairs = (pair.split("=") for pair in names.split())
    return {name: Unsupported(f"this API calls it {here}") for name, here in pairs}


_HAS_MESSAGES = {
    "prompt": Unsupported("send messages, or ask /v1/completions"),
    "input": Unsupported("send messages, or ask /v1/responses"),
}
_ELSEWHERE = (
    "stop_sequences=stop guided_json=structured_outputs.json "  # of vLLM before 0.12
    "guided_regex=structured_outputs.regex guided_choice=structured_outputs.choice "
    "guided_grammar=structured_outputs.grammar "
)
OTHERS_IN_RESPONSES = _others(
    "messages=input system=instructions response_format=text.format thinking=reasoning "
    "max_tokens=max_output_tokens max_completion_tokens=max_output_tokens "
    "reasoning_effort=reasoning.effort stop_sequences=stop"
)
OTHERS_IN_MESSAGES = _HAS_MESSAGES | _others(
    "instructions=system stop=stop_sequences response_format=output_config.format "
    "max_completion_tokens=max_tokens max_output_tokens=max_tokens reasoning=thinking "
    "output_format=output_config.format "
    "reasoning_effort=output_config.effort "
    "parallel_tool_calls=tool_choice.disable_parallel_tool_use"
)

REFUSED_IN_CHAT = {
    **REFUSED,
    **_HAS_MESSAGES,
    **_others(
        _ELSEWHERE + "max_output_tokens=max_completion_tokens thinking=reasoning_effort "
        "max_new_tokens=max_completion_tokens reasoning=reasoning_effort text=response_format "
        "output_config=response_format system=messages instructions=messages"
    ),
    "functions": Unsupported("send them as tools", ([],)),
    "function_call": Unsupported("send tools, and a tool_choice", ("none", "auto")),
    "echo": Unsupported("/v1/completions echoes a prompt", (False,)),
    "add_special_tokens": Unsupported("the chat template writes them", (False,)),
    "documents": Unsupported("put them into a message", ([],)),
    "chat_template": Unsupported("render the prompt yourself, and send it to /v1/completions"),
    "return_prompt_text": Unsupported("/detokenize what return_token_ids gives", (False,)),
    "modalities": Unsupported("models here write text", ([], ["text"])),
    "audio": Unsupported("models here write text"),
    "prediction": Unsupported("leave it out: nothing is decoded faster by it"),
    "web_search_options": Unsupported("search yourself, by a tool"),
    "moderation": Unsupported("moderate the answer yourself"),
}

REFUSED_IN_COMPLETIONS = {
    **REFUSED,
    **_others(
        _ELSEWHERE + "input=prompt max_completion_tokens=max_tokens max_output_tokens=max_tokens "
        "max_new_tokens=max_tokens"
    ),
    "messages": Unsupported("send a prompt, or ask /v1/chat/completions"),
    "suffix": Unsupported("write both sides into the prompt, with the model's own marks", ("",)),
}
