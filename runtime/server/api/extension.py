"""What an answer says beside OpenAI's fields: the engine's facts about a request."""

from __future__ import annotations

from collections.abc import Sequence

from radixcache.runtime.explanation import Loaded, Miss
from radixcache.runtime.outputs import find_repetition
from radixcache.runtime.server.api.exchange import JSON
from radixcache.runtime.server.jobs import Job
from radixcache.runtime.server.protocol.openai import GenerationRequest
from radixcache.runtime.server.protocol.turn import Turn
from radixcache.runtime.server.serving import ServingContext


def extension(context: ServingContext, job: Job, wants: Turn | GenerationRequest) -> JSON:
    """The engine's facts about a finished job that OpenAI has no field for.

    ttft: seconds from the request's arrival to its first token.
    loaded_tokens: cached tokens that came up from a tier below the KV memory.
    drafted_tokens, accepted_tokens: tokens computed before they were drawn, and those of them
        that were drawn.
    explanation: what was loaded and what missed, prompt by prompt, if the request asks for it.
    repetitions: for each answer, how many tokens its end repeats over and over, or null; null
        as a whole if no answer does.
    """
    requests, explanation = job.requests, None
    if wants.explain:
        parts: list[Loaded | Miss] = []
        for request in requests:
            parts += [*request.sequences[0].loaded, *(request.explanation or ())]
        explanation = describe_misses(context, parts, wants.prefix)
    sequences = [sequence for request in requests for sequence in request.sequences]
    repetitions = [find_repetition(sequence.generated) for sequence in sequences]
    return {
        "ttft": requests[0].ttft,
        "loaded_tokens": sum(request.sequences[0].num_loaded for request in requests),
        "drafted_tokens": sum(s.num_drafted.total() for s in sequences),
        "accepted_tokens": sum(s.num_accepted.total() for s in sequences),
        "explanation": explanation,
        "repetitions": repetitions if any(repetitions) else None,
    }


def describe_misses(
    context: ServingContext, misses: Sequence[Loaded | Miss], prefix: str | None
) -> list[JSON]:
    """Loads and misses as an answer shows them, for a client that named this prefix."""
    tokenizer = context.llm.tokenizer
    if context.options.hide_texts:
        misses = [miss.redacted(before=prefix is not None) for miss in misses]
    show = tokenizer.show if tokenizer else None
    return [
        {"reason": m.reason, "start": m.start, "end": m.end, "text": m.describe(show)}
        for m in misses
    ]
