"""The prompts of texts to embed and of pairs to score, and what becomes of their rows.

The judge's prompt is that of Qwen3-Reranker's model card, and an instruction stands before a query
as on Qwen3-Embedding's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from radixcache.errors import EngineFailed, InvalidRequest
from radixcache.runtime.engine.input_processor import (
    EngineInput,
    InputProcessor,
    Prompt,
    Prompts,
    as_prompts,
)
from radixcache.runtime.engine.stream import Stream
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.outputs import EmbeddingOutput, PooledOutput, ScoringOutput
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.tokens.tokenizer import Message, Tokenizer

Texts = str | Sequence[str]

Output = TypeVar("Output", bound=PooledOutput)

POOLED = SamplingParams(max_tokens=0)
"""The parameters of a request for a row."""

TASK = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of a score that names none."""

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_FIELDS = re.compile(r"\{(query|document)\}")


@dataclass(frozen=True)
class Pooled(Generic[Output]):
    """Requests for rows, and what makes an output of each."""

    inputs: list[EngineInput]
    output: Callable[[Request], Output]


def pooled_outputs(pooled: Pooled[Output], stream: Stream) -> list[Output]:
    """The outputs of a stream that has ended.

    Raises:
        EngineFailed: a row is not of numbers, or had no room.
    """
    for request in stream.requests:
        if request.error is not None:
            raise EngineFailed(request.error)
    return [pooled.output(request) for request in stream.requests]


def judge_tokens(tokenizer: Tokenizer | None) -> tuple[int, ...] | None:
    """The tokens for yes and for no; None if one of them is not one token."""
    if tokenizer is None:
        return None
    found = [tokenizer.encode(text, special=False) for text in ("yes", "no")]
    return tuple(ids[0] for ids in found) if all(len(ids) == 1 for ids in found) else None


class PoolingInputs:
    """Tokenises and checks on the caller's thread."""

    def __init__(self, model: PagedModel, inputs: InputProcessor) -> None:
        self._model, self._inputs = model, inputs

    def embed(
        self, texts: Prompts, dimensions: int | None, instruction: str | None
    ) -> Pooled[EmbeddingOutput]:
        """See `LLM.embed`."""
        pooler = self._model.pooler
        pooler.check_vectors(self._model.hidden_size, dimensions)
        before = pooler.pooling.prompt
        if instruction is not None:
            before = f"Instruct: {instruction}\nQuery:"
        prompts = [_text_of(prompt) for prompt in as_prompts(texts)]
        if instruction is not None and not all(isinstance(text, str) for text in prompts):
            raise InvalidRequest("an instruction goes before texts, not before token ids")
        whole = (before + text if isinstance(text, str) else text for text in prompts)
        inputs = [self._inputs.encode_one(text, POOLED) for text in whole]

        def output(request: Request) -> EmbeddingOutput:
            assert request.pooled is not None
            vector = pooler.vector(request.pooled, dimensions)
            return EmbeddingOutput(*_counts(request), vector)

        return Pooled(inputs, output)

    def score(
        self, query: Texts, documents: Texts, instruction: str | None
    ) -> Pooled[ScoringOutput]:
        """See `LLM.score`."""
        pooler = self._model.pooler
        pooler.check_scores()
        queries, documents = _texts(query), _texts(documents)
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest(f"{len(queries)} queries and {len(documents)} documents: no pairs")
        queries = queries * len(documents) if len(queries) == 1 else queries
        pairs = zip(queries, documents, strict=True)
        inputs = [self._pair(*pair, instruction) for pair in pairs]

        def output(request: Request) -> ScoringOutput:
            assert request.pooled is not None
            return ScoringOutput(*_counts(request), pooler.score(request.pooled))

        return Pooled(inputs, output)

    def _pair(self, query: str, document: str, instruction: str | None) -> EngineInput:
        """A query and a document as the checkpoint wants them, the query first: by its template,
        by one of its chat template's that has roles for them, by the judge's prompt, or else one
        behind the other, as the caller has written them."""
        pooling, tokenizer = self._model.pooler.pooling, self._inputs.tokenizer
        encode = partial(self._inputs.encode_one, params=POOLED)
        parts = {"query": query, "document": document}
        if pooling.template is not None:
            if instruction is not None:
                raise InvalidRequest("the template of this model has an instruction of its own")
            text = _FIELDS.sub(lambda field: parts[field[1]], pooling.template)
            return encode(text, special=False)
        if tokenizer.has_roles(*parts):
            messages = [{"role": role, "content": content} for role, content in parts.items()]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            return encode(tokenizer.render_chat(messages), special=False)
        if pooling.judges is None:
            if instruction is not None:
                raise InvalidRequest("this model has no place for an instruction but the query")
            return encode(query + document)
        lines = f"<Instruct>: {instruction or TASK}\n<Query>: {query}\n<Document>: {document}"
        asked: list[Message] = [
            {"role": "system", "content": _JUDGE},
            {"role": "user", "content": lines},
        ]
        thinks = "enable_thinking" in tokenizer.chat_template()
        values = {"enable_thinking": False} if thinks else {}
        return encode(tokenizer.render_chat(asked, template_kwargs=values), special=False)


def _text_of(prompt: Prompt) -> Prompt:
    """A text that stands in a dict, or what is given."""
    if isinstance(prompt, dict) and prompt.get("multi_modal_data"):
        raise InvalidRequest("embeddings are of texts, without images")
    if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None:
        return prompt.get("prompt", prompt)
    return prompt


def _texts(given: Texts) -> list[str]:
    many = [given] if isinstance(given, str) else given
    if isinstance(many, Mapping) or not isinstance(many, Iterable):
        raise InvalidRequest(f"texts are a string or several, not {type(given).__name__}")
    texts = [*many]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("a query and its documents are texts")
    return texts


def _counts(request: Request) -> tuple[int, int, int]:
    cached = request.sequences[0].cached_tokens
    return len(request.prompt_token_ids), cached, request.prefilled_tokens
