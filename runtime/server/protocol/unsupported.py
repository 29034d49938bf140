"""Fields of OpenAI's and vLLM's requests that are not supported, and what to do instead.

A value that asks for nothing is taken. So are the harmless ones, whatever they say: who asks, how
urgent it is, what to log and where to keep it has no effect on an answer of this server.
"""

from __future__ import annotations

from radixcache.runtime.server.protocol.fields import UnsupportedField

HARMLESS = frozenset(
    "user metadata store safety_identifier service_tier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options priority request_id session_id stream_interval".split()
)

_NO_BEAMS = UnsupportedField("ask for n answers and choose", (False,))
_TEXT_ONLY = UnsupportedField("models here read and write text", ({}, "tensors", False))
_ONE_PROCESS = UnsupportedField("leave it out: this server is one process", ({},))
_CUT = UnsupportedField(
    "cut the prompt before it is sent, if possible not at its start: what is cut there costs all "
    "that is cached behind it",
    (False,),
)

REFUSED = {
    "use_beam_search": _NO_BEAMS,
    "length_penalty": UnsupportedField("it is for beam search: ask for n answers and choose", (1,)),
    "truncate_prompt_tokens": _CUT,
    "truncation_side": _CUT,
    "spaces_between_special_tokens": UnsupportedField(
        "the text has the spaces that the tokenizer writes", (False,)
    ),
    "logprob_token_ids": UnsupportedField("ask for the likeliest tokens' log-probabilities", ([],)),
    "prompt_embeds": UnsupportedField("send text or token ids", ([],)),
    "thinking_token_budget": UnsupportedField("limit the answer by max_tokens", (-1,)),
    "repetition_detection": UnsupportedField("use repetition_penalty or frequency_penalty", ({},)),
    "watermarking": UnsupportedField("mark the text yourself", (False,)),
    "return_token_offsets": UnsupportedField("ask /tokenize for return_token_strs", (False,)),
    "routed_experts_prompt_start": UnsupportedField("experts' routes are not told", (0,)),
    "mm_processor_kwargs": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
    "mm_payload": _TEXT_ONLY,
    "return_mm_kwargs": _TEXT_ONLY,
    "kv_transfer_params": _ONE_PROCESS,
    "ec_transfer_params": _ONE_PROCESS,
    "vllm_xargs": UnsupportedField("only vLLM's plugins know what it says", ({},)),
}


def _others(names: str) -> dict[str, UnsupportedField]:
    """Fields of other APIs, and what they are called in this one."""
    pairs = (pair.split("=") for pair in names.split())
    return {name: UnsupportedField(f"this API calls it {here}") for name, here in pairs}


_HAS_MESSAGES = {
    "prompt": UnsupportedField("send messages, or ask /v1/completions"),
    "input": UnsupportedField("send messages, or ask /v1/responses"),
}
_GUIDED = " ".join(
    f"guided_{kind}=structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")
)  # of vLLM before 0.12
_IN_CHAT = (
    REFUSED
    | _HAS_MESSAGES
    | _others(_GUIDED)
    | _others(
        "stop_sequences=stop max_output_tokens=max_completion_tokens thinking=reasoning_effort "
        "max_new_tokens=max_completion_tokens reasoning=reasoning_effort text=response_format "
        "output_config=response_format system=messages instructions=messages"
    )
)
_IN_COMPLETIONS = (
    REFUSED
    | _others(_GUIDED)
    | _others(
        "input=prompt stop_sequences=stop "
        "max_completion_tokens=max_tokens max_output_tokens=max_tokens max_new_tokens=max_tokens"
    )
)
OTHERS_IN_RESPONSES = _others(
    "messages=input system=instructions response_format=text.format thinking=reasoning "
    "max_tokens=max_output_tokens max_completion_tokens=max_output_tokens "
    "reasoning_effort=reasoning.effort"
) | {"stop": UnsupportedField("/v1/chat/completions has stop strings")}
OTHERS_IN_MESSAGES = _HAS_MESSAGES | _others(
    "instructions=system stop=stop_sequences response_format=output_config.format "
    "max_completion_tokens=max_tokens max_output_tokens=max_tokens reasoning=thinking "
    "reasoning_effort=output_config.effort "
    "parallel_tool_calls=tool_choice.disable_parallel_tool_use"
)

REFUSED_IN_CHAT = _IN_CHAT | {
    "functions": UnsupportedField("send them as tools", ([],)),
    "function_call": UnsupportedField("send tools, and a tool_choice", ("none", "auto")),
    "echo": UnsupportedField(
        "the client has the messages; /v1/completions echoes a prompt", (False,)
    ),
    "add_special_tokens": UnsupportedField("the chat template writes them", (False,)),
    "documents": UnsupportedField("put them into a message", ([],)),
    "chat_template": UnsupportedField("render the prompt yourself, and send it to /v1/completions"),
    "return_prompt_text": UnsupportedField(
        "ask for return_token_ids, and /detokenize them", (False,)
    ),
    "modalities": UnsupportedField("models here write text", ([], ["text"])),
    "audio": UnsupportedField("models here write text"),
    "prediction": UnsupportedField("leave it out: nothing is decoded faster by it"),
    "web_search_options": UnsupportedField("search yourself, by a tool"),
    "moderation": UnsupportedField("moderate the answer yourself"),
    "verbosity": UnsupportedField("say in a message how long the answer should be", ("medium",)),
}

REFUSED_IN_COMPLETIONS = _IN_COMPLETIONS | {
    "messages": UnsupportedField("send a prompt, or ask /v1/chat/completions"),
    "suffix": UnsupportedField(
        "write both sides into the prompt, as the model was trained to", ("",)
    ),
}

REFUSED_IN_STREAM_OPTIONS = {
    "continuous_usage_stats": UnsupportedField("set include_usage: the last chunk has it", (False,))
}
