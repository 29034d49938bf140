"""Bodies of /v1/messages, Anthropic's API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.protocol.fields import (
    NO_MEDIA,
    Flag,
    Items,
    Json,
    List,
    MaxTokens,
    OneOf,
    SomeItems,
    StrictModel,
    Temperature,
    Text,
    ToolName,
    TopK,
    TopP,
    Unsupported,
    check_stop,
)
from radixcache.runtime.server.protocol.images import Source, check_part, content_of, with_images
from radixcache.runtime.server.protocol.response_format import FormatOptions, sampled
from radixcache.runtime.server.protocol.responses import merge_system
from radixcache.runtime.server.protocol.tools import OneOfTools
from radixcache.runtime.server.protocol.turn import Thinking, Turn, TurnRequest, call_of
from radixcache.runtime.server.protocol.unsupported import OTHERS_IN_MESSAGES
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice

JSON = dict[str, Any]

MAX_BREAKPOINTS = 4
_BILLING = "x-anthropic-billing-header"
"""The start of a text that changes with each request: in the prompt, it would prevent every hit."""


class CacheControl(StrictModel):
    """The prompt up to here will be sent again within `ttl`; requests of one salt share it."""

    harmless: ClassVar = frozenset({"scope"})

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class Block(OneOf):
    harmless: ClassVar = frozenset({"citations", "signature", "data", "caller"})
    refused: ClassVar = NO_MEDIA
    needs: ClassVar = {
        "text": ("text",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
        "tool_reference": ("tool_name",),
        "image": ("source",),
    }

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = None
    name: Text | None = None
    input: Json | None = None
    tool_use_id: Text | None = None
    tool_name: Text | None = None
    content: Text | List[ResultBlock] | None = None
    is_error: Flag | None = None
    cache_control: CacheControl | None = None
    source: Source | None = None

    @property
    def image(self) -> str | None:
        return self.source.url if self.source else None

    @model_validator(mode="after")
    def _text_or_image(self) -> Block:
        return check_part(self)


class TextBlock(Block):
    type: Literal["text"]


class ResultBlock(Block):
    """A text, an image, or a tool that a search has found, whose description is put here."""

    type: Literal["text", "image", "tool_reference"]  # type: ignore[assignment]


class TurnOptions(StrictModel):
    effort: Text | None = None


class ChatTurn(StrictModel):
    refused: ClassVar = {"clear_at": Unsupported("leave the message out yourself", ("never",))}

    role: Literal["user", "assistant", "system"]
    content: Text | List[Block]
    output_config: TurnOptions | None = None

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [Block(type="text", text=self.content)]
        return self.content or [Block(type="text", text="")]

    def as_messages(self, blocks: list[Block]) -> list[Message]:
        """The messages that `blocks` make: results of tools are messages of their own."""
        results = [
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": content_of(block.content, "tool", "Error: " * bool(block.is_error)),
            }
            for block in blocks
            if block.type == "tool_result"
        ]
        said = [block for block in blocks if block.text is not None or block.image]
        message: Message = {"role": self.role, "content": content_of(said, self.role)}
        if thoughts := [block for block in blocks if block.type.endswith("thinking")]:
            message["reasoning_content"] = "\n".join(block.thinking or "" for block in thoughts)
        if calls := [block for block in blocks if block.type == "tool_use"]:
            message["tool_calls"] = [call_of(call.id, call.name, call.input) for call in calls]
        return results if results and not said else [*results, message]


class ClientTool(OneOfTools):
    hosted: ClassVar = re.compile(
        r"(web_search|web_fetch|code_execution|tool_search_tool(_regex|_bm25)?|advisor|mcp_toolset)"
        r"(_\d{8})?"
    )
    needs: ClassVar = {"custom": ("name", "input_schema")}
    harmless: ClassVar = frozenset({"eager_input_streaming"})
    refused: ClassVar = {
        "allowed_callers": Unsupported("only the model calls tools", (["direct"],)),
        "function": Unsupported("send name, description and input_schema beside each other"),
        "parameters": Unsupported("send them as input_schema"),
    }

    type: Text = "custom"
    name: ToolName | None = None
    description: Text | None = None
    input_schema: Json | None = None
    input_examples: Items[Json] | None = None
    strict: Flag | None = None
    defer_loading: Flag | None = None
    cache_control: CacheControl | None = None

    def as_tools(self) -> list[Tool]:
        if self.name is None:
            return []
        examples = [json.dumps(one, ensure_ascii=False) for one in self.input_examples or ()]
        described = [self.description or "", "Examples:", *examples] if examples else []
        return [
            Tool(
                self.name,
                self.input_schema or {"type": "object", "properties": {}},
                "\n".join(described).strip() or self.description,
                bool(self.strict),
                bool(self.defer_loading),
            )
        ]


class ClientToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag | None = None


class ThinkingOptions(StrictModel):
    """Whether the model thinks; only `max_tokens` limits how much."""

    harmless: ClassVar = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class Edit(StrictModel):
    """Removes thoughts from the conversation, except those of the last turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | JSON | None = None

    def apply(self, turns: list[ChatTurn]) -> None:
        if self.keep == "all":
            return
        keep = self.keep.get("value") if isinstance(self.keep, dict) else 1
        if not isinstance(keep, int):
            raise ValueError("context_management keeps the thoughts of a number of turns, or all")
        found = [[b for b in turn.blocks if b.type.endswith("thinking")] for turn in turns]
        thoughts = [blocks for blocks in found if blocks]
        for blocks in thoughts[: max(0, len(thoughts) - keep)]:
            for block in blocks:
                block.thinking = ""


class ContextManagement(StrictModel):
    edits: List[Edit] | None = None


class OutputConfig(TurnOptions, FormatOptions):
    harmless: ClassVar = frozenset({"task_budget"})  # a wish, which nothing here tells the model


class CountRequest(TurnRequest, StrictModel):
    refused: ClassVar = {
        "container": Unsupported("run the tools yourself"),
        "mcp_servers": Unsupported("call them yourself", ([],)),
        "thread": Unsupported("send all messages each time"),
        **OTHERS_IN_MESSAGES,
    }
    harmless: ClassVar = frozenset({"speed"})

    model: Text | None = None
    messages: SomeItems[ChatTurn]
    betas: List[Text] | None = None
    system: Text | Items[TextBlock] | None = None
    tools: Items[ClientTool] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        """All tools; deferred ones are told at once if a hosted tool would search for them."""
        searched = any(kind.startswith("tool_search") for kind in self.left_out)
        return tuple(replace(t, deferred=t.deferred and not searched) for t in super().offered)

    @model_validator(mode="after")
    def _edited(self) -> CountRequest:
        for edit in (self.context_management and self.context_management.edits) or ():
            edit.apply(self.messages)
        tools = {tool.name: tool for tool in self.offered}
        blocks = [block for turn in self.messages for block in turn.blocks]
        for part in (part for b in blocks if isinstance(b.content, list) for part in b.content):
            if part.type == "tool_reference":
                if (tool := tools.get(part.tool_name or "")) is None:
                    raise ValueError(f"a tool_reference names {part.tool_name!r}, which is no tool")
                part.text = json.dumps(tool.as_template()["function"], ensure_ascii=False)
        return self

    @property
    def system_texts(self) -> list[TextBlock]:
        """The system prompt, without texts that change with each request."""
        system = self.system or []
        blocks = [TextBlock(type="text", text=system)] if isinstance(system, str) else system
        return [block for block in blocks if not (block.text or "").startswith(_BILLING)]

    def breakpoints(self) -> Iterator[tuple[list[Message], CacheControl]]:
        """The messages up to each `cache_control`.

        Templates put the tools beside the system prompt, so both end together.
        """
        messages = self._with_system([])
        controls = [part.cache_control for part in (*(self.tools or ()), *self.system_texts)]
        if last := next(filter(None, reversed(controls)), None):
            yield [*messages], last
        for turn in self.messages:
            for count, block in enumerate(turn.blocks, 1):
                if block.cache_control:
                    yield [*messages, *turn.as_messages(turn.blocks[:count])], block.cache_control
            messages += turn.as_messages(turn.blocks)
        if self.cache_control:
            yield messages, self.cache_control

    def _with_system(self, messages: list[Message]) -> list[Message]:
        texts = [block.text or "" for block in self.system_texts]
        system = [{"role": "system", "content": "\n".join(texts)}] if texts else []
        return merge_system([*system, *messages])

    def turn(self, defaults: SamplingParams) -> Turn:
        new = [message for turn in self.messages for message in turn.as_messages(turn.blocks)]
        goes_on = self.messages[-1].role == "assistant"
        configs = [self.output_config, *(turn.output_config for turn in self.messages)]
        effort = next((one.effort for one in reversed(configs) if one and one.effort), None)
        asked = {"enabled": True, "disabled": False}
        wanted = asked.get(self.thinking.type) if self.thinking else None
        thinking = Thinking(effort, wanted, "output_config.effort" if effort else "thinking")
        how = {"thinking": thinking, "continue_final": goes_on, "ask": not goes_on}
        return Turn.of(self, [*map(with_images, self._with_system(new))], defaults, **how)

    @property
    def choice(self) -> ToolChoice:
        if self.tool_choice is None:
            return ToolChoice("auto")
        kind, parallel = self.tool_choice.type, not self.tool_choice.disable_parallel_tool_use
        if kind == "tool":
            return ToolChoice("required", (self.tool_choice.name or "",), True, parallel=False)
        return ToolChoice("required" if kind == "any" else kind, parallel=parallel)


class MessagesRequest(CountRequest):
    refused: ClassVar = CountRequest.refused | {
        "diagnostics": Unsupported(
            "explain says why a prompt was not cached", ({}, {"previous_message_id": None})
        )
    }
    harmless: ClassVar = frozenset("metadata service_tier speed inference_geo".split())

    max_tokens: MaxTokens
    stop_sequences: Annotated[List[Text] | None, AfterValidator(check_stop)] = None
    stream: Flag | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    explain: Flag | None = None

    @model_validator(mode="after")
    def _few_breakpoints(self) -> MessagesRequest:
        blocks = [block for turn in self.messages for block in turn.blocks]
        marked = (self, *(self.tools or ()), *self.system_texts, *blocks)
        if sum(part.cache_control is not None for part in marked) > MAX_BREAKPOINTS:
            raise ValueError(f"a cache_control may stand in {MAX_BREAKPOINTS} places at most")
        return self

    def turn(self, defaults: SamplingParams) -> Turn:
        more = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super().turn(sampled(defaults, self, self.output_config, **more))


Block.model_rebuild()
