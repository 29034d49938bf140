"""Clients that embed and rerank."""

from __future__ import annotations

from typing import Any

import pytest

TEXTS = ["one", "two and more", "three"]


def test_openais_client_embeds(served: dict[str, Any]):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served['pooling']}/v1", api_key="none")
    found = client.embeddings.create(model="tiny", input=TEXTS, dimensions=16).data
    plain = client.embeddings.create(
        model="tiny", input=TEXTS, dimensions=16, encoding_format="float"
    ).data
    assert [one.embedding for one in found] == [one.embedding for one in plain]
    assert len(found) == 3 and sum(x * x for x in found[0].embedding) == pytest.approx(1)


def test_langchain_embeds(served: dict[str, Any]):
    langchain = pytest.importorskip("langchain_openai")
    # Else it sends token ids of OpenAI's own tokenizer, which mean other texts here.
    sends_texts: Any = {"check_embedding_ctx_length": False}
    url = f"{served['pooling']}/v1"
    embeds = langchain.OpenAIEmbeddings(model="tiny", base_url=url, api_key="x", **sends_texts)
    found = embeds.embed_documents(TEXTS)
    assert len(found) == 3 and found[1] == embeds.embed_query(TEXTS[1])


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_coheres_client_reranks(served: dict[str, Any], version: str):
    cohere = pytest.importorskip("cohere")
    client = getattr(cohere, version)(api_key="x", base_url=served["pooling"])
    found = client.rerank(model="tiny", query="Which?", documents=TEXTS, top_n=2).results
    scores = [one.relevance_score for one in found]
    assert len({one.index for one in found}) == 2 and scores == sorted(scores, reverse=True)
