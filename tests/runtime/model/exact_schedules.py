"""Plays random schedules, and compares all logits and KV with the same tokens run cold and alone.

    python -m tests.runtime.model.exact_schedules --count 10000 --seed 1

A schedule is an engine over a tiny model, in pages of 1 to 16 tokens, with much or hardly enough
memory, and perhaps a tier below: requests that share stems, go on from each other's answers, are
sampled, scored and aborted. What it computes for a token must be, as an integer, what one forward
pass over the token's sequence gives; and a greedy answer what that pass likes best.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixcache import HashBlockCache, PagePool, PrefixCache, RadixCache, SamplingParams
from radixcache.kernels.attention import PagedBatch
from radixcache.lease import WindowTable
from radixcache.pages import Pages
from radixcache.runtime.engine.build import choose_logits_cache, choose_planner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.model.kv_pool import KVPool, WindowLayout, choose_windows
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.request import Request, Sequence
from radixcache.states.recurrent import SequenceStates
from radixcache.states.windows import WindowIndex
from tests.helpers.gguf.converter import convert
from tests.helpers.gguf.files import write_model
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.tiers import MemoryStore, attach

_WINDOW = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
_SHORT = {**_WINDOW, "sliding_window": 3}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 3,
    "topk_group": 2, "kv_lora_rank": 44, "qk_rope_head_dim": 12, "v_head_dim": 20,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 4224},  # products that are packed: one row has other bits
    "qwen3": {"intermediate_size": 60, "head_dim": 24},
    "mistral": {"intermediate_size": 100, "attention_bias": None},
    "gemma2": {"intermediate_size": 100},
    "gemma3_text": {"intermediate_size": 60, "sliding_window": 24},
    "gemma4_text": {
        **_WINDOW, "global_head_dim": 32, "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 260,
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
        "moe_intermediate_size": 40, "final_logit_softcapping": 30.0, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 3,
    },
    "olmo3": {
        "sliding_window": 9, "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "glm4": {"intermediate_size": 100},
    "cohere2": _SHORT,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {**_WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
    },
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "mistral4": {**_LATENT, "head_dim": 28, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.9,
        "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3,
    }},
    "youtu": {"intermediate_size": 60},
    "qwen3_5_text": {},
    "qwen3_next": {},
    "lfm2": {"intermediate_size": 100},
    "kimi_linear": {"linear_head_dim": 20, "linear_num_heads": 3, "num_experts": 5},
    "bailing_hybrid": {"intermediate_size": 60},
    "granitemoehybrid": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"], "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 40, "moe_latent_size": 28, "n_group": 3,
        "topk_group": 2,
    },
}  # fmt: skip
GGUFS = {
    "llama of 4 bits": ("Q4_1",),
    "llama of mixed bits": ("Q4_1", "Q4_K", "Q6_K", "Q8_0", "BF16"),
}
"""Files of these kinds of blocks, matrix by matrix in turn."""
CONVERTED = {
    "qwen3_moe of 8 bits": "Q8_0", "qwen3_5_text of 4 bits": "Q4_0", "gpt_oss of floats": "MXFP4",
    "deepseek_v3 of 8 bits": "Q8_0", "kimi_linear of 8 bits": "Q8_0",
}  # fmt: skip
"""Files of experts, of recurrent layers, of experts with biases and of windows, and of latents; of
one kind."""
DTYPES = ("float32", "bfloat16")
WIDE = {"hidden_size": 128, "head_dim": 32}
"""For `kv_cache_dtype="int8"`, which takes heads of multiples of 32."""
NEVER_WIDE = (
    "granitemoehybrid", "deepseek_v2", "mistral4", "youtu", "kimi_linear", "bailing_hybrid", *GGUFS,
    *CONVERTED,
)  # fmt: skip


@cache
def folder(family: str, wide: bool = False) -> Path:
    """Of a tiny model: a GGUF file, or peaky, with few and many weights, and odd widths."""
    path = Path(tempfile.mkdtemp(prefix="exact"))
    if family in GGUFS:
        write_model(path / "model.gguf", {"{}.context_length": 8192}, kinds=GGUFS[family])
        return path
    if family in CONVERTED:
        widths = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
        made = tiny_model(family.split()[0], path / "made", tokenizer=False, **widths)
        return convert(made, path / "model.gguf", CONVERTED[family]).parent
    options = {name: value for name, value in MODELS[family].items() if value is not None}
    options |= {"max_position_embeddings": 8192} | (WIDE if wide else {})
    return tiny_model(family, path, tokenizer=False, **options)


@cache
def exact_model(
    family: str, dtype: str, kv: str = "auto", activations: str = "off", exact: bool = True
) -> PagedModel:
    path = folder(family, kv == "int8")
    settings: dict[str, Any] = {"kv_cache_dtype": kv, "quantized_activations": activations}
    return load_model(path, device="cpu", dtype=dtype, exact=exact, **settings)


@dataclass
class Tally:
    """What was compared, in numbers; `differing` of `logits` and `values` are other integers."""

    rows: int = 0
    logits: int = 0
    values: int = 0
    differing: int = 0
    answers: int = 0
    flips: int = 0
    hit_tokens: int = 0
    evicted: int = 0
    copied: int = 0
    preempted: int = 0
    loaded: int = 0

    def __add__(self, other: Tally) -> Tally:
        names = [field.name for field in fields(Tally)]
        return Tally(*(getattr(self, name) + getattr(other, name) for name in names))


class Watch:
    """Keeps the logits of an engine's sequences by position, and their KV when they end."""

    def __init__(self, engine: Engine) -> None:
        self.logits: list[tuple[Sequence, int, torch.Tensor]] = []
        self.kv: dict[Sequence, tuple[int, list[torch.Tensor]]] = {}
        self._pool, self._cache = engine.kv_pool, engine.cache
        self._compute, self._finish = engine.runner._compute, engine.scheduler.finish
        engine.runner._compute = self.compute  # type: ignore[assignment,method-assign]
        engine.scheduler.finish = self.finish  # type: ignore[method-assign]
        self._allocate = self._cache.pool.allocate
        self._cache.pool.allocate = self.allocate  # type: ignore[method-assign]

    def allocate(self, count: int) -> Pages:
        """What a page held before it is handed out does not matter."""
        pages = self._allocate(count)
        for layer in self._pool.layers:
            for side in layer:
                # As a scale of int8, the bits of -1 are a NaN, too.
                side[torch.from_numpy(pages)] = torch.nan if side.is_floating_point() else -1
        return pages

    def compute(
        self, chunks: list[Chunk], tokens: Any, batch: PagedBatch, rows: Any, *rest: Any
    ) -> Any:
        logits = self._compute(chunks, tokens, batch, rows, *rest)
        for row, values in zip(rows.tolist(), logits.clone(), strict=True):
            number = int(np.searchsorted(batch.qo_indptr[1:], row, side="right"))
            sequence, end = chunks[number].sequence, int(batch.qo_indptr[number + 1])
            self.logits.append((sequence, sequence.num_computed - end + row, values))
        return logits

    def finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.lease is not None:
            lease, count = sequence.lease, sequence.num_computed
            kept = gather(self._pool, lease.page_table, count, lease.window)
            self.kv[sequence] = count, kept
        self._finish(sequence, reason)


def gather(
    pool: KVPool, table: Any, count: int, window: WindowTable | None = None
) -> list[torch.Tensor]:
    """K and V of each layer for the first tokens of a sequence, or for those in its window."""
    kept = []
    for at, layer in enumerate(pool.layers):
        first, begin, pages = 0, 0, table
        if pool.windows is not None and pool.windows.layers[at]:
            assert window is not None
            first, pages = window.first, window.pages
            begin = count  # a page may begin with tokens that nobody sees
            if count >= window.whole:
                begin = max(first, count - pool.windows.window + 1)
        places = np.arange(begin - first, count - first)
        size = layer.k.shape[1]
        page, slot = torch.from_numpy(pages[places // size]).long(), torch.from_numpy(places % size)
        kept += [side[page, slot] for side in layer]
    return kept


def run_alone(model: PagedModel, tokens: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and KV of all tokens, from one forward pass with nothing cached."""
    count = len(tokens)
    pool, table = model.allocate(1, count, 1), np.zeros(1, np.int32)
    batch = PagedBatch.of([table], [count], [count], count)
    states = [SequenceStates(-1, 0)] if model.state_shapes else []
    logits = model.forward(tokens, batch, np.arange(count), pool, states)
    return logits, gather(pool, table, count)


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Numbers whose bits differ."""
    kind = {4: torch.int32, 2: torch.int16, 1: torch.int8}[one.itemsize]
    return int((one.contiguous().view(kind) != other.contiguous().view(kind)).sum())


class Schedule:
    """One engine and its requests, all of it drawn from `seed`; prompts `scale` times as long."""

    def __init__(
        self, model: PagedModel, seed: int, scale: int = 1, windows: WindowLayout | None = None
    ) -> None:
        rng = self.rng = random.Random(seed)
        self.scale = scale
        page_size = 4 if windows is not None else rng.choice([1, 4, 16])
        room = rng.choice([80, 80, 110, 1000]) * scale
        kind = rng.choice([RadixCache, RadixCache, HashBlockCache])
        most, num_states = rng.choice([1, 3, 16]), rng.choice([20, 60]) * bool(model.state_shapes)
        step = rng.choice([3, 7, 24, 300]) * scale
        if windows is None and rng.random() < 0.8:
            windows = choose_windows(model.shapes, model.windows, page_size)
        pages = room // page_size + 2
        if windows is not None:
            pages += min(80 * scale, windows.window + step) // windows.page_size + 4
        pool = PagePool(pages, page_size)
        self.cache: PrefixCache = kind(pool)
        planner = choose_planner(self.cache, num_states, windows)
        kept = choose_logits_cache(self.cache, model.vocab_size, num_states)
        scheduler = Scheduler(self.cache, step, most, planner=planner, logits_cache=kept)
        kv_pool = model.allocate(pool.num_pages, page_size, num_states, windows)
        self.engine = Engine(model, kv_pool, self.cache, scheduler)
        if isinstance(self.cache, RadixCache) and not num_states and rng.random() < 0.5:
            attach(self.engine, MemoryStore(kv_pool), rng.choice([9, 200]))
        self.stems = [self.text(25 * scale) for _ in range(2)]

    def text(self, length: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(length)]

    def request(self, earlier: list[Request]) -> Request:
        """Behind a stem, or an earlier request and its answer, cut anywhere."""
        rng = self.rng
        before = rng.choice(self.stems)
        if earlier and rng.random() < 0.4:
            before = rng.choice(earlier).sequences[0].tokens.tolist()[: 35 * self.scale]
        added = rng.choice([0, 1, 2, 20 * self.scale])
        prompt = before[: rng.randint(0, len(before))] + self.text(added)
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": rng.choice([1, 9, 24])}
        if rng.random() < 0.3:
            settings |= {"temperature": 1.0, "seed": rng.randrange(99), "n": rng.choice([1, 2])}
        if rng.random() < 0.2:
            settings["prompt_logprobs"] = 1
        params = SamplingParams(**settings, ignore_eos=True)
        return self.engine.add_request(prompt or self.text(1), params)

    def play(self) -> list[Request]:
        rng, requests = self.rng, list[Request]()
        for _ in range(rng.randint(3, 9)):
            requests.append(self.request(requests))
            for _ in range(rng.choice([0, 0, 1, 4])):
                self.engine.step()
            if rng.random() < 0.1:
                self.engine.abort(rng.choice(requests))
            if rng.random() < 0.3:
                self.finish()
                self.cache.evict(self.cache.pool.num_pages)
            elif self.cache.windows is not None and rng.random() < 0.3:
                self.finish()
                self.lose_windows(self.cache.windows)
        self.finish()
        return requests

    def lose_windows(self, windows: WindowIndex) -> None:
        """Use the memory of all windows anew: what stays is the KV of full layers."""
        while self.cache.change(windows.evict):
            pass
        pool = self.cache.pool
        pool.drop(pool.allocate(windows.left.num_blank + windows.left.num_left))

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()
        self.engine.check()


def play(model: PagedModel, seed: int, scale: int = 1) -> Tally:
    """Play one schedule, and compare."""
    schedule = Schedule(model, seed, scale)
    watch = Watch(schedule.engine)
    requests = schedule.play()
    stats = schedule.cache.stats
    tally = Tally(
        hit_tokens=stats.hit_tokens,
        evicted=stats.evicted_tokens,
        copied=stats.copied_pages,
        loaded=stats.loaded_tokens,
    )
    alone = {}
    for request in requests:
        for sequence in request.sequences:
            tally.preempted += sequence.preemptions
            logits, kv = alone[sequence] = run_alone(model, sequence.tokens)
            count, ended = watch.kv.get(sequence, (0, []))
            for one, other in zip(ended, kv, strict=False):
                tally.values += one.numel()
                tally.differing += differing(one, other[count - len(one) : count])
            if request.params.temperature == 0 and len(sequence.generated):
                likeliest = logits[-len(sequence.generated) - 1 : -1].argmax(-1)
                tally.answers += 1
                tally.flips += likeliest.tolist() != sequence.generated.tolist()
    for sequence, position, values in watch.logits:
        tally.rows += 1
        tally.logits += len(values)
        tally.differing += differing(values, alone[sequence][0][position])
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="schedules (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (0)")
    parser.add_argument("--models", nargs="+", default=[*MODELS, *GGUFS, *CONVERTED], metavar="M")
    parser.add_argument("--kv", nargs="+", default=["auto"], metavar="D", help="kv_cache_dtype")
    told = "quantized_activations, of GGUF files"
    parser.add_argument("--activations", nargs="+", default=["off"], metavar="A", help=told)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(1 2)")
    parser.add_argument("--scale", type=int, default=1, help="of lengths, of some 50 tokens (1)")
    parser.add_argument("--default", action="store_true", help="without exact mode")
    args = parser.parse_args()
    kinds = [
        (family, dtype, kv, activations)
        for family, dtype, kv, activations in product(
            args.models, DTYPES, args.kv, args.activations
        )
        if (activations == "off" or family in (*GGUFS, *CONVERTED))
        and (
            kv not in ("int8", "float16")
            or (family not in NEVER_WIDE if kv == "int8" else dtype == "float32")
        )
    ]
    tallies = dict.fromkeys(kinds, Tally())
    models = {kind: exact_model(*kind, exact=not args.default) for kind in kinds}
    for seed in range(args.seed, args.seed + args.count):
        kind = kinds[seed % len(kinds)]
        torch.set_num_threads(args.threads[seed // len(kinds) % len(args.threads)])
        tallies[kind] += play(models[kind], seed, args.scale)
    total = sum(tallies.values(), Tally())
    print(f"seeds {args.seed} to {args.seed + args.count - 1}, threads {args.threads}")
    for kind, found in [*tallies.items(), (("all", "", "", ""), total)]:
        print(f"{' '.join(kind):25}", *(f"{v:,} {name}" for name, v in vars(found).items()))
    return bool(total.differing or total.flips)


if __name__ == "__main__":
    sys.exit(main())
