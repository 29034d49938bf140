"""Bodies of /v1/responses, and what they are as chat completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.protocol.fields import (
    NO_MEDIA,
    Items,
    List,
    MaxTokens,
    Metadata,
    OneOf,
    SomeItems,
    StrictModel,
    Temperature,
    Text,
    TopP,
    Unsupported,
    join_texts,
)
from radixcache.runtime.server.protocol.response_format import FormatOptions, sampled
from radixcache.runtime.server.protocol.tools import Function, OfFunctions
from radixcache.runtime.server.protocol.turn import Turn, TurnRequest, call_of
from radixcache.runtime.server.protocol.unsupported import OTHERS_IN_RESPONSES
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import ToolChoice, for_template

JSON = dict[str, Any]


class ItemText(StrictModel):
    """A text within an item: what was said, answered or thought."""

    harmless: ClassVar = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
    refused: ClassVar = NO_MEDIA

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: Text


class Item(OneOf):
    """What a conversation consists of; answers may be sent back as they came."""

    harmless: ClassVar = frozenset({"id", "status", "phase", "encrypted_content"})
    needs: ClassVar = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "reasoning": (),
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | List[ItemText] | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Text | List[ItemText] | None = None
    summary: List[ItemText] | None = None

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Item:
        if self.type == "function_call":
            for_template(self.as_message())  # refuses
        return self

    def as_message(self) -> Message:
        """The item as a message, or as a part of an assistant's."""
        match self.type:
            case "reasoning":
                text = join_texts(self.content) or join_texts(self.summary)
                return {"role": "assistant", "reasoning_content": text}
            case "function_call":
                call = call_of(self.call_id, self.name, self.arguments)
                return {"role": "assistant", "tool_calls": [call]}
            case "function_call_output":
                content = join_texts(self.output)
                return {"role": "tool", "tool_call_id": self.call_id, "content": content}
            case _:  # few templates know developers
                role = "system" if self.role == "developer" else self.role
                return {"role": role, "content": join_texts(self.content)}


class ResponseFunctionTool(Function, OfFunctions):
    refused: ClassVar = {
        "function": Unsupported("send name, description and parameters beside `type`"),
        "input_schema": Unsupported("send it as parameters"),
    }


class ResponseNamedTool(StrictModel):
    type: Literal["function"]
    name: Text


class ResponseAllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: List[ResponseNamedTool]


class TextOptions(FormatOptions):
    refused: ClassVar = {"verbosity": Unsupported("say it in the instructions", ("medium",))}


class Reasoning(StrictModel):
    """How much the model thinks. What it thinks is always shown, and as it is."""

    harmless: ClassVar = frozenset({"summary", "generate_summary"})

    effort: Text | None = None


class CacheOptions(StrictModel):
    """Everything is cached anyway, and to the token; what is left to ask is why something was not.

    That is said in `prompt_cache_diagnostics` and in `radixcache.explanation`.
    """

    harmless: ClassVar = frozenset({"mode", "ttl"})
    refused: ClassVar = {
        "prewarm": Unsupported("POST /v1/prefixes computes a prefix and pins it", (False,))
    }

    comparison_response_id: Text | None = None


class ResponsesRequest(TurnRequest, StrictModel):
    harmless: ClassVar = frozenset(
        "user safety_identifier service_tier prompt_cache_key prompt_cache_retention "
        "stream_options max_tool_calls".split()
    )
    refused: ClassVar = {
        "background": Unsupported("keep the connection open, or stream", (False,)),
        "conversation": Unsupported("send previous_response_id, or all items"),
        "context_management": Unsupported("leave items out yourself", ([],)),
        "prompt": Unsupported("send its text as instructions and input"),
        "top_logprobs": Unsupported("/v1/chat/completions has log-probabilities", (0,)),
        **OTHERS_IN_RESPONSES,
    }

    input: Text | SomeItems[Item]
    model: Text | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: Items[ResponseFunctionTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | ResponseNamedTool | ResponseAllowedTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: List[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="Changes nothing: reasoning is never encrypted."
    )
    truncation: Literal["disabled"] | None = None
    metadata: Metadata | None = None
    prompt_cache_options: CacheOptions | None = None
    explain: bool | None = None

    @property
    def compared(self) -> str | None:
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    def messages(self) -> list[Message]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return merge([item.as_message() for item in self.input])

    def turn(self, defaults: SamplingParams, conversation: list[Message] | None = None) -> Turn:
        """Of the whole conversation, which may have begun before; instructions are not of it."""
        messages = self.messages() if conversation is None else conversation
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        params = sampled(
            defaults,
            self.text,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
        )
        return Turn(
            [for_template(message) for message in merge_system(messages)],
            params,
            self.offered,
            self.choice,
            effort=(self.reasoning.effort if self.reasoning else None, "reasoning.effort"),
            cache_salt=self.cache_salt,
            stream=bool(self.stream),
            explain=bool(self.explain or self.compared),
        )

    @property
    def choice(self) -> ToolChoice:
        parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case ResponseNamedTool(name=name):
                return ToolChoice("required", (name,), True, parallel=False)
            case ResponseAllowedTools(mode=mode, tools=allowed):
                return ToolChoice(mode, tuple(tool.name for tool in allowed), parallel=parallel)
            case mode:
                return ToolChoice(mode or "auto", parallel=parallel)


def merge(parts: list[Message]) -> list[Message]:
    """Messages, where what one answer consisted of is one message."""
    messages: list[Message] = []
    for new in parts:
        last = messages[-1] if messages else {}
        goes_on = new["role"] == "assistant" == last.get("role") and (
            "content" not in new or not {"content", "tool_calls"} & last.keys()
        )
        if goes_on and "tool_calls" in new:
            new = {**new, "tool_calls": [*last.get("tool_calls", ()), *new["tool_calls"]]}
        messages[len(messages) - goes_on :] = [{**last, **new} if goes_on else new]
    return [{"content": "", **message} for message in messages]


def merge_system(messages: list[Message]) -> list[Message]:
    """Messages with one system message at the top: few templates take two."""
    system, others = split_system(messages)
    text = "\n\n".join(message["content"] for message in system)
    return [*([{"role": "system", "content": text}] if system else []), *others]


def split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """System messages at the top, and the others."""
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    return messages[:count], messages[count:]
