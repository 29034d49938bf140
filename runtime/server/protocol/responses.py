"""Request bodies of /v1/responses, turned into the `Turn` that all chat APIs share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.protocol.fields import (
    Flag,
    Items,
    Json,
    List,
    MaxTokens,
    Metadata,
    OneOf,
    Stop,
    StrictModel,
    Temperature,
    Text,
    ToolName,
    TopP,
    Unsupported,
)
from radixcache.runtime.server.protocol.images import Detail, content_of, with_images
from radixcache.runtime.server.protocol.response_format import FormatOptions, sampled
from radixcache.runtime.server.protocol.tools import OneOfTools, TextPart
from radixcache.runtime.server.protocol.turn import Thinking, Turn, TurnRequest, call_of
from radixcache.runtime.server.protocol.unsupported import OTHERS_IN_RESPONSES
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice, for_template

JSON = dict[str, Any]

SHELL = "local_shell"
"""The name that the model sees for the tool of this type."""

HOSTED = frozenset(
    "web_search_call file_search_call code_interpreter_call image_generation_call tool_search_call "
    "tool_search_output mcp_call mcp_list_tools mcp_approval_request mcp_approval_response".split()
)
"""Items of tools that run on OpenAI's servers."""


_ASKS = "input", "instructions", "previous_response_id"
_TEXTS = "input_text", "output_text", "reasoning_text", "summary_text", "text"


class ItemPart(TextPart):
    """A text within an item: input, answer, refusal or reasoning; or an image of the input."""

    harmless: ClassVar = TextPart.harmless | {"parsed"}
    needs: ClassVar = {
        **dict.fromkeys(_TEXTS, ("text",)), "refusal": ("refusal",), "input_image": ("image_url",)
    }  # fmt: skip

    type: Literal[  # type: ignore[assignment]
        "input_text", "output_text", "reasoning_text", "summary_text", "text", "refusal",
        "input_image",
    ]  # fmt: skip
    image_url: Text | None = None
    detail: Detail | None = None

    @property
    def image(self) -> str | None:
        return self.image_url


class Item(OneOf):
    """One item of a conversation; a client may send an answer's items back unchanged."""

    harmless: ClassVar = frozenset(
        "status phase encrypted_content parsed_arguments created_by caller".split()
    )
    needs: ClassVar = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("call_id", "name", "input"),
        "custom_tool_call_output": ("call_id", "output"),
        "local_shell_call": ("call_id", "action"),
        "local_shell_call_output": ("id", "output"),
        "reasoning": (),
        "item_reference": ("id",),
    }

    type: Literal[
        "message", "function_call", "function_call_output", "custom_tool_call", "reasoning",
        "custom_tool_call_output", "local_shell_call", "local_shell_call_output", "item_reference",
    ] = "message"  # fmt: skip
    id: Text | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | List[ItemPart] | None = None
    call_id: Text | None = None
    name: Text | None = None
    namespace: Text | None = None
    arguments: Text | None = None
    input: Text | None = None
    action: Json | None = None
    output: Text | List[ItemPart] | None = None
    summary: List[ItemPart] | None = None

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Item:
        if self.type.endswith("_call"):
            for_template(self.as_message())  # raises if they are not
        return self

    def as_message(self) -> Message:
        """The item as a message, or as a part of the assistant's message."""
        match self.type:
            case "reasoning":
                text = content_of(self.content, "assistant")
                text = text or content_of(self.summary, "assistant")
                return {"role": "assistant", "reasoning_content": text}
            case "function_call" | "custom_tool_call" | "local_shell_call":
                name = in_namespace(self.namespace, self.name or SHELL)
                text = self.arguments or "{}"
                if self.type == "custom_tool_call":
                    text = json.dumps({"input": self.input})
                elif action := self.action:
                    given = {k: v for k, v in action.items() if k != "type" and v not in (None, {})}
                    text = json.dumps(given)
                return {"role": "assistant", "tool_calls": [call_of(self.call_id, name, text)]}
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                call_id, content = self.call_id or self.id, content_of(self.output, "tool")
                return {"role": "tool", "tool_call_id": call_id, "content": content}
            case _:  # few chat templates have the role "developer"
                content = content_of(self.content, str(self.role))
                return {
                    "role": "system" if self.role == "developer" else self.role,
                    "content": content,
                }


class CustomFormat(StrictModel):
    """Format of a custom tool's input; the prompt describes its grammar, nothing enforces it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class ToolKind(NamedTuple):
    """The client's tool behind a function that the model sees."""

    type: str
    name: str
    namespace: str | None


class ResponseTool(OneOfTools):
    """A tool that the model sees as functions: a function, custom tool, shell or namespace."""

    hosted: ClassVar = re.compile(
        r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?|file_search|code_interpreter|"
        r"image_generation|mcp|tool_search"
    )
    needs: ClassVar = {
        "function": ("name",), "custom": ("name",), "namespace": ("name", "tools"), SHELL: (),
    }  # fmt: skip
    harmless: ClassVar = frozenset({"defer_loading", "output_schema", "cache_control"})
    refused: ClassVar = {
        "function": Unsupported("send name, description and parameters beside `type`"),
        "input_schema": Unsupported("send it as parameters"),
        "allowed_callers": Unsupported("only the model calls tools", (["direct"],)),
    }

    type: Text
    name: ToolName | None = None
    description: Text | None = None
    parameters: Json | None = None
    strict: Flag | None = None
    format: CustomFormat | None = None
    tools: Items[ResponseTool] | None = None

    def as_tools(self) -> list[Tool]:
        return [tool for tool, _ in self.functions()]

    def functions(self) -> list[tuple[Tool, ToolKind]]:
        """The functions that the model sees, each with the client's tool behind it."""
        name, text, parameters = self.name or SHELL, self.description, self.parameters
        match self.type:
            case "function":
                parameters = parameters or {"type": "object", "properties": {}}
            case "custom":
                if self.format and (grammar := self.format.definition):
                    text = f"{text or ''}\nThe input follows this grammar:\n{grammar}"
                parameters = _properties(input={"type": "string"})
            case "local_shell":
                text = "Runs a command on the user's machine, and gives what it prints."
                parameters = _properties(command={"type": "array", "items": {"type": "string"}})
                more = {"working_directory": {"type": "string"}, "timeout_ms": {"type": "integer"}}
                parameters["properties"] |= more
            case "namespace":
                inner = [pair for tool in self.tools or () for pair in tool.functions()]
                spelt = [replace(tool, name=in_namespace(name, tool.name)) for tool, _ in inner]
                if spelt and text:  # the first function carries the namespace's description
                    whole = f"{spelt[0].description or ''}\n{name}: {text}".strip()
                    spelt[0] = replace(spelt[0], description=whole)
                kinds = [kind._replace(namespace=name) for _, kind in inner]
                return [*zip(spelt, kinds, strict=True)]
            case _:
                return []
        tool = Tool(name, parameters or {}, text, bool(self.strict))
        return [(tool, ToolKind(self.type, name, None))]


def kinds_of(tools: Sequence[ResponseTool] | None) -> dict[str, ToolKind]:
    """The client's tools by the names that the model sees."""
    return {tool.name: kind for given in tools or () for tool, kind in given.functions()}


def in_namespace(namespace: str | None, name: str) -> str:
    """The name that the model sees for a function of a namespace."""
    if namespace is None:
        return name
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


def _properties(**properties: JSON) -> JSON:
    return {"type": "object", "properties": properties, "required": [*properties]}


class ResponseNamedTool(StrictModel):
    type: Literal["function", "custom"]
    name: Text
    namespace: Text | None = None

    @property
    def function_name(self) -> str:
        return in_namespace(self.namespace, self.name)


class ResponseAllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: List[ResponseNamedTool]


class TextOptions(FormatOptions):
    harmless: ClassVar = frozenset({"verbosity"})


class Reasoning(StrictModel):
    """How much the model thinks. The answer always contains its reasoning, unsummarised."""

    harmless: ClassVar = frozenset({"summary", "generate_summary"})

    effort: Text | None = None


class CacheOptions(StrictModel):
    """Every token is cached anyway."""

    harmless: ClassVar = frozenset({"mode", "ttl"})
    refused: ClassVar = {
        "prewarm": Unsupported("POST /v1/prefixes computes a prefix and pins it", (False,)),
        "comparison_response_id": Unsupported("explain says why a prompt was not cached"),
    }


class ResponsesRequest(TurnRequest, StrictModel):
    harmless: ClassVar = frozenset(
        "user safety_identifier service_tier prompt_cache_key prompt_cache_retention "
        "stream_options max_tool_calls client_metadata".split()
    )
    refused: ClassVar = {
        "background": Unsupported("keep the connection open, or stream", (False,)),
        "conversation": Unsupported("send previous_response_id, or all items"),
        "context_management": Unsupported("leave items out yourself", ([],)),
        "prompt": Unsupported("send its text as instructions and input"),
        "top_logprobs": Unsupported("/v1/chat/completions has log-probabilities", (0,)),
        **OTHERS_IN_RESPONSES,
    }

    input: Text | Items[Item] = ""
    model: Text | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: Flag | None = None
    stream: Flag | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: Stop = None
    tools: Items[ResponseTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | ResponseNamedTool | ResponseAllowedTools | None
    ) = None
    parallel_tool_calls: Flag | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: List[Text] | None = Field(
        None, description="Changes nothing: nothing is left out, and reasoning is never encrypted."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Changes nothing: what exceeds the context is refused."
    )
    metadata: Metadata | None = None
    prompt_cache_options: CacheOptions | None = None
    explain: Flag | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_hosted_tools(cls, data: Any) -> Any:
        """Drop items of tools that OpenAI's servers ran: their tools do nothing here."""
        if isinstance(data, dict) and data.keys().isdisjoint(_ASKS):
            raise ValueError("input is missing")
        if not isinstance(data, dict) or not isinstance(given := data.get("input"), list):
            return data
        items = []
        for item in given:
            fields = item if isinstance(item, dict) else {}
            if fields.get("type") is None and fields.keys() - {"type"} == {"id"}:
                item = {**item, "type": "item_reference"}  # the type may be left out
            items += [item] * (str(fields.get("type")) not in HOSTED)
        return {**data, "input": items}

    def items(self) -> list[JSON]:
        """The input as items."""
        given = self.input
        items = [Item(role="user", content=given)] if isinstance(given, str) else given
        return [item.model_dump(mode="json", exclude_none=True) for item in items]

    def messages(self) -> list[Message]:
        if not self.input and self.previous_response_id is not None:
            return []
        if isinstance(self.input, str) or not self.input:
            return [{"role": "user", "content": self.input or ""}]
        return merge([item.as_message() for item in self.input])

    def turn(self, defaults: SamplingParams, conversation: list[Message] | None = None) -> Turn:
        """The turn over `conversation`, earlier turns included; instructions go in front of it."""
        messages = self.messages() if conversation is None else conversation
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        params = sampled(defaults, self, self.text, max_tokens=self.max_output_tokens)
        effort = self.reasoning.effort if self.reasoning else None
        thinking = Thinking(effort, place="reasoning.effort")
        messages = [*map(with_images, merge_system(messages))]
        return Turn.of(self, messages, params, thinking=thinking)

    @property
    def choice(self) -> ToolChoice:
        parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case ResponseNamedTool() as tool:
                return ToolChoice("required", (tool.function_name,), True, parallel=False)
            case ResponseAllowedTools(mode=mode, tools=allowed):
                return ToolChoice(
                    mode, tuple(tool.function_name for tool in allowed), parallel=parallel
                )
            case mode:
                return ToolChoice(mode or "auto", parallel=parallel)


def merge(parts: list[Message]) -> list[Message]:
    """Messages with the parts of one answer joined into one message."""
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
    """Join the system messages at the top into one: few templates take two."""
    system, others = split_system(messages)
    text = "\n\n".join(message["content"] for message in system)
    return [*([{"role": "system", "content": text}] if system else []), *others]


def split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system messages at the top, and all messages after them."""
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    return messages[:count], messages[count:]
