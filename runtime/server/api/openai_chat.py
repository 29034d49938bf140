"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from radixcache.runtime.outputs import CompletionOutput, Delta, RequestOutput
from radixcache.runtime.server.api.chat_turn import Answers, begin, turn_of
from radixcache.runtime.server.api.exchange import JSON, STREAM_RESPONSE
from radixcache.runtime.server.api.extension import extension
from radixcache.runtime.server.api.openai_chunks import Chunks, clamp, head_of
from radixcache.runtime.server.http.bodies import BodyRoute
from radixcache.runtime.server.protocol.openai import ChatRequest
from radixcache.runtime.server.protocol.turn import call_of
from radixcache.runtime.server.serving import ContextDep, ServingContext, client_of
from radixcache.runtime.tokens.tool_calls import ParsedDelta

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", responses={**STREAM_RESPONSE})
async def chat_completions(body: ChatRequest, request: Request, context: ContextDep) -> Any:
    """Answer a conversation."""
    head = head_of(body, context, "chatcmpl", "chat.completion")
    turn = turn_of(body, context.chat_defaults, context.tokenizer)
    answers = await begin(context, turn, client_of(request, body.cache_salt))
    return await _Chat(body, context, head, answers).answer(request)


class _Chat(Chunks[ChatRequest]):
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, body: ChatRequest, context: ServingContext, head: JSON, answers: Answers
    ) -> None:
        super().__init__(body, context, head, answers.job)
        self._answers = answers
        self._begun: set[int] = set()

    def whole(self, outputs: list[RequestOutput]) -> JSON:
        (output,) = outputs
        self._answers.read(output)
        return {
            **self.head,
            "choices": [self._choice(one) for one in output.outputs],
            "usage": self.usage(outputs),
            "radixcache": extension(self.context, self.job, self.body),
            "prompt_logprobs": self.prompt_logprobs(output),
            "prompt_token_ids": output.prompt_token_ids if self.body.return_token_ids else None,
        }

    def _choice(self, answer: CompletionOutput) -> JSON:
        body, message = self.body, self._answers.message(answer.index)
        reasoning = None if body.include_reasoning is False else message.reasoning or None
        calls = [call_of(*call) for call in message.calls]
        return {
            "index": answer.index,
            "message": {
                "role": "assistant",
                "content": None if calls and not message.content else message.content,
                "tool_calls": calls or None,
                "reasoning": reasoning,
                "reasoning_content": reasoning,
                "refusal": None,
            },
            "logprobs": self._logprobs(answer.token_ids, answer.logprobs),
            "finish_reason": self._answers.finish_reason(answer),
            "stop_reason": answer.stop_reason,
            "token_ids": answer.token_ids if body.return_token_ids else None,
        }

    def chunks_of(self, prompt: int, delta: Delta) -> Iterator[JSON]:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            first = self._chunk(delta.index, {"role": "assistant", "content": ""})
            if self.body.return_token_ids:
                first["prompt_token_ids"] = self._answers.prompt.tokens.tolist()
            yield first
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        shown: JSON = {"logprobs": logprobs} if logprobs and delta.token_ids else {}
        if self.body.return_token_ids and delta.token_ids:
            shown["token_ids"] = delta.token_ids
        pieces = self._answers.pieces(delta)
        if self.body.include_reasoning is False:
            pieces = [piece for piece in pieces if piece.kind != "reasoning"]
        for piece in pieces or [ParsedDelta("content", "")] * bool(shown):
            yield self._chunk(delta.index, _delta(piece), **shown)
            shown = {}  # all tokens are in the first
        if reason := self._answers.finish_reason(delta):
            ends = {"finish_reason": reason, "stop_reason": delta.stop_reason}
            yield self._chunk(delta.index, {}, **ends)

    def usage(self, outputs: Sequence[RequestOutput]) -> JSON:
        details = {"reasoning_tokens": self._answers.num_reasoning_tokens}
        return {**super().usage(outputs), "completion_tokens_details": details}

    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        self._answers.remember(outputs[0])
        yield from super().last(outputs)

    def _chunk(self, index: int, delta: JSON, **more: Any) -> JSON:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk({**choice, **more})

    def _logprobs(self, tokens: list[int], logprobs: list[dict[int, float]] | None) -> JSON | None:
        if logprobs is None:
            return None
        tokenizer, count = self.context.tokenizer, self.body.top_logprobs or 0

        def describe(token: int, logprob: float) -> JSON:
            return {
                "token": self.token_name(token),
                "logprob": clamp(logprob),
                "bytes": [*tokenizer.token_bytes(token)],
            }

        content = []
        for token, top in zip(tokens, logprobs, strict=True):
            likeliest = sorted(top.items(), key=lambda item: -item[1])[:count]
            alternatives = [describe(*item) for item in likeliest]
            content.append({**describe(token, top[token]), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}


def _delta(piece: ParsedDelta) -> JSON:
    match piece.kind:
        case "content":
            return {"content": piece.text}
        case "reasoning":
            return {"reasoning": piece.text, "reasoning_content": piece.text}
        case "call":
            more = call_of(piece.call_id, piece.text, "")
        case "arguments":
            more = {"function": {"arguments": piece.text}}
    return {"tool_calls": [{"index": piece.call, **more}]}
