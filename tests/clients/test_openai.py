"""OpenAI's client: both of its APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.rooms import ROOMS, room

MODEL = "scripted"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
HELLO = "You are the user, and said: Hello!"


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


NORA = Person(name="Nora Lund", age=30)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with (
        openai.DefaultHttpxClient(verify=False) as plain,  # certificates take longer than requests
        openai.OpenAI(
            base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=plain
        ) as client,
    ):
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def ask(client: Any, text: str, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=user(text), **options)


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    """The functions that a message calls, with their arguments."""
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]


def test_chat(client: Any):
    answer = ask(client, "Hello!")
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].finish_reason == "stop" and not answer.choices[0].message.tool_calls


def test_chat_streamed(client: Any):
    options = {"include_usage": True}
    chunks = [*ask(client, "Hello!", stream=True, stream_options=options)]
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == HELLO and len(deltas) > 5
    assert chunks[-1].usage.completion_tokens > 5


def test_chat_async(url: str):
    async def talk() -> list[str]:
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=plain
        ) as client:
            create = client.chat.completions.create
            many = [create(model=MODEL, messages=user(f"Hello {i}")) for i in range(4)]
            texts = [answer.choices[0].message.content for answer in await asyncio.gather(*many)]
            stream = await create(model=MODEL, messages=user("Hello!"), stream=True)
            deltas = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            return [*(text or "" for text in texts), "".join(deltas)]

    *texts, streamed = asyncio.run(talk())
    assert texts == [HELLO.replace("Hello!", f"Hello {i}") for i in range(4)]
    assert streamed == HELLO


def test_a_turn_is_cached(client: Any, fresh: str):
    first = ask(client, fresh)
    messages = [*user(fresh), first.choices[0].message, *user("And that?")]
    second = client.chat.completions.create(model=MODEL, messages=messages)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.total_tokens - 1


def test_a_tool_is_called_and_its_result_is_read(client: Any, fresh: str):
    question = user(f"{fresh} How is the weather in Oslo?")
    first = client.chat.completions.create(model=MODEL, messages=question, tools=[WEATHER])
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert calls_of(choice.message) == [("get_weather", {"city": "Oslo"})]
    (made,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": made.id, "content": "rainy"}
    messages = [*question, choice.message, result]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "It is rainy."
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.total_tokens - 1


def test_a_message_may_come_back_with_all_its_fields(client: Any):
    question = user("How is the weather in Oslo?")
    first = client.chat.completions.create(model=MODEL, messages=question, tools=[WEATHER])
    said = first.choices[0].message.model_dump()
    assert "refusal" in said and said["content"] is None
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rainy"}
    second = client.chat.completions.create(
        model=MODEL, messages=[*question, said, result], tools=[WEATHER]
    )
    assert second.choices[0].message.content == "It is rainy."


def test_several_answers_each_with_its_call_and_its_logprobs(client: Any):
    answer = ask(
        client, "How is the weather in Oslo?", tools=[WEATHER], n=2, temperature=1.0, logprobs=True
    )
    for choice in answer.choices:
        assert calls_of(choice.message) == [("get_weather", {"city": "Oslo"})]
        assert "Oslo" in "".join(token.token for token in choice.logprobs.content)


def test_a_tool_call_streamed(client: Any):
    stream = ask(client, "How is the weather in Oslo and Rome?", tools=[WEATHER], stream=True)
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or []]
    begins = [piece for piece in pieces if piece.id]
    assert [(p.index, p.type, p.function.name) for p in begins] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    texts = ["", ""]
    for piece in pieces:
        texts[piece.index] += piece.function.arguments or ""
    assert [json.loads(text)["city"] for text in texts] == ["Oslo", "Rome"]
    assert not any(choice.delta.content for choice in choices)
    assert choices[-1].finish_reason == "tool_calls"


def test_the_streaming_helper_gathers_tool_calls(client: Any):
    question = user("How is the weather in Oslo?")
    with client.chat.completions.stream(model=MODEL, messages=question, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert calls_of(message) == [("get_weather", {"city": "Oslo"})]
    assert "tool_calls.function.arguments.done" in kinds


def test_tools_in_parallel_or_one_at_a_time(client: Any):
    question = "How is the weather in Oslo and Rome?"
    both = ask(client, question, tools=[WEATHER]).choices[0].message
    assert calls_of(both) == [("get_weather", {"city": city}) for city in ("Oslo", "Rome")]
    one = ask(client, question, tools=[WEATHER], parallel_tool_calls=False).choices[0].message
    assert calls_of(one) == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
def test_a_call_that_is_required(client: Any, choice: Any, reason: str, stream: bool):
    options: Any = {"tools": [WEATHER], "tool_choice": choice, "stream": stream}
    answer = ask(client, "Hello!", **options)
    if stream:
        deltas = [chunk.choices[0] for chunk in answer if chunk.choices]
        pieces = [p.function for d in deltas for p in d.delta.tool_calls or []]
        name = "".join(piece.name or "" for piece in pieces)
        told = [(name, json.loads("".join(piece.arguments or "" for piece in pieces)))]
        assert deltas[-1].finish_reason == reason
    else:
        told = calls_of(answer.choices[0].message)
        assert answer.choices[0].finish_reason == reason
    assert told == [("get_weather", {"city": "Oslo"})]


def test_each_of_twenty_tool_turns_computes_its_new_tokens_only(client: Any, fresh: str):
    """All of a turn is cached in the next one but its last token, which has no KV."""
    number = {"type": "object", "properties": {"number": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "room", "parameters": number}}
    history, usages = user(f"{fresh} Walk through the rooms."), []
    for _ in range(ROOMS + 1):
        answer = client.chat.completions.create(model=MODEL, messages=history, tools=[tool])
        history.append(message := answer.choices[0].message)
        for made in message.tool_calls or []:
            result = room(**json.loads(made.function.arguments))
            history.append({"role": "tool", "tool_call_id": made.id, "content": result})
        usages.append(answer.usage)
    assert message.content == "There is no further room."
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[1:] == [usage.total_tokens - 1 for usage in usages[:-1]]
    prompts = sum(usage.prompt_tokens for usage in usages)
    print(f"{ROOMS} tool turns: {prompts - sum(cached)} of {prompts} prompt tokens computed")


def test_no_tool_is_called_where_none_may(client: Any):
    answer = ask(client, "Hello!", tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == HELLO


def test_tools_parsed_as_classes(client: Any):
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=user("How is the weather in Oslo?"),
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
    )
    (made,) = answer.choices[0].message.tool_calls
    assert made.function.parsed_arguments == GetWeather(city="Oslo")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_parsed_as_a_class(client: Any, stream: bool):
    options: Any = {"model": MODEL, "messages": user("Who is Nora?"), "response_format": Person}
    if stream:
        with client.chat.completions.stream(**options) as events:
            answer = events.get_final_completion()
    else:
        answer = client.chat.completions.parse(**options)
    assert answer.choices[0].message.parsed == NORA


def test_json_by_a_schema_and_any_json(client: Any):
    schema = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
    for form in ({"type": "json_schema", "json_schema": schema}, {"type": "json_object"}):
        answer = ask(client, "Who is Nora?", response_format=form, temperature=1.0)
        assert Person.model_validate_json(answer.choices[0].message.content) == NORA


def test_structured_outputs_by_vllms_names(client: Any):
    options: Any = {"structured_outputs": {"choice": ["green", "red"]}}
    answer = ask(client, "Which colour?", extra_body=options)
    assert answer.choices[0].message.content == "red"


def test_thoughts_apart_from_the_answer(client: Any):
    message = ask(client, "What is 2 + 2?").choices[0].message
    assert (message.content, message.reasoning_content.strip()) == ("4", "Two and two.")
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, "What is 2 + 2?", extra_body=off).choices[0].message.content == "4"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            "not",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "f"),
        ({"tool_choice": "required"}, "tool"),
    ],
    ids=["schema", "unknown tool", "no tools"],
)
def test_what_cannot_be_is_refused(client: Any, options: Any, sentence: str):
    with pytest.raises(openai.BadRequestError, match=sentence) as error:
        ask(client, "Hello!", **options)
    assert error.value.type == "invalid_request_error"


# Responses.

FLAT_WEATHER = {"type": "function", **WEATHER["function"], "strict": True}


def respond(client: Any, given: Any, **options: Any) -> Any:
    return client.responses.create(model=MODEL, input=given, **options)


def test_a_response(client: Any):
    answer = respond(client, "Hello!", instructions="Be kind.")
    assert answer.status == "completed" and answer.output_text == HELLO
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_response_streamed(client: Any):
    events = [*respond(client, "Hello!", stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == HELLO and len(deltas) > 5
    assert events[-1].type == "response.completed" and events[-1].response.output_text == HELLO
    with client.responses.stream(model=MODEL, input="Hello!") as stream:
        assert stream.get_final_response().output_text == HELLO


def test_a_response_that_is_cut_says_so(client: Any):
    answer = respond(client, "Hello!", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_response_goes_on_from_another_one(client: Any, fresh: str):
    first = respond(client, fresh)
    second = respond(client, "And that?", previous_response_id=first.id)
    assert second.output_text == HELLO.replace("Hello!", "And that?")
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached == first.usage.total_tokens - 1
    with pytest.raises(openai.NotFoundError):
        respond(client, "And that?", previous_response_id="resp_nobody")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_response_calls_tools_and_reads_their_results(client: Any, fresh: str, stream: bool):
    history: list[Any] = user(f"{fresh} How is the weather in Oslo and Rome?")
    first = respond(client, history, tools=[FLAT_WEATHER], stream=stream)
    if stream:
        events = [*first]
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert [json.loads(event.arguments)["city"] for event in done] == ["Oslo", "Rome"]
        first = events[-1].response
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    history += [item.to_dict() for item in calls]
    for item, weather in zip(calls, ("rainy", "dry"), strict=True):
        history += [{"type": "function_call_output", "call_id": item.call_id, "output": weather}]
    second = respond(client, history, tools=[FLAT_WEATHER])
    assert second.output_text == "It is rainy and dry."
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_a_response_parsed_as_a_class(client: Any):
    answer = client.responses.parse(model=MODEL, input="Who is Nora?", text_format=Person)
    assert answer.output_parsed == NORA


def test_a_response_with_thoughts(client: Any):
    answer = respond(client, "What is 2 + 2?")
    assert answer.output_text == "4"
    (thought,) = [item for item in answer.output if item.type == "reasoning"]
    assert thought.content[0].text.strip() == "Two and two."
