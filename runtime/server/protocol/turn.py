"""A request for the next message of a conversation, the same for all APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import model_validator

from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.protocol.fields import MAX_SCHEMAS, Body, Flag, Salt
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice, is_longer


class Thinking(NamedTuple):
    """How much to think, whether to think (None leaves it to the model), and the field that says
    so."""

    effort: str | None = None
    wanted: bool | None = None
    place: str = ""


@dataclass(frozen=True)
class Turn:
    """A request, whichever API's body made it.

    Attributes:
        messages: as chat templates take them: `content` is a string; an assistant's `tool_calls`
            are [{"id", "type", "function": {"name", "arguments": dict}}]; role "tool" has a
            `tool_call_id`.
        params: sampling parameters, to which tools may still add a grammar.
        template_kwargs: more values for the chat template.
        left_out: kinds of hosted tools, which the model is not told of.
        continue_final: the last message goes on, and no new one begins.
        ask: the prompt ends with the template's generation prompt.
        prefix: name of a pinned prefix that goes before the messages.
        explain: keep the reasons for which prompt tokens were not cached.
    """

    messages: list[Message]
    params: SamplingParams
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)
    continue_final: bool = False
    ask: bool = True
    cache_salt: str | None = None
    prefix: str | None = None
    stream: bool = False
    explain: bool = False
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, body: TurnRequest, messages: list[Message], params: SamplingParams, **more: Any
    ) -> Turn:
        """The turn of a body, which may lack fields such as `stream`; `more` is as in the class."""
        flags = {name: bool(getattr(body, name, None)) for name in ("stream", "explain")}
        more = {"cache_salt": body.cache_salt, "left_out": body.left_out, **flags, **more}
        return cls(messages, params, body.offered, body.choice, **more)

    @property
    def rendering(self) -> dict[str, Any]:
        """The options of `Tokenizer.render_chat`."""
        return {
            "tools": [tool.as_template() for tool in self.tools if not tool.deferred],
            "template_kwargs": self.template_kwargs,
            "ask": self.ask,
            "continue_final": self.continue_final,
        }


class TurnRequest(Body):
    """A body that asks for a turn, and may offer tools."""

    cache_salt: Salt | None = None
    ends_conversation: Flag | None = None
    tools: Sequence[Any] | None = None

    @property
    def offered(self) -> tuple[Tool, ...]:
        """All functions among the tools."""
        return tuple(tool for kind in self.tools or () for tool in kind.as_tools())

    @property
    def left_out(self) -> tuple[str, ...]:
        """The kinds of tools without functions: the API's own servers would run them."""
        return tuple(dict.fromkeys(tool.type for tool in self.tools or () if not tool.as_tools()))

    @property
    def choice(self) -> ToolChoice:
        raise NotImplementedError

    def turn(self, defaults: SamplingParams) -> Turn:
        """The turn; `defaults` fill in what is not given. `InvalidRequest` if it makes no sense."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _choice_among_tools(self) -> TurnRequest:
        tools, choice = self.offered, self.choice
        names = [tool.name for tool in tools]
        if len({*names}) < len(names):
            raise ValueError("two tools have the same name")
        if is_longer([tool.parameters for tool in tools], MAX_SCHEMAS):
            raise ValueError(f"at most {MAX_SCHEMAS} characters of JSON schemas in all tools")
        if missing := [name for name in choice.names if name not in names]:
            raise ValueError(f"tool_choice names {missing[0]!r}, which is not among the tools")
        if choice.mode == "required" and not names:
            raise ValueError("tool_choice needs tools")
        return self


def call_of(call_id: str | None, name: str | None, arguments: object) -> dict[str, Any]:
    """A function call as chat messages have it; arguments are JSON text or an object."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
