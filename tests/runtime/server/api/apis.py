"""The three chat APIs by their stock clients: one way to ask each, one form of what comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import anthropic
import openai

from radixcache.runtime.demo.script import TABLE
from tests.helpers.scripted import call, turns

NUM_TURNS = 4
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
QUESTION, ANSWER = "How old is Nora Holm?", "The age of Nora Holm is 57."
PROMPT = f"{TABLE.read_text()}Question: How old is Nora Lund? Your answer:"


def script(prompt: str) -> list[str]:
    """What the scripted model would rather say, and what it says if it must not."""
    return [_answer(prompt), call("weather", city="Bern"), '{"city": "Bern"}']


def _answer(prompt: str) -> str:
    said = turns(prompt)[:-1]
    role, text = said[-1]
    if any(text.startswith("Loop") for _, text in said):
        n = sum("<tool_response>" in text for _, text in said)
        # No template writes calls as this model does.
        spelt = f'<tool_call>{{"name":"step","arguments":{{"why":"é","n":{n}}}}}</tool_call>'
        return spelt if n < NUM_TURNS else "Done."
    if results := re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text):
        return "It is " + " and ".join(results)
    if text.startswith("Think"):
        return "<think>\nHm.\n</think>\n\n" + (
            call("weather", city="Oslo") if "Oslo" in text else "Done."
        )
    if text == "Cut":
        return '<tool_call>\n{"name": "step", "argum'
    if text == "Nearly":
        first = '<tool_call>\n{"arguments": {"why": "a\n\tb"}, "name": "step"}\n'
        return first + '<tool_call>\n{"name": "step", "arguments": {"why": "a\n\tb"\n</tool_call>'
    if text.startswith("Again"):
        kinds = re.findall("[A-Z]", text)[1:]
        return "\n".join(call("weather", city=kind) for kind in kinds)
    if text == "Two":
        return "Both.\n" + call("step", n=1) + "\n" + call("step", n=2)
    if text.startswith("Long"):
        return "on and on " * 200
    calls = [call("weather", city=city) for city in ("Oslo", "Rome") if city in text]
    return "\n".join(["Let me see.", *calls]) if calls else f"{role}: {text}"


def user(text: Any) -> dict[str, Any]:
    """A message, the same for all three."""
    return {"role": "user", "content": text}


class Called(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]


class Answer(NamedTuple):
    """An answer, whichever API it came by.

    Attributes:
        end: "stop", "tools" or "length".
        said: what to send back of it.
        whole: what the client made of it.
    """

    text: str
    reasoning: str
    calls: list[Called]
    end: str
    prompt: int
    cached: int
    completion: int
    said: list[Any]
    whole: Any


class Asked(NamedTuple):
    """What is asked for; `choice` is "required", "none" or a tool's name."""

    tools: Any = ()
    choice: str | None = None
    parallel: bool = True
    schema: Any = None
    max_tokens: int = 300


class Api:
    """One API, asked for whole answers or for streams, which the stock client puts together.

    Attributes:
        failed: what a stream ends with when the engine fails.
    """

    path: ClassVar[str]
    failed: ClassVar[str]

    def __init__(self, url: str, stream: bool) -> None:
        self.url = url
        self.stream = stream

    @contextmanager
    def client(self) -> Iterator[Any]:
        """OpenAI's or Anthropic's."""
        with (
            openai.DefaultHttpxClient(verify=False) as plain,  # certificates take long to load
            openai.OpenAI(
                base_url=f"{self.url}/v1", api_key="any", max_retries=0, http_client=plain
            ) as client,
        ):
            yield client

    def ask(self, *conversation: Any, **asked: Any) -> Answer:
        """See `Asked`; what is not known to it is sent as it is."""
        more = {name: asked.pop(name) for name in [*asked] if name not in Asked._fields}
        with self.client() as client:
            return self._send(client, {**self.body(*conversation, **asked), "extra_body": more})

    def body(self, *conversation: Any, **asked: Any) -> dict[str, Any]:
        """The body of such a request."""
        return {"model": "scripted", **self._body([*conversation], Asked(**asked))}

    def _body(self, conversation: list[Any], asked: Asked) -> dict[str, Any]:
        raise NotImplementedError

    def result(self, made: Called, text: Any) -> dict[str, Any]:
        """What a tool has answered."""
        raise NotImplementedError

    def _send(self, client: Any, body: dict[str, Any]) -> Answer:
        raise NotImplementedError


class Chat(Api):
    path = "/v1/chat/completions"
    failed = "data: [DONE]"

    def _body(self, conversation: list[Any], asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": conversation, "max_tokens": asked.max_tokens}
        if asked.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in asked.tools]
            body["parallel_tool_calls"] = asked.parallel
        if asked.choice is not None:
            named = {"type": "function", "function": {"name": asked.choice}}
            body["tool_choice"] = asked.choice if asked.choice in ("required", "none") else named
        if asked.schema is not None:
            form = {"name": "answer", "schema": asked.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    def result(self, made: Called, text: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": made.id, "content": text}

    def _send(self, client: Any, body: dict[str, Any]) -> Answer:
        if self.stream:
            options = {"include_usage": True}
            with client.chat.completions.stream(**body, stream_options=options) as events:
                whole = events.get_final_completion()
        else:
            whole = client.chat.completions.create(**body)
        (choice,) = whole.choices
        message, usage = choice.message, whole.usage
        return Answer(
            message.content or "",
            getattr(message, "reasoning", None) or "",
            [
                Called(made.id, made.function.name, json.loads(made.function.arguments))
                for made in message.tool_calls or []
            ],
            {"tool_calls": "tools"}.get(choice.finish_reason, choice.finish_reason),
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            [message.to_dict()],
            whole,
        )


class Responses(Api):
    path = "/v1/responses"
    failed = '"type":"response.failed"'

    def _body(self, conversation: list[Any], asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"input": conversation, "max_output_tokens": asked.max_tokens}
        if asked.tools:
            body["tools"] = [{"type": "function", **tool} for tool in asked.tools]
            body["parallel_tool_calls"] = asked.parallel
        if asked.choice is not None:
            named = {"type": "function", "name": asked.choice}
            body["tool_choice"] = asked.choice if asked.choice in ("required", "none") else named
        if asked.schema is not None:
            form = {"type": "json_schema", "name": "answer", "schema": asked.schema, "strict": True}
            body["text"] = {"format": form}
        return body

    def result(self, made: Called, text: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": made.id, "output": text}

    def _send(self, client: Any, body: dict[str, Any]) -> Answer:
        if self.stream:
            with client.responses.stream(**body) as events:
                whole = events.get_final_response()
        else:
            whole = client.responses.create(**body)
        calls = [item for item in whole.output if item.type == "function_call"]
        thoughts = [item for item in whole.output if item.type == "reasoning"]
        end = "tools" if calls else {"completed": "stop"}.get(whole.status, "length")
        return Answer(
            whole.output_text,
            "".join(item.content[0].text for item in thoughts),
            [Called(item.call_id, item.name, json.loads(item.arguments)) for item in calls],
            end,
            whole.usage.input_tokens,
            whole.usage.input_tokens_details.cached_tokens,
            whole.usage.output_tokens,
            [item.to_dict() for item in whole.output],
            whole,
        )


class Messages(Api):
    path = "/v1/messages"
    failed = '"type":"error"'

    @contextmanager
    def client(self) -> Iterator[Any]:
        with (
            anthropic.DefaultHttpxClient(verify=False) as plain,
            anthropic.Anthropic(
                base_url=self.url, api_key="any", max_retries=0, http_client=plain
            ) as client,
        ):
            yield client

    def _body(self, conversation: list[Any], asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": conversation, "max_tokens": asked.max_tokens}
        if asked.tools:
            body["tools"] = [
                {"input_schema": tool["parameters"]}
                | {name: value for name, value in tool.items() if name != "parameters"}
                for tool in asked.tools
            ]
            kinds: Any = {"required": {"type": "any"}, "none": {"type": "none"}, None: {}}
            chosen = kinds.get(asked.choice, {"type": "tool", "name": asked.choice})
            if not asked.parallel:
                chosen = {"type": "auto", **chosen, "disable_parallel_tool_use": True}
            if chosen:
                body["tool_choice"] = chosen
        if asked.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": asked.schema}}
        return body

    def result(self, made: Called, text: Any) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": made.id, "content": text}
        return {"role": "user", "content": [block]}

    def _send(self, client: Any, body: dict[str, Any]) -> Answer:
        if self.stream:
            with client.messages.stream(**body) as events:
                whole = events.get_final_message()
        else:
            whole = client.messages.create(**body)
        usage, ends = whole.usage, {"tool_use": "tools", "max_tokens": "length"}
        blocks = {kind: [b for b in whole.content if b.type == kind] for kind in _BLOCKS}
        return Answer(
            "".join(block.text for block in blocks["text"]),
            "".join(block.thinking for block in blocks["thinking"]),
            [Called(block.id, block.name, block.input) for block in blocks["tool_use"]],
            ends.get(whole.stop_reason, "stop"),
            usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens,
            usage.cache_read_input_tokens,
            usage.output_tokens,
            [{"role": "assistant", "content": [block.to_dict() for block in whole.content]}],
            whole,
        )


_BLOCKS = ("text", "thinking", "tool_use")
