"""Generates the next message of a conversation, for all chat APIs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import Any

from radixcache.errors import InvalidRequest
from radixcache.runtime.outputs import CompletionOutput, Delta, RequestOutput
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams
from radixcache.runtime.server.api.exchange import find_prefix, submit
from radixcache.runtime.server.http.bodies import on_thread
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.jobs import Job
from radixcache.runtime.server.protocol.turn import Turn, TurnRequest
from radixcache.runtime.server.serving import ServingContext
from radixcache.runtime.tokens.conversation import thoughts_of
from radixcache.runtime.tokens.history import TokenisedText
from radixcache.runtime.tokens.schema_keywords import in_known_keywords
from radixcache.runtime.tokens.tokenizer import Message, Tokenizer
from radixcache.runtime.tokens.tool_calls import ParsedDelta, ParsedMessage, Tool
from radixcache.runtime.tokens.tool_formats import THOUGHT, as_rule
from radixcache.runtime.tokens.tool_parser import MessageParser

MAX_LOOSE = 4
"""Tools whose schemas may fail to compile, one by one, before every tool is given any object."""


def turn_of(body: TurnRequest, defaults: SamplingParams, tokenizer: Tokenizer, *more: Any) -> Turn:
    """The turn that a body asks for; for Responses, `more` is the whole conversation.

    Raises:
        ApiError: the model does not support switching thinking off.
        InvalidRequest: a value makes no sense.
    """
    turn = body.turn(defaults, *more)
    effort, wanted, place = turn.thinking
    if effort is None and wanted is None:
        return turn
    template, values = tokenizer.chat_template(), dict[str, Any]()
    thinks = effort != "none" if wanted is None else wanted
    if effort is not None and "reasoning_effort" in template:
        values = {"reasoning_effort": effort}
    if "enable_thinking" in template and (wanted is not None or not values):
        values["enable_thinking"] = thinks
    elif not thinks and not values and tokenizer.reasons:
        raise ApiError(400, "this model does not support switching thinking off", place)
    return replace(turn, template_kwargs={**values, **turn.template_kwargs})


async def begin(context: ServingContext, turn: Turn, client: Hashable) -> Answers:
    """Queue a turn; `ApiError` if it is refused. The caller must read the answers to their end, or
    end their `job`."""
    prompt = await encode(context, turn, client)
    params = turn.params
    if turn.tools or params.structured_outputs:  # on threads: schemas may be long
        params = await _guided(context, turn, prompt.text, client)
    job = await submit(context, [prompt], params, client, turn.cache_salt, turn.stream)
    return Answers(context, turn, prompt, job)


async def encode(context: ServingContext, turn: Turn, client: Hashable) -> TokenisedText:
    """The turn's prompt; `ApiError` if it is refused."""
    messages = turn.messages
    if turn.prefix is not None:
        prefix = await find_prefix(context, turn.prefix, turn.cache_salt)
        before = prefix.messages
        if before is None:
            raise ApiError(
                400,
                f"the prefix {turn.prefix!r} was pinned as text: it cannot begin a conversation",
                "prefix",
            )
        messages = [*before, *messages]
    _check_results(messages)
    messages = await context.images.read(messages, client)
    return await context.tokenizing.encode_chat(messages, turn.cache_salt, client, **turn.rendering)


def _check_results(messages: list[Message]) -> None:
    """Refuse results without a call before them, as OpenAI and Anthropic do."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known |= {call.get("id") for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and (name := message.get("tool_call_id")) not in known:
            raise ApiError(
                400,
                f"message {index}: a tool's result has the id of a call before it, not {name!r}",
                "messages",
            )


async def _guided(
    context: ServingContext, turn: Turn, prompt: str, client: Hashable
) -> SamplingParams:
    """The turn's parameters, with a grammar that compiles: a tool that is not strict is given any
    object if its schema does not compile. So are all tools if the grammar is too large or fails."""
    loose: set[str] = set()
    while True:
        try:
            params = await on_thread(_with_grammar, turn, context.tokenizer, prompt, loose)
            if params.structured_outputs:
                await context.grammars.compile(params.structured_outputs, client)
            return params
        except InvalidRequest as error:
            if turn.choice.mode == "none":
                raise
            found = re.search(r"\bvalue_(\d+): (.*)", str(error))
            tool = _callable(turn)[int(found[1])] if found else None
            if found and tool and tool.strict:
                reason = f"the parameters of the strict tool {tool.name!r} do not compile: "
                raise ApiError(400, reason + found[2], "tools") from None
            free = {tool.name for tool in turn.tools if not tool.strict}
            if free <= loose or (tool and tool.name in loose):
                raise
            loose |= {tool.name} if tool and len(loose) < MAX_LOOSE else free


def _callable(turn: Turn) -> list[Tool]:
    names = turn.choice.names
    return [tool for tool in turn.tools if not names or tool.name in names]


def _with_grammar(
    turn: Turn, tokenizer: Tokenizer, prompt: str, loose: Collection[str]
) -> SamplingParams:
    """The turn's parameters, with a grammar if calls must come or must follow their schemas."""
    tools, choice, wanted = turn.tools, turn.choice, turn.params.structured_outputs
    after = THOUGHT if thoughts_of(prompt) else None
    if wanted and after and not wanted.after:
        wanted = replace(wanted, after=after)
    params = replace(turn.params, structured_outputs=wanted)
    if not tools or choice.mode == "none":
        return params
    calls = tokenizer.tool_format
    if calls is None:
        raise ApiError(400, "this model writes calls in a form that is not known here", "tools")
    free = choice.mode == "auto" and choice.parallel and not choice.names and not wanted
    if free and not any(tool.strict for tool in tools):
        return params
    answer = as_rule(wanted.kind, wanted.value) if wanted else None
    if wanted and answer is None:
        raise ApiError(400, "a grammar and tools cannot be combined", "tools")
    thinks = tokenizer.reasons and not after and not prompt.rstrip().endswith(THOUGHT)
    named = _callable(turn)
    grammar = calls.grammar(named, choice, tokenizer.spell, answer, thinks, loose)
    left = [*(wanted.left_open if wanted else ())]
    for tool in named:
        left += in_known_keywords(tool.parameters)[1] if tool.strict else ()
    form = StructuredOutputsParams("grammar", grammar, after, tuple(dict.fromkeys(left)))
    return replace(params, structured_outputs=form)


@dataclass(eq=False)
class Answers:
    """The `n` messages that answer a turn, piece by piece or as a whole.

    Attributes:
        prompt: what the model is given.
        job: the engine's request; its `deltas` are for `pieces`.
    """

    context: ServingContext
    turn: Turn
    prompt: TokenisedText
    job: Job

    def __post_init__(self) -> None:
        self._parsers = defaultdict[int, MessageParser](self._make_parser)
        """A parser for each completion, by its index."""

    def _make_parser(self) -> MessageParser:
        tokenizer, turn = self.context.tokenizer, self.turn
        calls = bool(turn.tools) and turn.choice.mode != "none"
        return MessageParser(
            tokenizer.tool_format if calls else None,
            tokenizer.reasons,
            bool(thoughts_of(self.prompt.text)),
            {tool.name: tool.parameters for tool in turn.tools},
            repeats=turn.choice.mode != "required",
        )

    def pieces(self, delta: Delta) -> list[ParsedDelta]:
        """The pieces that message `delta.index` gained; at its end, also those held back."""
        end = delta.finish_reason
        return self._parsers[delta.index].feed(delta.text, end is not None, cut=end == "length")

    def message(self, index: int) -> ParsedMessage:
        """A message so far."""
        return self._parsers[index].message()

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of all thoughts, as the tokenizer splits them."""
        encode = self.context.tokenizer.encode
        thoughts = [parser.message().reasoning for parser in self._parsers.values()]
        return sum(len(encode(text, special=False)) for text in thoughts if text)

    def finish_reason(self, end: Delta | CompletionOutput) -> str | None:
        """The engine's reason, or "tool_calls"; "stop" if the client named the function to call."""
        if end.finish_reason != "stop" or self.turn.choice.named:
            return end.finish_reason
        return "tool_calls" if self.message(end.index).calls else "stop"

    def read(self, output: RequestOutput) -> Answers:
        """Parse messages that were not streamed."""
        for answer in output.outputs:
            cut = answer.finish_reason == "length"
            self._parsers[answer.index].feed(answer.text, ended=True, cut=cut)
        self.remember(output)
        return self

    def remember(self, output: RequestOutput) -> None:
        """Let conversations go on from these messages; call this at a stream's end."""
        remember = self.context.tokenizing.remember
        for answer in output.outputs:
            remember(self.prompt, answer.token_ids, self.message(answer.index))
