"""/v1/chat/completions: what OpenAI's chat API has alone, with vLLM's names for what it adds."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import openai
import pytest

from radixcache import SamplingParams
from tests.runtime.server.api.apis import ANSWER, QUESTION, SCHEMA, Answer, Chat, user
from tests.runtime.server.live import LiveServer, ask

CHAT = "/v1/chat/completions"
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
"""For answers that a grammar forces on a model which would say something else: it may think."""
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
STEP = {"name": "step", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
OTHER = {"name": "other", "parameters": NOTHING}
NAMED = {"type": "function", "function": {"name": "other"}}


@pytest.fixture
def chat(scripted: LiveServer) -> Chat:
    return Chat(scripted.url, False)


def create(client: Any, text: str = QUESTION, **more: Any) -> Any:
    """The stock client counts as untyped: its overloads do not know our fields."""
    return client.chat.completions.create(model="tabletalk", messages=ask(text), **more)


def called(answer: Answer) -> list[tuple[str, Any]]:
    return [(made.name, made.arguments) for made in answer.calls]


def test_models_are_listed_and_found(client: Any, server: LiveServer):
    (model,) = client.models.list().data
    assert model.id == "tabletalk" and model.exact is False
    assert model.max_model_len == server.engine.max_model_len
    assert client.models.retrieve("tabletalk") == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_of_several_answers_adds_up_to_the_whole(client: Any, include_usage: bool):
    whole = create(client, n=2)
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = [*create(client, stream=True, n=2, **options)]
    assert len({chunk.id for chunk in chunks}) == 1
    for index in range(2):
        assert whole.choices[index].message.content == ANSWER
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert parts[0].delta.role == "assistant" and len(parts) > 1
        assert "".join(part.delta.content or "" for part in parts) == ANSWER
        ends = [part.finish_reason for part in parts]
        assert ends == [*[None] * (len(parts) - 1), "stop"]
    used = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(used) == include_usage
    if include_usage:
        assert used[0].completion_tokens == whole.usage.completion_tokens
        assert used[0].prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens
        assert chunks[-1].choices == []


def test_the_usage_so_far_is_in_every_chunk_if_that_is_asked(client: Any, server: LiveServer):
    whole = create(client, n=2)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [*create(client, stream=True, n=2, stream_options=options)]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole.usage.completion_tokens > counts[0] > 0
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {whole.usage.prompt_tokens}
    body = {"prompt": "x", "max_tokens": 3, "stream": True, "stream_options": options}
    text = server.post("/v1/completions", body).text
    assert re.findall(r'"completion_tokens":(\d)', text) == ["1", "2", "3", "3"]


def test_logprobs_whole_and_streamed_are_those_of_the_embedded_runtime(
    client: Any, server: LiveServer
):
    options: Any = {"logprobs": True, "top_logprobs": 3}
    whole = create(client, **options).choices[0].logprobs.content
    streamed = [
        token
        for chunk in create(client, **options, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    llm = server.backend.llm
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=3)
    (wanted,) = llm.chat(ask(QUESTION), params)
    tokens, logprobs = wanted.outputs[0].token_ids, wanted.outputs[0].logprobs
    assert llm.tokenizer and logprobs
    for content in (whole, streamed):
        assert "".join(token.token for token in content) == ANSWER + "<|end|>"
        for seen, token, top in zip(content, tokens, logprobs, strict=True):
            assert seen.token == llm.tokenizer.decode([token], special=True)
            assert bytes(seen.bytes or []).decode() == seen.token
            assert seen.logprob == pytest.approx(top[token], abs=1e-4)
            likeliest = sorted(top.values(), reverse=True)[:3]
            assert [t.logprob for t in seen.top_logprobs] == pytest.approx(likeliest, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_can_be_put_together_from_the_bytes_of_its_tokens(
    scripted: LiveServer, stream: bool
):
    text = "🙂 naïve 漢字"
    body = {"messages": [user(text)], "logprobs": True, "top_logprobs": 2, "stream": stream}
    response = scripted.post(CHAT, body).text
    lines = [line for line in response.split("data: ") if line.startswith("{")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    tokens = [token for one in choices for token in (one["logprobs"] or {}).get("content", ())]
    said = b"".join(bytes(token["bytes"]) for token in tokens).decode()
    assert said == f"user: {text}<|im_end|>"
    split = [token for token in tokens if token["token"].startswith("bytes:")]
    assert split and all(top["bytes"] for token in tokens for top in token["top_logprobs"])


def test_content_may_come_in_parts_and_from_developers(chat: Chat):
    parts = [{"type": "text", "text": text} for text in ("Be", "brief")]
    joined = chat.ask({"role": "developer", "content": parts}, user("Hi"))
    plain = chat.ask({"role": "system", "content": "Be\nbrief"}, user("Hi"))
    assert plain.cached == plain.prompt == joined.prompt


def test_what_has_ended_an_answer_is_told(client: Any):
    (cut,) = create(client, max_completion_tokens=3).choices
    assert (cut.message.content, cut.finish_reason) == ("The age of", "length")
    (choice,) = create(client, stop=[" Denmark", " Holm"]).choices
    assert (choice.message.content, choice.finish_reason) == ("The age of Nora", "stop")
    assert choice.stop_reason == " Holm"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"response_format": {"type": "text"}}, "[^{].*"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r'\{\s*"city": ?".*'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, r"\{.*"),
    ],
)
def test_every_way_to_ask_for_a_form_holds_for_chats_and_completions(
    server: LiveServer, fields: dict[str, Any], form: str
) -> None:
    more = {"temperature": 0, "max_tokens": 40, **fields}
    chat = server.post(CHAT, {"messages": ask("Who?"), **more}).json()["choices"][0]
    plain = server.post("/v1/completions", {"prompt": "It is ", **more}).json()["choices"][0]
    for text in (chat["message"]["content"], plain["text"]):
        assert re.fullmatch(form, text, re.DOTALL), text


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_have_both_names_and_can_be_left_out(scripted: LiveServer, stream: bool):
    body = {"messages": [user("Think")], "stream": stream}
    shown, hidden = (
        scripted.post(CHAT, {**body, "include_reasoning": include}).text
        for include in (True, False)
    )
    for name in ("reasoning", "reasoning_content"):
        assert re.search(rf'"{name}":\s?"H', shown)
        assert not re.search(rf'"{name}":\s?"', hidden)


@pytest.mark.parametrize(
    "choice",
    [NAMED, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}],
)
def test_only_tools_that_are_named_are_called(chat: Chat, choice: dict[str, Any]):
    answer = chat.ask(user("Two"), tools=[STEP, OTHER], tool_choice=choice, **NO_THOUGHTS)
    assert {made.name for made in answer.calls} == {"other"}


def test_strict_arguments_follow_their_schema(chat: Chat):
    number = {"type": "integer", "minimum": 7, "maximum": 9}
    schema = {**NOTHING, "properties": {"n": number}, "required": ["n"]}
    free = chat.ask(user("Two"), tools=[{"name": "step", "parameters": schema}])
    assert called(free)[0] == ("step", {"n": 1})
    strict = chat.ask(user("Two"), tools=[{"name": "step", "parameters": schema, "strict": True}])
    assert strict.text.startswith("Both.") and strict.calls
    for made in strict.calls:
        jsonschema_rs.validate(schema, made.arguments)


def test_beside_tools_an_answer_may_have_a_form(chat: Chat):
    answer = chat.ask(user("Hello"), tools=[STEP], schema={"enum": [12]}, **NO_THOUGHTS)
    assert answer.text == "12" or answer.calls


def test_a_message_goes_on(chat: Chat):
    begun = [user("Hi"), {"role": "assistant", "content": "us"}]
    goes_on = chat.ask(*begun, continue_final_message=True, add_generation_prompt=False)
    assert goes_on.text == "er: Hi" and goes_on.prompt < chat.ask(*begun).prompt


def test_the_template_takes_the_clients_values(chat: Chat):
    free = chat.ask(user("Hello")).prompt
    for more in (NO_THOUGHTS, {"reasoning_effort": "none"}):
        assert chat.ask(user("Hello"), **more).prompt > free
    assert chat.ask(user("Hello"), reasoning_effort="low").prompt == free
