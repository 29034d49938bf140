"""/v1/embeddings, /v1/rerank and /v1/score, as their clients send and read them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from radixcache import LLM
from tests.helpers import pooling_models as models
from tests.helpers.models import tiny_model
from tests.runtime.server.live import LiveServer, assert_error, live


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = models.embedding_model(tmp_path_factory.mktemp("embedder"))
    with live(LLM(folder, kv_cache_memory_bytes="8MiB", max_num_seqs=5)) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = models.judging_model(tmp_path_factory.mktemp("judge"), max_position_embeddings=4096)
    llm = LLM(folder, kv_cache_memory_bytes="8MiB")
    with live(llm, enable_pooling=True) as server:
        yield server
        server.assert_idle()


def test_openais_client_gets_the_vectors_of_llm(embedder: LiveServer):
    texts = [f"text {n}" * (n + 1) for n in range(12)]  # more than may run at a time
    expected = [one.embedding for one in embedder.backend.llm.embed(texts, dimensions=24)]
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    forms: list[Any] = [{}, {"encoding_format": "float"}]  # by itself it asks for base64
    for form in forms:
        found: Any = client.embeddings.create(model=model, input=texts, dimensions=24, **form)
        assert [one.index for one in found.data] == [*range(12)]
        for one, wanted in zip(found.data, expected, strict=True):
            assert np.array_equal(np.array(one.embedding, np.float32), wanted)
        assert found.usage.prompt_tokens == found.usage.total_tokens > 100
    alone: Any = client.embeddings.create(model=model, input=[5, 6, 7])
    many: Any = client.embeddings.create(model=model, input=[[5, 6, 7], [5, 6]])
    assert len(alone.data) == 1 and len(many.data) == 2
    assert alone.data[0].embedding == many.data[0].embedding


def test_the_body_says_what_was_cached(embedder: LiveServer):
    body = {"input": "a text of its own", "encoding_format": "base64"}
    first, second = (embedder.post("/v1/embeddings", body).json() for _ in range(2))
    one, two = (base64.b64decode(got["data"][0]["embedding"]) for got in (first, second))
    assert one == two and len(one) == 4 * 64 and first["object"] == "list"
    usage = [got["usage"] for got in (first, second)]
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usage] == [0, 18]
    salted = embedder.post("/v1/embeddings", {**body, "cache_salt": "mine"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["data"] == second["data"]
    asked = embedder.post("/v1/embeddings", {**body, "instruction": "find"}).json()
    assert asked["usage"]["prompt_tokens"] == 18 + len("Instruct: find\nQuery:")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_gives_the_best_first(judge: LiveServer, path: str):
    documents: list[Any] = ["one", "two and more", {"text": "three"}, "two and more"]
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    scores = [one.score for one in judge.backend.llm.score("Which?", texts)]
    body = {"query": "Which?", "documents": documents, "top_n": 3}
    found = judge.post(path, body).json()
    order = [*np.argsort([-score for score in scores], kind="stable")][:3]
    assert [one["index"] for one in found["results"]] == order
    for one in found["results"]:
        assert one["relevance_score"] == scores[one["index"]]
        assert one["document"] == {"text": texts[one["index"]]}
    counts = found["usage"]
    assert counts["prompt_tokens"] == counts["prompt_tokens_details"]["cached_tokens"] > 0
    bare = judge.post(path, {**body, "return_documents": False}).json()
    assert all(one.keys() == {"index", "relevance_score"} for one in bare["results"])


def test_score_pairs_texts(judge: LiveServer):
    def scores(first: Any, second: Any) -> list[float]:
        found = judge.post("/v1/score", {"text_1": first, "text_2": second}).json()["data"]
        assert [one["index"] for one in found] == [*range(len(found))]
        return [one["score"] for one in found]

    a_x, a_y = (one.score for one in judge.backend.llm.score("a", ["x", "y"]))
    b_y = judge.backend.llm.score("b", "y")[0].score
    assert scores("a", "x") == scores(["a"], ["x"]) == [a_x]
    assert scores("a", ["x", "y"]) == [a_x, a_y] and scores(["a", "b"], ["x", "y"]) == [a_x, b_y]


def test_a_chat_model_embeds_only_where_it_is_asked_to(
    judge: LiveServer, embedder: LiveServer, tmp_path: Any
):
    assert len(judge.post("/v1/embeddings", {"input": "a"}).json()["data"][0]["embedding"]) == 64
    chat = {"messages": [{"role": "user", "content": "a"}]}
    refused = embedder.post("/v1/chat/completions", chat)
    assert_error(refused, 400, "made to embed texts, and generates none")
    with live(LLM(tiny_model("llama", tmp_path), kv_cache_memory_bytes="4MiB")) as server:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ):
            assert_error(server.post(path, body), 400, "--enable-pooling")


def test_what_asks_for_nothing_is_accepted(embedder: LiveServer):
    for fields, others in (
        ({"stream": False}, {"stream": True}),
        ({"add_special_tokens": True}, {"add_special_tokens": False}),
        ({"embed_dtype": "float32", "endianness": "little"}, {"embed_dtype": "float16"}),
        ({"endianness": "native"}, {"endianness": "big"}),
    ):
        assert embedder.post("/v1/embeddings", {"input": "a", **fields}).status_code == 200
        refused = embedder.post("/v1/embeddings", {"input": "a", **others})
        assert_error(refused, 400, "not supported")


def test_an_error_names_the_text(embedder: LiveServer):
    for given, sentence in (
        (["ok", "a" * 600], "prompt 1: This model's maximum context length is 512 tokens"),
        ([[1]] * 9 + [[10**6]], "prompt 9: the prompt has token ids outside the vocabulary"),
        ("a" * 600, "its 601 tokens are more"),
    ):
        assert_error(embedder.post("/v1/embeddings", {"input": given}), 400, sentence)


def test_a_request_keeps_its_room_from_one_group_to_the_next(judge: LiveServer):
    """Or others would take it, and the request be refused with half of it done."""
    jobs, body = judge.backend.jobs, {"input": [f"text {n}" for n in range(100)]}
    size, free = judge.engine.scheduler.max_num_seqs, []
    submitted, capacity = jobs.submit, size + 1

    async def submit(*args: Any, **options: Any) -> Any:
        free.append(capacity - jobs._num_sequences.total())
        return await submitted(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "capacity", capacity)
        patch.setattr(jobs, "submit", submit)
        assert judge.post("/v1/embeddings", body).status_code == 200
    assert len(free) == -(-100 // size) > 1 and {*free} == {1}
    judge.assert_idle()


def test_all_groups_together_have_the_time_of_one_request(judge: LiveServer):
    jobs, size = judge.backend.jobs, judge.engine.scheduler.max_num_seqs
    submitted, options = jobs.submit, judge.backend.options

    async def submit(*args: Any, **given: Any) -> Any:
        await asyncio.sleep(0.4)
        return await submitted(*args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "submit", submit)
        patch.setattr(judge.backend, "options", replace(options, request_timeout=1.0))
        late = judge.post("/v1/embeddings", {"input": ["a"] * (3 * size)})
    assert_error(late, 504, "not finished within 1 seconds")
    judge.assert_idle()


EMBEDDINGS: list[Any] = [
    {}, {"input": None}, {"input": ""} | {"input": []}, {"input": [[]]}, {"input": [[1], []]},
    {"input": 7}, {"input": {"text": "a"}}, {"input": [None]}, {"input": ["a", 1]},
    {"input": [1, "a"]}, {"input": [[1], "a"]}, {"input": [[[1]]]},
    {"input": [1.5]}, {"input": [-1]}, {"input": [10**9]}, {"input": [[2**40]]},
    {"input": "a" * 600}, {"input": ["ok", "a" * 600]}, {"input": ["a"] * 2049},
    {"input": [[1]] * 2049}, {"input": ["a"] * 1_000_000}, {"input": [1] * 1_000_000},
    {"input": "a" * 5_000_000}, {"input": "a", "dimensions": 0},
    {"input": "a", "dimensions": 65}, {"input": "a", "dimensions": "eight"},
    {"input": "a", "dimensions": 2**70}, {"input": "a", "dimensions": 1.5},
    {"input": "a", "encoding_format": "hex"}, {"input": "a", "truncate_prompt_tokens": 5},
    {"input": "a", "normalize": False}, {"input": "a", "unknown": 1},
    {"input": "a", "cache_salt": ""}, {"input": [[1, 2]], "instruction": "find"},
    {"input": "a", "instruction": ["find"]}, [], "a", 7,
]  # fmt: skip
PAIRS: list[tuple[str, Any]] = [
    ("rerank", {}), ("rerank", {"query": "a"}), ("rerank", {"query": "a", "documents": []}),
    ("rerank", {"query": "a", "documents": "b"}), ("rerank", {"query": 1, "documents": ["b"]}),
    ("rerank", {"query": "a", "documents": [1]}), ("rerank", {"query": "a", "documents": [{}]}),
    ("rerank", {"query": "a", "documents": [{"text": 1}]}),
    ("rerank", {"query": "a", "documents": [{"text": "b", "image": "c"}]}),
    ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}),
    ("rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}),
    ("rerank", {"query": "a", "documents": ["b"] * 2049}),
    ("rerank", {"query": "a", "documents": ["b"] * 1_000_000}),
    ("rerank", {"query": "a" * 5000, "documents": ["b"]}),
    ("rerank", {"query": "a", "documents": ["b", "c" * 5000]}),
    ("score", {}), ("score", {"text_1": "a"}), ("score", {"text_1": [], "text_2": []}),
    ("score", {"text_1": ["a", "b"], "text_2": ["c"]}),
    ("score", {"text_1": "a", "text_2": [1]}), ("score", {"text_1": "a", "text_2": ["b"] * 2049}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(EMBEDDINGS)))
def test_hostile_bodies_of_embeddings_are_refused(embedder: LiveServer, number: int):
    answer = embedder.post("/v1/embeddings", EMBEDDINGS[number])
    assert_error(answer, 400, "")
    assert len(answer.text) < 2000
    embedder.assert_idle()


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_hostile_pairs_are_refused(judge: LiveServer, number: int):
    path, body = PAIRS[number]
    answer = judge.post(f"/v1/{path}", body)
    assert_error(answer, 400, "")
    assert len(answer.text) < 2000
    judge.assert_idle()


@pytest.mark.parametrize(
    "body",
    [
        *('{"input": NaN}', '{"input": "a", "dimensions": NaN}', '{"input": [1e999]}'),
        *("{", '{"input": "\\ud800"}', '{"input": ["a", "\\udfff"]}'),
    ],
)
def test_what_is_no_number_or_text_is_refused(embedder: LiveServer, body: str):
    headers = {"Content-Type": "application/json"}
    assert_error(embedder.post("/v1/embeddings", content=body, headers=headers), 400, "")
