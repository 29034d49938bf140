"""The engine level hits what the index level hits, request by request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixcache.bench.replay.engine_level import ScriptedEngine, run_engine
from radixcache.bench.replay.index_level import Serving, run_index
from radixcache.bench.replay.play import Arrivals
from radixcache.bench.schemes.named import parse_scheme
from radixcache.bench.workloads.generators import generate
from radixcache.errors import InvalidRequest
from tests.helpers.cover import covering
from tests.helpers.engines import paged_model
from tests.helpers.models import tiny_model

SERVING = Serving(Arrivals(concurrency=5), max_num_batched_tokens=64, max_num_seqs=4)
SCHEMES = ["none", "hash-16", "radix-1", "radix-16", "whole-16", "aligned-16"]
SPECS = [
    "chat:conversations=4,turns=3,system=30,user=10,answer=8",
    "best-of-n:questions=4,n=3,question=30,answer=6",
    "bursts:bursts=2,size=4,stem=40,question=8,answer=3",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return paged_model(tiny_model("llama", tmp_path_factory.mktemp("llama"), tokenizer=False))


@covering(spec=SPECS, memory=[160, 1024], policy=["fcfs", "lpm"])
def test_both_levels_hit_the_same_tokens_in_every_request(model, spec, memory, policy):
    workload = generate(spec, 1, model.vocab_size)
    schemes = [parse_scheme(name) for name in SCHEMES]
    serving = replace(SERVING, schedule_policy=policy)
    rows = run_engine(workload, schemes, memory, serving, model, repeats=1)
    for scheme, row in zip(schemes, rows, strict=True):
        index = run_index(workload, scheme, memory, serving)
        assert row.hits == index.hits, scheme.name
        assert row.computed_tokens == index.computed_tokens
        assert (row.refused, row.preemptions) == (index.refused, index.preemptions)
        assert row.computed_tokens >= row.prompt_tokens - row.hit_tokens
        assert row.engine is not None and row.engine.ttft_p50.median > 0


def test_an_engine_generates_what_the_workload_says(model):
    workload = generate(SPECS[0], 0, model.vocab_size)
    engine = ScriptedEngine(model, model.allocate(64, 16), parse_scheme("radix-16"), SERVING)
    requests = [engine.add(a.prompt(), a.answer()) for a in workload.arrivals]
    while engine.has_work:
        engine.step()
    for arrival, request in zip(workload.arrivals, requests, strict=True):
        assert request.sequences[0].generated.tolist() == arrival.answer().tolist()


def test_prompts_beyond_the_context_are_refused_in_one_sentence(model):
    workload = generate("documents:document=2000", 0, model.vocab_size)
    with pytest.raises(InvalidRequest, match="the model's context has 512"):
        run_engine(workload, [parse_scheme("none")], 4096, SERVING, model, repeats=1)
