"""Messages with calls of tools, and what a request says of tools and templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.protocol.fields import (
    MAX_SCHEMAS,
    NO_MEDIA,
    Body,
    Items,
    Json,
    List,
    Salt,
    StrictModel,
    Text,
    ToolName,
    Unsupported,
)
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice, for_template


class TextPart(StrictModel):
    """A part of a message's content; text is the only kind there is."""

    harmless = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations"})
    refused: ClassVar[Mapping[str, Unsupported]] = NO_MEDIA

    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    name: Text
    arguments: Text


class ToolCall(Body):
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    """A message of a conversation; one of role "tool" answers the call `tool_call_id`."""

    harmless = frozenset({"refusal", "annotations", "provider_specific_fields"})  # LiteLLM's
    refused: ClassVar[Mapping[str, Unsupported]] = {
        "function_call": Unsupported("send tool_calls"),
        "audio": Unsupported("send text"),
    }

    role: Annotated[Text, Field(min_length=1)]
    content: Text | List[TextPart] | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: Text | None = None
    name: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it; parts are joined by line breaks."""
        content = self.content
        if content is not None and not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Few templates know developers, and some leave out whom they do not know.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id, "name": self.name}
        if self.role == "assistant":
            message["content"] = content or ""
            message["reasoning_content"] = self.reasoning_content or self.reasoning
        return for_template(message)

    @model_validator(mode="after")
    def _something_said(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("only an assistant's message may have no content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        self.plain()  # refuses
        return self


class Function(StrictModel):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: ToolName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    """A tool; functions are the only kind there is."""

    refused: ClassVar[Mapping[str, Unsupported]] = {
        **dict.fromkeys(Function.model_fields, Unsupported("it belongs into `function`")),
        "input_schema": Unsupported("send it as function.parameters"),
    }

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Tools of which some must, or may, be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[List[NamedTool], Field(min_length=1)]


class AllowedToolChoice(Body):
    """A choice among fewer tools than the model is told of."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def make_tool(
    name: str, parameters: dict[str, Any] | None, description: str | None, strict: bool | None
) -> Tool:
    """A function that the model is told of; without parameters it takes none."""
    return Tool(name, parameters or {"type": "object", "properties": {}}, description, bool(strict))


class TurnRequest(Body):
    """What asks for the next message of a conversation, in each API's own form.

    Attributes:
        effort_field: where the API says how much to think.
        goes_on: the last message goes on instead of a new one beginning.
        asks: the prompt asks for the next message.
    """

    effort_field: ClassVar[str] = "reasoning_effort"
    cache_salt: Salt | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        raise NotImplementedError

    @property
    def choice(self) -> ToolChoice:
        raise NotImplementedError

    def plain_messages(self) -> list[Message]:
        """The conversation as chat templates take it."""
        raise NotImplementedError

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Sampling as asked for, and else as in `defaults`."""
        return defaults

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return {}

    @property
    def effort(self) -> str | None:
        return None

    @property
    def goes_on(self) -> bool:
        return False

    @property
    def asks(self) -> bool:
        return not self.goes_on

    @property
    def is_explained(self) -> bool:
        return False

    @model_validator(mode="after")
    def _choice_among_tools(self) -> TurnRequest:
        tools, choice = self.offered, self.choice
        names = [tool.name for tool in tools]
        if len({*names}) < len(names):
            raise ValueError("two tools have the same name")
        if sum(len(json.dumps(tool.parameters)) for tool in tools) > MAX_SCHEMAS:
            raise ValueError(f"at most {MAX_SCHEMAS} characters of JSON schemas in all tools")
        if missing := [name for name in choice.names if name not in names]:
            raise ValueError(f"tool_choice names {missing[0]!r}, which is not among the tools")
        if choice.mode == "required" and not names:
            raise ValueError("tool_choice needs tools")
        return self


class ToolFields(TurnRequest):
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = Field(
        None, description="More values for the chat template, such as `enable_thinking`."
    )
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        functions = [tool.function for tool in self.tools or ()]
        return tuple(make_tool(f.name, f.parameters, f.description, f.strict) for f in functions)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def goes_on(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def asks(self) -> bool:
        return self.add_generation_prompt is not False

    @property
    def choice(self) -> ToolChoice:
        parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case NamedTool(function=function):
                return ToolChoice("required", (function.name,), True, parallel=False)
            case AllowedToolChoice(allowed_tools=allowed):
                names = tuple(tool.function.name for tool in allowed.tools)
                return ToolChoice(allowed.mode, names, parallel=parallel)
            case mode:
                return ToolChoice(mode or "auto", parallel=parallel)

    @model_validator(mode="after")
    def _goes_on_or_begins(self) -> ToolFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt to be false")
        return self
