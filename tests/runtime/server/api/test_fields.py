"""Fields of vLLM: no field that it or the stock client knows is ignored, if it would change an
answer."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as ChatResource
from openai.resources.completions import Completions as CompletionResource
from openai.types.chat import ChatCompletionStreamOptionsParam
from tokenizers.processors import TemplateProcessing

from radixcache import SamplingParams
from radixcache.runtime.server.protocol.fields import StrictModel
from radixcache.runtime.server.protocol.openai import ChatRequest, CompletionRequest, StreamOptions
from radixcache.runtime.server.protocol.unsupported import HARMLESS
from tests.runtime.server.api.apis import ANSWER, PROMPT, QUESTION
from tests.runtime.server.live import LiveServer, ask, assert_error

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, type[StrictModel]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
RESOURCES: dict[str, Any] = {CHAT: ChatResource, COMPLETIONS: CompletionResource}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}

IN_BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty
    response_format seed stop stream stream_options temperature top_p thinking_token_budget user
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo add_special_tokens structured_outputs
    priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval"""
VLLM = {  # those of the protocol of vLLM 0.33
    CHAT: f"""{IN_BOTH} messages top_logprobs max_completion_tokens tools tool_choice
        reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt documents
        continue_final_message chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs return_prompt_text""",
    COMPLETIONS: f"{IN_BOTH} prompt suffix prompt_embeds",
}
OTHERS = """guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    return_weight_versions""".split()  # of older vLLMs, and newer ones

both = pytest.mark.parametrize("path", REQUESTS)


def names(path: str) -> set[str]:
    client = {*inspect.signature(RESOURCES[path].create).parameters} - OF_THE_CLIENT
    assert len(client) > 16
    return client | {*VLLM[path].split(), *OTHERS}


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": ask(QUESTION)} if path == CHAT else {"prompt": PROMPT, "stop": "\n"}
    return {**asked, "temperature": 0, "max_tokens": 20, **more}


def choice(server: LiveServer, path: str, **more: Any) -> Any:
    response = server.post(path, body(path, **more))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def answer(server: LiveServer, path: str, **more: Any) -> str:
    first = choice(server, path, **more)
    text: str = first["message"]["content"] if path == CHAT else first["text"]
    return text.removeprefix(" ")


# Of fields that are honoured and not shown elsewhere: what they do. The plain answer is
# "The age of Nora Holm is 57." in a chat, that of Nora Lund in a completion.


def _token(server: LiveServer, text: str) -> int:
    (token,) = server.backend.tokenizer.encode(text, special=False)
    return token


@both
def test_penalties_change_the_answer(server: LiveServer, path: str) -> None:
    length = {"max_tokens": 60, "min_tokens": 60, "stop": None}
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 1.5, "repetition_penalty": 2.5}
    answers = {answer(server, path, **length, **{name: penalties[name]}) for name in penalties}
    assert len({*answers, answer(server, path, **length)}) == 4


@both
def test_which_tokens_may_come(server: LiveServer, path: str) -> None:
    dot = _token(server, ".")
    assert answer(server, path, logit_bias={str(dot): 100}) == "." * 20
    assert answer(server, path, allowed_token_ids=[dot]) == "." * 20
    text = answer(server, path, bad_words=["age of Nora"])
    assert text.startswith("The age of") and "age of Nora" not in text


@both
def test_where_an_answer_ends(server: LiveServer, path: str) -> None:
    assert choice(server, path, min_tokens=20, stop=None)["finish_reason"] == "length"
    assert choice(server, path, stop=None)["finish_reason"] == "stop"
    assert "Nora" in answer(server, path, min_tokens=8, stop=" Nora")
    assert answer(server, path, stop=" Nora") == "The age of"
    shown: dict[str, Any] = {"include_stop_str_in_output": True}
    assert answer(server, path, stop="Nora", **shown) == "The age of Nora"
    whole = answer(server, path, stop=None, skip_special_tokens=False, **shown)
    assert whole.endswith(".<|end|>")
    assert answer(server, path, stop=None, skip_special_tokens=False).endswith(".")


@both
def test_prompt_logprobs_are_those_of_the_embedded_runtime(server: LiveServer, path: str) -> None:
    asked = body(path)
    whole = server.post(path, {**asked, "prompt_logprobs": 2}).json()
    told = whole["prompt_logprobs"] if path == CHAT else whole["choices"][0]["prompt_logprobs"]
    (text,) = [name for name in ("prompt", "messages") if name in asked]
    prompt = server.post("/tokenize", {text: asked[text]}).json()["tokens"]
    assert len(told) == len(prompt) == whole["usage"]["prompt_tokens"] and told[0] is None
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (wanted,) = server.backend.llm.generate({"prompt_token_ids": prompt}, params)
    assert wanted.prompt_logprobs is not None
    for token, seen, expected in zip(prompt[1:], told[1:], wanted.prompt_logprobs[1:], strict=True):
        assert expected is not None and seen.keys() == {str(t) for t in expected}
        for key, value in seen.items():
            assert value["logprob"] == pytest.approx(expected[int(key)], abs=1e-3)
            assert value["decoded_token"] == server.backend.tokenizer.token_text(int(key))
            likelier = sum(other > expected[int(key)] for other in expected.values())
            assert value["rank"] in (None, likelier + 1)
        assert {value["rank"] for value in seen.values()} - {None} == {1, 2}
        assert (seen[str(token)]["rank"] is None) == (len(seen) == 3)


@both
def test_ids_of_tokens_beside_texts(server: LiveServer, path: str) -> None:
    stop = ["\n", " Nora Lund is here", "The age of Nora Holm is here"]  # so that text is held back
    asked = body(path, return_token_ids=True, stop=stop)
    whole = server.post(path, asked).json()
    first = whole["choices"][0]
    prompt = (whole if path == CHAT else first)["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert len(first["token_ids"]) == whole["usage"]["completion_tokens"]
    said = server.post("/detokenize", {"tokens": first["token_ids"]}).json()["prompt"]
    assert said.startswith((ANSWER, " The age of Nora Lund is 30."))
    lines = server.post(path, {**asked, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
    assert streamed == first["token_ids"]
    begun = chunks[0] if path == CHAT else chunks[0]["choices"][0]
    assert begun["prompt_token_ids"] == prompt
    options = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    logprobs = choice(server, path, return_tokens_as_token_ids=True, **options)["logprobs"]
    ids = [f"token_id:{token}" for token in streamed]
    if path == CHAT:
        assert [token["token"] for token in logprobs["content"]] == ids
        assert [token["top_logprobs"][0]["token"] for token in logprobs["content"]] == ids
    else:
        assert logprobs["tokens"] == ids
        assert [{*top} for top in logprobs["top_logprobs"]] == [{name} for name in ids]


def test_special_tokens_are_added_unless_not_wanted(server: LiveServer) -> None:
    backend, mark = server.backend.tokenizer._tokenizer.backend_tokenizer, "<|system|>"
    first, plain = _token(server, mark), backend.post_processor
    backend.post_processor = TemplateProcessing(f"{mark} $A", special_tokens=[(mark, first)])
    try:
        for special in (True, False):
            more = {"add_special_tokens": special, "return_token_ids": True}
            assert (choice(server, COMPLETIONS, **more)["prompt_token_ids"][0] == first) == special
    finally:
        backend.post_processor = plain


@both
def test_no_field_is_ignored(server: LiveServer, path: str) -> None:
    known = REQUESTS[path]
    for name in sorted(names(path) - {*known.model_fields}):
        if name in known.harmless:
            assert name in HARMLESS
        else:
            response = server.post(path, body(path, **{name: {"some": "thing"}}))
            assert assert_error(response, 400, f"{name}: ")["param"] == name
            assert name in known.refused or name in OTHERS
    server.assert_idle()


@both
def test_harmless_fields_and_values_that_ask_for_nothing_change_no_answer(server, path) -> None:
    known = REQUESTS[path]
    plain, nothing = answer(server, path), dict.fromkeys(known.harmless, "x")
    nothing |= {name: off[0] for name, (_, off) in known.refused.items() if off}
    assert "spaces_between_special_tokens" in nothing  # with any value: vLLM's default is true
    assert len(nothing) > 30
    assert answer(server, path, **nothing) == plain
    assert answer(server, path, **dict.fromkeys([*known.refused, "whatever"])) == plain
    for name, (_, off) in known.refused.items():
        for value in off:
            known.model_validate(body(path, **{name: value}))


def test_options_of_a_stream_are_all_known() -> None:
    known = {*StreamOptions.model_fields, *StreamOptions.harmless, *StreamOptions.refused}
    assert {*ChatCompletionStreamOptionsParam.__annotations__, "continuous_usage_stats"} <= known
