"""POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.server.api.chat_turn import Answers, begin, encode, turn_of
from radixcache.runtime.server.api.content_blocks import BlockExchange, Part, Step
from radixcache.runtime.server.api.exchange import JSON, STREAM_RESPONSE, event
from radixcache.runtime.server.api.extension import extension
from radixcache.runtime.server.api.response_store import ResponseStore, StoreDep, StoredResponse
from radixcache.runtime.server.http.bodies import BodyRoute, on_thread
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.protocol.fields import CacheSalt
from radixcache.runtime.server.protocol.responses import (
    Item,
    ResponsesRequest,
    ToolKind,
    kinds_of,
    merge,
)
from radixcache.runtime.server.protocol.turn import call_of
from radixcache.runtime.server.serving import ContextDep, ServingContext, client_of
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import for_template, read_object

router = APIRouter(route_class=BodyRoute)

_SAVE_SECONDS = 5.0


@router.post("/v1/responses", responses={**STREAM_RESPONSE})
async def create_response(
    body: ResponsesRequest, request: Request, context: ContextDep, store: StoreDep
) -> Any:
    """Answer a conversation, which may go on from an earlier response."""
    conversation, items = _given(body, store)
    turn = await on_thread(turn_of, body, context.chat_defaults, context.tokenizer, conversation)
    head = _begin(body, context)
    answers = await begin(context, turn, client_of(request, body.cache_salt))
    exchange = _Response(body, context, head, answers, store, conversation, items)
    return await exchange.answer(request, turn.left_out)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: ResponsesRequest, request: Request, context: ContextDep, store: StoreDep
) -> JSON:
    """Count the tokens of a response's input."""
    context.check_model(body.model)
    conversation, _ = _given(body, store)
    turn = await on_thread(turn_of, body, context.chat_defaults, context.tokenizer, conversation)
    prompt = await encode(context, turn, client_of(request, body.cache_salt))
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str, store: StoreDep, cache_salt: CacheSalt = None, stream: bool = False
) -> JSON:
    """A stored response."""
    if stream:
        raise ApiError(400, "a response that is kept is not streamed", "stream")
    kept = _find(store, response_id, cache_salt).response
    return {name: value for name, value in kept.items() if name != "input"}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    store: StoreDep,
    cache_salt: CacheSalt = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    include: Annotated[list[str] | None, Query()] = None,
) -> JSON:
    """The input of a stored response and of those before it, the last item first."""
    items = _find(store, response_id, cache_salt).response["input"]
    items = items[::-1] if order == "desc" else items
    start = next((i for i, item in enumerate(items, 1) if item["id"] == after), 0)
    if after is not None and not start:
        raise ApiError(404, f"no input item is called {after!r}", "after")
    shown = items[start:][:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    more = {"first_id": first, "last_id": last, "has_more": start + len(shown) < len(items)}
    return {"object": "list", "data": shown, **more}


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, store: StoreDep, cache_salt: CacheSalt = None) -> JSON:
    """Delete a response, on disk first; if that fails, it stays, and the answer is 503."""
    if (gone := store.erase(response_id, cache_salt)) is not None:
        from radixcache.runtime.kv_offload.disk import confirm_gone

        await asyncio.to_thread(confirm_gone, gone)
    _find(store, response_id, cache_salt)
    store.drop(response_id, cache_salt)
    return {"id": response_id, "object": "response", "deleted": True}


def _given(body: ResponsesRequest, store: ResponseStore) -> tuple[list[Message], list[JSON]]:
    """The whole conversation, as messages and as items."""
    _resolve(body, store)
    conversation, items = body.messages(), body.items()
    if body.previous_response_id is not None:
        before = _find(store, body.previous_response_id, body.cache_salt)
        conversation = merge([*before.conversation, *conversation])
        items = [*before.response["input"], *before.response["output"], *items]
    return conversation, items


def _resolve(body: ResponsesRequest, store: ResponseStore) -> None:
    """Put the items of stored responses in the place of references to them, once each."""
    items = body.input if isinstance(body.input, list) else []
    named = {item.id: at for at, item in enumerate(items) if item.type == "item_reference"}
    for name, place in named.items():
        kind, _, number = str(name).rpartition("_")
        found = store.find(f"resp_{number[:32]}", body.cache_salt)
        kept = found.response if found else {"input": (), "output": ()}
        at = int(number[32:40]) if number[32:40].isdecimal() else 0
        for one in kept["input" if kind == "in" else "output"][at : at + 1]:
            items[place] = Item(**one) if one["id"] == name else items[place]
    for item in items:
        if item.type == "item_reference":
            twice = items[named[item.id]].type != "item_reference"
            status, why = (400, "named twice") if twice else (404, "not kept")
            raise ApiError(status, f"the item {str(item.id)[:100]!r} is {why}", "input")


def _find(store: ResponseStore, response_id: str, cache_salt: str | None) -> StoredResponse:
    stored = store.find(response_id, cache_salt)
    if stored is None:
        whose = "without a cache_salt" if cache_salt is None else "with this cache_salt"
        raise ApiError(404, f"no response {response_id!r} is kept {whose}")
    return stored


def _begin(body: ResponsesRequest, context: ServingContext) -> JSON:
    """The response without any output."""
    shown = {"reasoning", "temperature", "text", "tool_choice", "tools", "top_p"}
    given = body.model_dump(mode="json", include=shown, exclude_none=True)
    defaults = context.chat_defaults
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": context.check_model(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": given.get("reasoning", {}),
        "store": body.store is not False,
        "temperature": given.get("temperature", defaults.temperature),
        "text": {"format": {"type": "text"}, **given.get("text", {})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [
            {"parameters": {}, "strict": False, **tool} if tool["type"] == "function" else tool
            for tool in given.get("tools", ())
        ],
        "top_p": given.get("top_p", defaults.top_p),
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


class _Response(BlockExchange[ResponsesRequest]):
    """A response; its `head` is the response so far.

    Attributes:
        conversation: all messages except the instructions.
        items: the conversation as the client gave it.
        kinds: the kind of each tool, by name.
    """

    saved: Future[object] | None = None
    num_events = 0

    def __init__(
        self,
        body: ResponsesRequest,
        context: ServingContext,
        head: JSON,
        answers: Answers,
        store: ResponseStore,
        conversation: list[Message],
        items: list[JSON],
    ) -> None:
        super().__init__(body, context, head, answers)
        self.store, self.conversation, self.items = store, conversation, items
        self.kinds = kinds_of(body.tools)

    async def settle(self) -> None:
        """Wait some seconds until the disk has the response; else the answer says `store` false."""
        if self.saved is not None:
            saved = asyncio.wrap_future(self.saved)
            await asyncio.wait([saved], timeout=_SAVE_SECONDS)
            self.head["store"] = saved.done() and saved.exception() is None
            kept = self.store.find(self.head["id"], self.body.cache_salt)
            if kept is not None and kept.response is not None:
                kept.response["store"] = self.head["store"]  # of the copy in memory

    def begin(self, num_tokens: int) -> Iterator[JSON]:
        yield self._event("created", response=self.head)
        yield self._event("in_progress", response=self.head)

    def step(self, step: Step) -> Iterator[JSON]:
        index, part = step.place, step.part
        ended = "incomplete" if self.is_cut else "completed"
        item = self._item(index, part, "in_progress" if step.kind == "open" else ended)
        place: JSON = {"output_index": index, "item_id": item["id"]}
        if part.kind != "call":
            place["content_index"] = 0
        if part.kind == "content":
            place["logprobs"] = []
        name = _EVENTS.get(item["type"], "")
        if step.kind == "open":
            yield self._event("output_item.added", output_index=index, item=item)
            if part.kind == "content":
                yield self._event("content_part.added", **place, part=_text(""))
        elif step.kind == "more":
            if item["type"] in _STREAMED:
                yield self._event(f"{name}.delta", **place, delta=step.text)
        else:
            whole = {key: item[key] for key in _WHOLE.get(item["type"], ())} or {"text": part.text}
            if item["type"] == "custom_tool_call":  # its text is known only now
                yield self._event(f"{name}.delta", **place, delta=item["input"])
            if name:
                yield self._event(f"{name}.done", **place, **whole)
            if part.kind == "content":
                yield self._event("content_part.done", **place, part=_text(part.text))
            yield self._event("output_item.done", output_index=index, item=item)

    def end(self, whole: JSON) -> Iterator[JSON]:
        yield self._event(whole["status"], response=whole)

    def heartbeat(self) -> str:
        """The first one says that the response has begun."""
        begun = [*self.begin_once()] or [self._event("in_progress", response=self.head)]
        return "".join(map(event, begun))

    def fail(self, error: ApiError) -> Iterator[JSON]:
        yield from self.begin_once()
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        code = codes.get(error.status, "server_error")
        self.head |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("failed", response=self.head)

    def finish(self, output: RequestOutput) -> JSON:
        """Complete the response, and store it unless `store` is false."""
        body, response, answers = self.body, self.head, self.answers
        cut, parts = output.outputs[0].finish_reason == "length", self.parts
        ends = ["completed"] * (len(parts) - 1) + ["incomplete" if cut else "completed"]
        response["status"] = ends[-1]
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        items = enumerate(zip(parts, ends, strict=False))
        response["output"] = [self._item(i, part, end) for i, (part, end) in items]
        response["usage"] = self._usage(output)
        response["radixcache"] = extension(self.context, self.job, self.answers.turn)
        if response["store"]:
            parsed = answers.message(0)
            answer = for_template(
                {
                    "role": "assistant",
                    "content": parsed.content,
                    "reasoning_content": parsed.reasoning or None,
                    "tool_calls": [call_of(*call) for call in parsed.calls] or None,
                }
            )
            conversation = [*self.conversation, answer]
            name = f"in_{response['id'].removeprefix('resp_')}"
            given = [{"id": f"{name}{i}", **item} for i, item in enumerate(self.items)]
            kept = {**response, "input": given}
            stored = StoredResponse(conversation, kept, body.cache_salt)
            self.saved = self.store.keep(response["id"], stored)
        return response

    def _event(self, kind: str, **more: Any) -> JSON:
        self.num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self.num_events - 1, **more}

    def _item(self, index: int, part: Part, status: str) -> JSON:
        name = f"{self.head['id'].removeprefix('resp_')}{index}"
        if part.kind == "call":
            return _call_item(name, part, status, self.kinds)
        if part.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": part.text}]
            return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content}
        content = [] if status == "in_progress" else [_text(part.text)]
        message = {"role": "assistant", "status": status, "content": content}
        return {"id": f"msg_{name}", "type": "message", **message}

    def _usage(self, output: RequestOutput) -> JSON:
        counts = self.usage([output])
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.answers.num_reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }


_EVENTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
_STREAMED = "message", "reasoning", "function_call"
_WHOLE = {"function_call": ("arguments", "name"), "custom_tool_call": ("input",)}


def _call_item(name: str, part: Part, status: str, kinds: Mapping[str, ToolKind]) -> JSON:
    """A function call as an item of the tool's own kind."""
    kind = kinds.get(part.name, ToolKind("function", part.name, None))
    item = {"status": status, "call_id": part.call_id}
    values = read_object(part.text) if part.text else {"input": "", "command": []}
    if kind.type == "local_shell" and isinstance((values or {}).get("command"), list):
        action = {"type": "exec", "env": {}, **(values or {})}
        return {"id": f"lsh_{name}", "type": "local_shell_call", **item, "action": action}
    item |= {"name": kind.name} | ({"namespace": kind.namespace} if kind.namespace else {})
    if kind.type == "custom":
        value = (values or {}).get("input")
        text = value if isinstance(value, str) else part.text
        return {"id": f"ctc_{name}", "type": "custom_tool_call", **item, "input": text}
    return {"id": f"fc_{name}", "type": "function_call", **item, "arguments": part.text}


def _text(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
