"""Vectors and scores: what transformers computes, the same bits hit or miss, and computed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from radixcache import LLM, AsyncLLM, SamplingParams
from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels.spec import Unknown
from radixcache.runtime.engine.logits_cache import PooledRows
from radixcache.runtime.engine.pooling_inputs import POOLED
from radixcache.runtime.model import load as loading
from radixcache.runtime.request import PromptKey
from tests.helpers import pooling_models as models
from tests.helpers.engines import (
    Layers,
    assert_no_page_is_lost,
    finish,
    generated,
    make_engine,
    prompts,
)
from tests.helpers.gguf.files import HIDDEN, Stored, write_folder, write_model
from tests.helpers.gguf.tokenizers import CONTROL, NORMAL, USER_DEFINED
from tests.helpers.gguf.tokenizers import metadata_of as tokenizer_metadata
from tests.helpers.models import EOS, tiny_model

MEMORY = "4MiB"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.embedding_model(tmp_path_factory.mktemp("embedder"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.judging_model(tmp_path_factory.mktemp("judge"), max_position_embeddings=4096)


def texts(rng: np.random.Generator, count: int, most: int = 60) -> list[str]:
    """Some begin alike, some are equal."""
    stems = ["".join(chr(n) for n in rng.integers(97, 105, most)) for _ in range(3)]
    return [
        stems[rng.integers(3)][: rng.integers(1, most)] + "ab"[rng.integers(2)]
        for _ in range(count)
    ]


def bits(outputs: list[Any]) -> list[bytes]:
    return [output.embedding.tobytes() for output in outputs]


def test_vectors_are_those_of_sentence_transformers(embedder: Path):
    given = [*texts(np.random.default_rng(0), 12), ""]
    ids = AutoTokenizer.from_pretrained(embedder)(given)["input_ids"]
    assert all(tokens[-1] == EOS for tokens in ids)
    expected = models.rows(embedder, ids)
    with LLM(embedder, kv_cache_memory_bytes=MEMORY) as llm:
        for dimensions in (None, 16, 64):
            found = llm.embed(given, dimensions=dimensions)
            for output, row, tokens in zip(found, expected, ids, strict=True):
                wanted = models.normalized(row, dimensions)
                assert output.embedding.dtype == np.float32 and output.num_tokens == len(tokens)
                assert np.abs(output.embedding - wanted).max() < 1e-5
        asked = llm.embed("of what?", instruction="find it")[0]
        assert bits([asked]) == bits(llm.embed("Instruct: find it\nQuery:of what?"))
        assert bits(llm.embed(ids)) == bits(llm.embed(given))


def test_a_text_is_computed_once_whoever_sends_it(embedder: Path):
    with LLM(embedder, kv_cache_memory_bytes=MEMORY) as llm:
        one, two, three = llm.embed(["abcdefgh" * 5, "abcdefgh" * 5, "abcdefgh" * 5 + "i"])
        assert (one.num_cached_tokens, one.prefilled_tokens) == (0, 41)
        assert (two.num_cached_tokens, two.prefilled_tokens) == (41, 0)
        assert three.prefilled_tokens <= 2 + llm.engine.kv_pool.page_size
        assert bits([one]) == bits([two]) != bits([three])
        steps = llm.worker.num_steps
        short = llm.embed("abcdefgh" * 5, dimensions=8)[0]
        assert short.prefilled_tokens == 0 and llm.worker.num_steps == steps + 1
        salted = llm.embed("abcdefgh" * 5, cache_salt="mine")[0]
        assert salted.prefilled_tokens == 41 and bits([salted]) == bits([one])
        llm.call(lambda: llm.cache.evict(llm.engine.kv_pool.num_pages))
        assert llm.embed("abcdefgh" * 5)[0].num_cached_tokens == 41  # the row needs no KV
        llm.reset_prefix_cache()
        again = llm.embed("abcdefgh" * 5)[0]
        assert again.prefilled_tokens == 41 and bits([again]) == bits([one])


def test_the_rows_used_last_are_kept_and_no_more_than_fit():
    kept = PooledRows(num_bytes=3 * 16)
    keys = [PromptKey(np.arange(n, n + 20, dtype=np.int32), None) for n in range(5)]
    for n in (0, 1, 2):
        kept.keep(keys[n], np.full(4, n, np.float32))
    assert kept.use(keys[0])[0] == 0
    for n in (3, 4):
        kept.keep(keys[n], np.full(4, n, np.float32))
    assert [key in kept for key in keys] == [True, False, False, True, True] and len(kept) == 3


@pytest.mark.parametrize("batches", [60, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_the_same_bits_hit_or_miss_in_any_batch(embedder: Path, batches: int):
    rng, known = np.random.default_rng(batches), dict[str, bytes]()
    # So little memory that texts are evicted and requests preempted.
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "kv_cache_memory_bytes": "320KB"}
    with LLM(embedder, exact=True, **settings) as llm, LLM(embedder, cache="none") as plain:
        evicted = 0
        for _ in range(batches):
            given = texts(rng, int(rng.integers(1, 9)), int(rng.integers(2, 120)))
            if rng.random() < 0.5:
                llm.call(llm.engine.output_processor.pooled_rows.clear)
            found = llm.embed(given)
            for text, output in zip(given, bits(found), strict=True):
                assert known.setdefault(text, output) == output
        evicted = llm.cache.stats.evicted_tokens
        assert evicted and llm.cache.stats.hit_tokens
        some = [*known][:200]
        for text, output in zip(some, bits(plain.embed(some)), strict=True):
            assert known[text] == output
        llm.call(llm.engine.check)


def test_documents_behind_one_query_compute_themselves_alone(judge: Path):
    rng = np.random.default_rng(0)
    query = "".join(chr(n) for n in rng.integers(97, 123, 300))
    documents = ["".join(chr(n) for n in rng.integers(97, 123, 40)) for _ in range(100)]
    with LLM(judge, kv_cache_memory_bytes="64MiB") as llm:
        first = llm.score(query, documents[0])[0]
        assert first.prefilled_tokens == first.num_tokens > 500
        others = llm.score(query, documents[1:])
        computed = sum(output.prefilled_tokens for output in others)
        prompts = [one.tokens for one in llm.pooling_inputs.score(query, documents, None).inputs]
        columns = enumerate(zip(*prompts, strict=False))
        shared = next(n for n, column in columns if len({*column}) > 1)
        nodes = {tuple(tokens[:n]) for tokens in prompts for n in range(1, len(tokens) + 1)}
        # A tree of all prompts, by brute force; letters that two begin with may be computed twice.
        least = len(nodes) - first.num_tokens
        assert least <= computed <= sum(len(tokens) - shared for tokens in prompts[1:])
        assert computed < sum(output.num_tokens for output in others) / 8


def test_scores_are_the_probabilities_of_yes(judge: Path):
    documents = ["It is red.", "It is blue, no?", "yes"]
    tokenizer = AutoTokenizer.from_pretrained(judge)
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".'
    )
    asked = [
        f"<|system|>{system}\n<|user|><Instruct>: colours\n<Query>: Which?\n"
        f"<Document>: {document}\n<|assistant|><think></think>"
        for document in documents
    ]
    expected = models.probabilities_of_yes(judge, [tokenizer.encode(text) for text in asked])
    with LLM(judge, kv_cache_memory_bytes=MEMORY) as llm:
        found = [one.score for one in llm.score("Which?", documents, instruction="colours")]
        assert np.abs(np.array(found) - expected).max() < 1e-5 and len(set(found)) == 3
        default = llm.score("Which?", documents)
        assert [one.score for one in default] != found
        answer = llm.generate("Which?", SamplingParams(temperature=0, max_tokens=3))[0]
        assert len(answer.outputs[0].token_ids) == 3  # it is a language model, too


def test_a_checkpoints_own_tokens_and_roles_make_its_score(tmp_path: Path):
    folder = models.judging_model(tmp_path, models.PAIR_TEMPLATE)
    models.write_modules(folder, ("Transformer", ""), ("LogitScore", "1_LogitScore"))
    (folder / "1_LogitScore").mkdir()
    said = {"true_token_id": models.NO, "false_token_id": models.YES}  # not by our names
    (folder / "1_LogitScore/config.json").write_text(json.dumps(said))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with LLM(folder, kv_cache_memory_bytes=MEMORY) as llm:
        for instruction, shown in ((None, "find"), ("sort", "sort")):
            found = llm.score("Which?", "This.", instruction=instruction)[0].score
            ids = tokenizer.encode(f"I: {shown} Q: Which? D: This.!")
            assert abs(1 - found - models.probabilities_of_yes(folder, [ids])[0]) < 1e-5
        with pytest.raises(InvalidRequest, match="made to score texts, and generates none"):
            llm.generate("Which?")
        with pytest.raises(InvalidRequest, match="scores texts and makes no vectors"):
            llm.embed("Which?")


def test_a_classification_head_scores_both_texts_in_one(tmp_path: Path):
    folder = models.classifying_model(tmp_path / "one")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder).encode("Which?This.")
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].sigmoid().item()
    with LLM(folder, kv_cache_memory_bytes=MEMORY) as llm:
        assert abs(llm.score("Which?", ["This."])[0].score - expected) < 1e-5
        with pytest.raises(InvalidRequest, match="no place for an instruction"):
            llm.score("Which?", ["This."], instruction="sort")
    three = models.classifying_model(tmp_path / "three", 3)
    with (
        LLM(three, kv_cache_memory_bytes=MEMORY) as llm,
        pytest.raises(InvalidRequest, match="into 3 classes"),
    ):
        llm.score("Which?", ["This."])


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_next", {}), ("gemma3_text", {"max_position_embeddings": 4096}), ("deepseek_v2", {})],
)
def test_any_language_model_embeds(tmp_path: Path, family: str, options: dict[str, Any]):
    folder = tiny_model(family, tmp_path, **options)
    given = ["abcd" * 12, "abcd" * 12 + "e", "abcd" * 9]
    ids = AutoTokenizer.from_pretrained(folder)(given)["input_ids"]
    expected = [models.normalized(row) for row in models.rows(folder, ids)]
    with LLM(folder, kv_cache_memory_bytes="8MiB") as llm:
        for _ in range(2):
            for output, wanted in zip(llm.embed(given), expected, strict=True):
                assert np.abs(output.embedding - wanted).max() < 1e-5
            llm.call(llm.engine.output_processor.pooled_rows.clear)


def _gguf(path: Path, **metadata: Any) -> tuple[Path, Path]:
    """A file with a tokenizer of bytes, and its weights as a folder."""
    rows = [(c, NORMAL) for c in sorted(ByteLevel.alphabet())] + [("</s>", CONTROL), ("ab", NORMAL)]
    keys = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"], "eos_token_id": 256}
    told = tokenizer_metadata([*rows, ("yes", USER_DEFINED), ("no", USER_DEFINED)], **keys)
    told |= {"general.architecture": "qwen3", "tokenizer.ggml.add_eos_token": True, **metadata}
    head = np.random.default_rng(1).normal(0, 0.1, (2, HIDDEN)).astype(np.float32)
    extra = {"cls.output.weight": Stored("F32", head.shape, head.tobytes())}
    path.mkdir(exist_ok=True)
    file, ranks = path / "model.gguf", metadata["{}.pooling_type"] == 4
    dense = write_model(file, told, "qwen3", ["F32"], tied=True, extra=extra if ranks else None)
    np.save(path / "head.npy", head)
    more = {"tie_word_embeddings": True, "rope_theta": 10_000.0}
    return file, write_folder(path / "folder", "qwen3", dense, **more)


def test_a_gguf_file_embeds(tmp_path: Path):
    file, folder = _gguf(tmp_path, **{"{}.pooling_type": 3})
    expected = models.normalized(models.rows(folder, [[97, 98, 256]])[0], 20)
    with LLM(file, kv_cache_memory_bytes="8MiB") as llm:
        found = llm.embed([[97, 98, 256]], dimensions=20)[0].embedding
        assert np.abs(found - expected).max() < 1e-5
        assert llm.embed("hello")[0].num_tokens == 6  # with EOS
    for kind in (1, 2):
        file, _ = _gguf(tmp_path / str(kind), **{"{}.pooling_type": kind})
        with pytest.raises(ModelError, match="rows of other tokens than the last"):
            LLM(file)


def test_a_gguf_file_ranks_by_its_own_template(tmp_path: Path):
    labels = {"{}.classifier.output_labels": ["yes", "no"]}
    written = {"tokenizer.chat_template.rerank": "Q {query} D {document} {query}"}
    file, folder = _gguf(tmp_path, **{"{}.pooling_type": 4}, **labels, **written)
    with LLM(file, kv_cache_memory_bytes="8MiB") as llm:
        ids = [*llm.encode("Q what? D {query} what?", special=False)]
        row, head = models.rows(folder, [ids])[0], np.load(tmp_path / "head.npy").astype(float)
        yes, no = np.exp(head @ row)
        found = llm.score("what?", "{query}")[0]  # which stays as it is
        assert found.num_tokens == len(ids) and abs(found.score - yes / (yes + no)) < 1e-5
        with pytest.raises(InvalidRequest, match="an instruction of its own"):
            llm.score("what?", "this", instruction="sort")
    file, _ = _gguf(tmp_path / "unsaid", **{"{}.pooling_type": 4}, **written)
    with (
        LLM(file, kv_cache_memory_bytes="8MiB") as llm,
        pytest.raises(InvalidRequest, match="into 2 classes"),
    ):
        llm.score("what?", "this")


def test_transformers_layers_embed_too(embedder: Path, tmp_path: Path, monkeypatch: Any):
    def unknown(*_: Any) -> None:
        raise Unknown("a test says so")

    folder = models.judging_model(tmp_path)
    ids = AutoTokenizer.from_pretrained(folder)(["abcd" * 12, "abc"])["input_ids"]
    expected = [models.normalized(row) for row in models.rows(folder, ids)]
    monkeypatch.setattr(loading, "_load_decoder", unknown)
    with LLM(folder, kv_cache_memory_bytes="8MiB") as llm:
        assert "layers by transformers" in llm.notes[0]
        for output, wanted in zip(llm.embed(ids), expected, strict=True):
            assert np.abs(output.embedding - wanted).max() < 1e-5
        with pytest.raises(InvalidRequest, match="no scores"):
            llm.score("Which?", ["This."])


@pytest.mark.parametrize("cache", ["radix", "hash-block", "none"])
@pytest.mark.parametrize("layers", ["chosen", "torch", "stock"])
def test_rows_beside_answers_over_any_layers_and_cache(judge: Path, layers: Layers, cache: str):
    given = prompts()
    expected, said = models.rows(judge, given), list[Any]()
    for pages in (512, 40):  # of which the latter preempts
        engine = make_engine(judge, cache, 4, pages, 24, layers=layers)
        rows, answers = [], []
        for prompt in given * 2:
            rows.append(engine.add_request(prompt, POOLED, pools=True))
            answers.append(engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=5)))
        finish(engine)
        for request, row in zip(rows, expected * 2, strict=True):
            assert request.pooled is not None and np.abs(request.pooled - row).max() < 1e-4
        assert sum(request.prefilled_tokens == 0 for request in rows) >= len(given)
        said.append(generated(answers))
        assert_no_page_is_lost(engine)
    assert said[0] == said[1]


def test_a_row_is_reported_once_however_the_next_step_is_scheduled(judge: Path):
    rng = np.random.default_rng(0)
    given = [rng.integers(28, size=size).tolist() for size in (5, 12, 19)]
    for _ in range(30):  # steps launched ahead, but not where a client must give way
        engine = make_engine(judge, "radix", 2, 24, 8, 2)
        engine.overlap, asked, told = True, [], []
        for n in range(25):
            prompt = given[rng.integers(3)]
            if rng.random() < 0.7:
                asked.append(engine.add_request(prompt, POOLED, pools=True, client=n % 2))
            else:
                params = SamplingParams(temperature=0, max_tokens=8)
                engine.add_request(prompt, params, client=n % 2)
            told += [request for request in engine.step() if request.pools]
        while engine.has_work:
            told += [request for request in engine.step() if request.pools]
        assert len(told) == len(asked) and {*told} == {*asked}


def test_nobody_is_preempted_for_a_text_that_runs_or_whose_row_is_kept(judge: Path):
    text, engine = [n % 250 for n in range(300)], make_engine(judge, "radix", 2, 512, 8, 2)
    first = engine.add_request(text, POOLED, pools=True, client="one")
    answer = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add_request([3, 4, 5], answer, client="one")
    engine.step()
    twin = engine.add_request(text, POOLED, pools=True, client="other")
    finish(engine)
    assert engine.scheduler.num_preemptions == 0 and twin.prefilled_tokens == 0
    assert first.pooled is twin.pooled is not None
    for end in (5, 6):
        engine.add_request([3, 4, end], answer, client="one")
    engine.step()
    third = engine.add_request(text, POOLED, pools=True, client="other")
    engine.step()
    assert third.finished and not engine.scheduler.num_preemptions
    finish(engine)


def test_what_a_request_computed_before_it_was_preempted_was_not_cached(judge: Path):
    engine = make_engine(judge, "radix", 2, 512, 8, 2)
    request = engine.add_request([*range(30)], POOLED, pools=True)
    engine.step()
    engine.scheduler._preempt(request.sequences[0])
    engine.output_processor.pooled_rows.keep(request.prompt_key, np.zeros(64, np.float32))
    finish(engine)
    assert (request.prefilled_tokens, request.sequences[0].cached_tokens) == (8, 0)


def test_answers_and_vectors_in_one_batch(judge: Path):
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["tell me " + "x" * n for n in range(0, 30, 3)]

    async def both(llm: AsyncLLM) -> tuple[Any, Any]:
        return await asyncio.gather(llm.generate(prompts, params), llm.embed(prompts))

    with LLM(judge, exact=True, kv_cache_memory_bytes=MEMORY) as alone:
        said = [one.outputs[0].token_ids for one in alone.generate(prompts, params)]
        alone.reset_prefix_cache()
        vectors = bits(alone.embed(prompts))
        alone.reset_prefix_cache()
        found, embedded = asyncio.run(both(AsyncLLM(alone)))
        assert [one.outputs[0].token_ids for one in found] == said and bits(embedded) == vectors
        scores = asyncio.run(AsyncLLM(alone).score("Which?", ["This."]))
        assert scores[0].score == alone.score("Which?", "This.")[0].score


def _mean(folder: Path) -> Path:
    return models.embedding_model(folder, pooling={"pooling_mode_mean_tokens": True})


def _dense(folder: Path) -> Path:
    models.embedding_model(folder)
    models.write_modules(
        folder, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")
    )
    return folder


def _changed(**settings: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        models.embedding_model(folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        return folder

    return make


def _said(file: str, **settings: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        models.embedding_model(folder)
        (folder / file).write_text(json.dumps(settings))
        return folder

    return make


PROMPTS = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_said("sentence_bert_config.json", do_lower_case=True), "in lower case"),
        (_said(PROMPTS, prompts=["a"], default_prompt_name="a"), "has no prompt 'a'"),
        (_said(PROMPTS, prompts={"a": "b"}, default_prompt_name=["a"]), "has no prompt"),
        (_said(PROMPTS, prompts={"a": "b"}, default_prompt_name="c"), "has no prompt 'c'"),
        (_mean, "rows of other tokens than the last"),
        (_dense, "has a Dense, which nothing here reads"),
        (_changed(model_type="xlm-roberta"), "it is an encoder, whose tokens see later ones"),
        (_changed(use_bidirectional_attention=True), "it is an encoder"),
        (_changed(is_causal=False), "no prefix to cache"),
    ],
)
def test_what_does_not_embed_here_is_refused(tmp_path: Path, make: Any, sentence: str):
    with pytest.raises(ModelError, match=sentence):
        LLM(make(tmp_path))


def test_a_text_in_a_dict_has_the_same_prompt_before_it(tmp_path: Path):
    folder = models.embedding_model(tmp_path)
    said = {"prompts": {"document": "D: "}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    with LLM(folder, kv_cache_memory_bytes=MEMORY) as llm:
        for before in (None, "find"):
            texts: list[Any] = ["abc", {"prompt": "abc"}]
            found = llm.embed(texts, instruction=before)
            assert found[0].num_tokens == found[1].num_tokens > 6
            assert bits(found[:1]) == bits(found[1:])


def test_what_is_no_pair_of_texts_is_refused(judge: Path):
    wrong: list[Any] = [None, 5, {"text": "a"}, ["a", None], [["a"]]]
    with LLM(judge, kv_cache_memory_bytes=MEMORY) as llm:
        for given in wrong:
            for pair in ((given, "a"), ("a", given)):
                with pytest.raises(InvalidRequest, match="texts"):
                    llm.score(*pair)


def test_requests_that_make_no_sense_are_refused(embedder: Path):
    wrong: list[Any] = [1.5, "8", {"prompt": None}]
    with LLM(embedder, kv_cache_memory_bytes=MEMORY) as llm:
        for ask, sentence in [
            (lambda: llm.embed("a", dimensions=0), "from 1 to 64"),
            (lambda: llm.embed("a", dimensions=65), "from 1 to 64"),
            (lambda: llm.embed("a", dimensions=True), "from 1 to 64"),
            (lambda: llm.embed("a", dimensions=wrong[0]), "from 1 to 64"),
            (lambda: llm.embed("a", dimensions=wrong[1]), "from 1 to 64"),
            (lambda: llm.embed(wrong[2]), "a prompt is a string or token ids"),
            (lambda: llm.embed([[1, 2]], instruction="x"), "not before token ids"),
            (lambda: llm.embed(["a", []]), "prompt 1: the prompt is empty"),
            (lambda: llm.embed("a" * 5000), "maximum context length"),
            (lambda: llm.score("a", "b"), "scores no pairs"),
            (lambda: llm.generate("a"), "made to embed texts, and generates none"),
        ]:
            with pytest.raises(InvalidRequest, match=sentence):
                ask()
        assert llm.embed([]) == [] and not llm.engine.has_work
