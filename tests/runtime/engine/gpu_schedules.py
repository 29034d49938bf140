"""Random schedules of an engine on the simulated GPU, over FlashInfer's own Python.

    PYTHONPATH=.venv-gpu/flashinfer python -m tests.runtime.engine.gpu_schedules --seed 1

Chunks, drafts, cascades, preemption, aborts, steps that fail, rows from which nothing can be drawn,
resets, experts, hybrids, windows that are kept apart, and host memory below: every answer is what
plain transformers say, without a cache. Each step in a CUDA graph gives the logits, the KV and the
states of the same step that is launched kernel by kernel.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from radixcache import RadixCache, SamplingParams
from radixcache.runtime.engine import model_runner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.kv_offload.host import HostStore
from radixcache.runtime.kv_offload.offload import Offload
from radixcache.runtime.model.load import load_model
from radixcache.runtime.request import Request
from tests.helpers import engines
from tests.helpers.decoders import DECODERS
from tests.helpers.drafts import speculate
from tests.helpers.engines import generated, is_greedy, make_engine
from tests.helpers.models import tiny_model
from tests.helpers.tiers import pinning_cuda
from tests.helpers.traffic import NOTHING_LEFT, Asked, play

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "gemma2": {}, "gpt_oss": DECODERS["gpt_oss"],
}  # fmt: skip
HYBRIDS = {family: DECODERS[family] for family in ("qwen3_5_text", "bamba", "lfm2")}
NEAR = 2e-5
"""How far the logits of both ways may be apart, as a share of their range: products of other
numbers of rows add in other orders."""


@contextmanager
def simulating() -> Iterator[None]:
    with (
        pinning_cuda(flashinfer=True),
        patch.object(
            engines,
            "paged_model",
            lambda path, *_: load_model(path, device="cuda", dtype="float32"),
        ),
    ):
        yield


def make_models(root: Path) -> dict[str, Path]:
    return {
        family: tiny_model(family, root / family, **options)
        for family, options in (FAMILIES | HYBRIDS).items()
    }


def run_schedule(folders: dict[str, Path], seed: int, num_requests: int = 12) -> Counter[str]:
    """Play one of the schedules, within `simulating`; what it has seen."""
    rng = random.Random(seed)
    is_hybrid = seed % 4 == 3
    families = HYBRIDS if is_hybrid else FAMILIES
    family, page_size = rng.choice([*families]), rng.choice([1, 4, 16])
    path, tokens = folders[family], rng.choice([101, 101, 130, 2000])
    kind = rng.choice(["radix", "radix", "radix", "hash-block", "none"])
    step, running = rng.choice([9, 24, 64, 600]), rng.choice([1, 3, 12, 40])
    states = (2 * running + rng.choice([0, 1, 40])) * is_hybrid
    engine = make_engine(
        path, kind, page_size, -(-tokens // page_size) + 2, step, running, num_states=states,
        windows=not is_hybrid and rng.random() < 0.5,
    )  # fmt: skip
    proposer = speculate(engine) if not is_hybrid and rng.random() < 0.4 else None
    offload = None
    if isinstance(engine.cache, RadixCache) and not is_hybrid and rng.random() < 0.5:
        store = HostStore(rng.choice([6, 60]) * engine.kv_pool.page_bytes, engine.kv_pool)
        offload = Offload(engine.cache, engine.kv_pool, store)
        engine.scheduler.admission.loads = offload.loads
        for _ in range(200):  # so slow that whatever is there is loaded
            offload.loads.computing.note(10**6, 1e15)
    texts: list[list[int]] = []

    def ask(finished: list[list[int]]) -> Asked:
        texts[:] = [*texts, *finished][-8:]
        prompt = [rng.randrange(250) for _ in range(rng.randint(1, 40))]
        if texts and rng.random() < 0.8:
            stem = rng.choice(texts)
            prompt = (stem[: rng.randint(1, len(stem))] + prompt[: rng.randint(1, 9)])[:70]
        prompt = prompt[: max(1, engine.max_model_len - 30)]  # the longest answer
        texts.append(prompt)
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        options |= {"max_tokens": rng.choice([1, 6, 30]), "n": rng.choice([1, 1, 2, 5])}
        options |= NOTHING_LEFT if rng.random() < 0.1 else {}
        return prompt, SamplingParams(**options), None

    def verify(request: Request) -> None:
        prompt, count = request.prompt_token_ids.tolist(), request.params.max_tokens
        for answer in generated([request])[0]:
            assert len(answer) == count, f"seed {seed}: {answer} for {prompt}"
            with _disable_current_modes():
                assert is_greedy(path, prompt, answer), f"seed {seed}: {answer} for {prompt}"

    compared = Counter[str]()
    compare_graphs(engine, compared)
    least = 1 if rng.random() < 0.5 else 1 << 40
    with patch.object(model_runner, "MIN_SAVED", least):
        seen = play(engine, rng, num_requests, ask, verify, arrivals=0.5, failures=0.05)
    if proposer is not None:
        seen["accepted"] = proposer.num_accepted_tokens.total()
    if offload is not None:
        seen["loaded"] = engine.lifetime_stats.loaded_tokens
        offload.close()
    return seen + compared


def compare_graphs(engine: Engine, seen: Counter[str]) -> None:
    """Run each step of a graph kernel by kernel too, on a copy of the pages and states."""
    graphs, model, pool = engine.runner.graphs, engine.model, engine.kv_pool
    assert graphs is not None
    in_graph, forward = graphs.run, model.forward
    num_states = 0 if pool.states is None else pool.states.num_slots
    copy = model.allocate(pool.num_pages, pool.page_size, num_states, pool.windows)
    states_of = [[*one.states.tensors.values()] if one.states else [] for one in (copy, pool)]

    def run(
        tokens: Any, batch: Any, rows: Any, unread: Any = None, states: Any = (), *positions: Any
    ) -> torch.Tensor | None:
        for one, other in zip(copy._whole + states_of[0], pool._whole + states_of[1], strict=True):
            one.copy_(other)
        expected = forward(tokens.copy(), batch, rows, copy, states, unread).clone()
        found = in_graph(tokens, batch, rows, unread, states, *positions)
        if found is None:
            return None
        mixed = batch.num_decodes < len(batch.query_lens)
        seen["mixed in graphs" if mixed else "decodes in graphs"] += 1
        seen["cascades in graphs"] += bool(batch.shared)
        seen["equal bits"] += torch.equal(found, expected)
        if len(rows):
            spread = float(expected.max() - expected.min())
            assert float((found - expected).abs().max()) <= NEAR * spread, "a graph's logits"
        for shape, block in pool._blocks.items():  # all but the spare page, which is the last
            # A number may be rounded the other way, and change those of later layers.
            near = 4e-3 if block.dtype == torch.float16 else 1e-4
            same = torch.isclose(copy._blocks[shape][:-1], block[:-1], near, near)
            assert bool(same.all()), "a graph's KV"
        for one, other in zip(*states_of, strict=True):
            same = torch.isclose(one[:num_states], other[:num_states], 1e-4, 1e-4, equal_nan=True)
            assert bool(same.all()), "a graph's states"
        seen["states in graphs"] += bool(states)
        return found

    graphs.run = run  # type: ignore[method-assign, assignment]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="schedules (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (0)")
    args = parser.parse_args()
    seen = Counter[str]()
    with tempfile.TemporaryDirectory() as root:
        folders = make_models(Path(root))
        with simulating():
            for seed in range(args.seed, args.seed + args.count):
                try:
                    seen += run_schedule(folders, seed)
                except BaseException:
                    print(f"seed {seed}", flush=True)
                    raise
                seen["schedules"] += 1
                if seen["schedules"] % 50 == 0:
                    print(f"to seed {seed}: {dict(seen)}", flush=True)
    print(f"seeds {args.seed} to {args.seed + args.count - 1}: {dict(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
