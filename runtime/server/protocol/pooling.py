"""Bodies of /v1/embeddings as OpenAI has them, of /v1/rerank as Jina, Cohere and vLLM have them,
and of /v1/score as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field

from radixcache.runtime.engine.input_processor import Prompt
from radixcache.runtime.server.protocol.fields import (
    Flag,
    List,
    Salt,
    StrictModel,
    Text,
    TokenIds,
    Unsupported,
)
from radixcache.runtime.server.protocol.unsupported import HARMLESS

MAX_TEXTS = 2048
"""Texts of a request, as OpenAI has it."""

_CUT = Unsupported("cut the texts yourself: a cut text is another one", (False, "NONE", -1))
_RAW = Unsupported("vectors and scores are as the checkpoint says", (True,))
_Count = Field(min_length=1, max_length=MAX_TEXTS)


class PoolingRequest(StrictModel):
    harmless: ClassVar[frozenset[str]] = HARMLESS
    refused: ClassVar[Mapping[str, Unsupported]] = {
        **dict.fromkeys(("truncate_prompt_tokens", "truncate", "truncation"), _CUT),
        **dict.fromkeys(("normalize", "normalized", "use_activation"), _RAW),
        **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc"), _CUT),
        "rank_fields": Unsupported("documents are texts", ([], ["text"])),
        "stream": Unsupported("the answer comes whole", (False,)),
        "add_special_tokens": Unsupported("send token ids", (True,)),
        "embed_dtype": Unsupported("vectors are float32", ("float32",)),
        "endianness": Unsupported("base64 is little-endian", ("native", "little")),
    }

    model: Text | None = None
    instruction: Text | None = Field(
        None, description="The task, as the model's card has it: before each text to embed, which "
        "is then a query, or in the prompt of a score.",
    )  # fmt: skip
    cache_salt: Salt | None = Field(
        None, description="Cached prefixes are shared only among requests with the same salt."
    )


class EmbeddingRequest(PoolingRequest):
    input: (
        Text | TokenIds | Annotated[List[Text], _Count] | Annotated[List[TokenIds], _Count]
    )  # fmt: skip
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def texts(self) -> list[Prompt]:
        match self.input:
            case [str() | list(), *_] as many:
                return cast(list[Prompt], many)
            case one:
                return [cast(Prompt, one)]


class Document(StrictModel):
    text: Text


class RerankRequest(PoolingRequest):
    query: Text
    documents: Annotated[List[Text | Document], _Count]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: Flag | None = Field(None, description="False leaves out the texts.")

    @property
    def texts(self) -> list[str]:
        return [text if isinstance(text, str) else text.text for text in self.documents]


class ScoreRequest(PoolingRequest):
    text_1: Text | Annotated[List[Text], _Count] = Field(
        description="A query for all of text_2, or one for each."
    )
    text_2: Text | Annotated[List[Text], _Count]
