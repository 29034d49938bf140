"""Chat messages with tool calls, and the fields about tools and templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from radixcache.runtime.server.protocol.fields import (
    NO_MEDIA,
    Body,
    Flag,
    Items,
    Json,
    List,
    OneOf,
    StrictModel,
    Text,
    ToolName,
    Unsupported,
)
from radixcache.runtime.server.protocol.images import (
    ImageUrl,
    check_part,
    content_of,
    with_images,
)
from radixcache.runtime.server.protocol.turn import TurnRequest
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice


class TextPart(OneOf):
    """A part of a message's content: text, or a refusal, which is text, too."""

    harmless = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations", "logprobs"})
    refused: ClassVar[Mapping[str, Unsupported]] = NO_MEDIA
    needs: ClassVar = {"text": ("text",), "refusal": ("refusal",)}

    type: Literal["text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def _refusal_as_text(self) -> TextPart:
        self.text = self.refusal if self.type == "refusal" else self.text
        return check_part(self)

    @property
    def image(self) -> str | None:
        return None


class ChatPart(TextPart):
    """A text, a refusal or an image."""

    needs: ClassVar = {**TextPart.needs, "image_url": ("image_url",)}

    type: Literal["text", "refusal", "image_url"]  # type: ignore[assignment]
    image_url: ImageUrl | None = None

    @property
    def image(self) -> str | None:
        return self.image_url.url if self.image_url else None


class CalledFunction(Body):
    name: Text
    arguments: Text


class ToolCall(Body):
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    """A message of a conversation; one of role "tool" answers the call `tool_call_id`."""

    harmless = frozenset(  # fields of answers that are sent back, and what clients add
        "annotations cache_control id parsed provider_specific_fields reasoning_details "
        "thinking_blocks".split()
    )
    refused: ClassVar[Mapping[str, Unsupported]] = {
        "function_call": Unsupported("send tool_calls"),
        "audio": Unsupported("send text"),
    }

    role: Annotated[Text, Field(min_length=1)]
    content: Text | List[ChatPart] | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: Text | None = None
    name: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None

    def plain(self) -> dict[str, Any]:
        """The message as a `Turn` has it; texts alone are joined by line breaks."""
        content = None if self.content is None else content_of(self.content, self.role)
        # Few templates know developers, and some drop messages of unknown roles.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id, "name": self.name}
        if self.role == "assistant":
            message["content"] = content or self.refusal or ""
            message["reasoning_content"] = self.reasoning_content or self.reasoning
        return with_images(message)

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("only an assistant's message may have no content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant's message has tool_calls")
        self.plain()  # refuses
        return self


class Function(StrictModel):
    """A function that the model may call; `parameters` is a JSON schema of an object, absent if the
    function takes none."""

    name: ToolName
    description: Text | None = None
    parameters: Json | None = None
    strict: Flag | None = None

    def as_tool(self) -> Tool:
        parameters = self.parameters or {"type": "object", "properties": {}}
        return Tool(self.name, parameters, self.description, bool(self.strict))


class OneOfTools(OneOf):
    """A tool. The model is not told of hosted tools, which the API's own servers would run, and
    their other fields are ignored.

    Attributes:
        hosted: matches the types of hosted tools.
    """

    hosted: ClassVar[re.Pattern[str]]

    @model_validator(mode="before")
    @classmethod
    def _is_of_a_known_kind(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if not isinstance(kind, str) or kind in cls.needs:
            return data
        if not cls.hosted.fullmatch(kind):
            raise ValueError(f"tools of type {kind[:64]!r} are not supported: describe a function")
        return {"type": kind, "cache_control": data.get("cache_control")}


class FunctionTool(StrictModel):
    harmless = frozenset({"cache_control"})
    refused: ClassVar[Mapping[str, Unsupported]] = {
        **dict.fromkeys(Function.model_fields, Unsupported("it belongs into `function`")),
        "input_schema": Unsupported("send it as function.parameters"),
    }

    type: Literal["function"]
    function: Function

    def as_tools(self) -> list[Tool]:
        return [self.function.as_tool()]


class FunctionName(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[List[NamedTool], Field(min_length=1)]


class AllowedToolChoice(Body):
    """A choice among some of the tools that the model is told of."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolFields(TurnRequest):
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: Json | None = Field(
        None, description="More values for the chat template, such as `enable_thinking`."
    )
    reasoning_effort: Text | None = None
    include_reasoning: Flag | None = None
    continue_final_message: Flag | None = None
    add_generation_prompt: Flag | None = None

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
