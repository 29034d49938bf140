"""Recurrent layers in torch: random steps over random state slots, against a plain forward pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from radixcache import LLM, SamplingParams
from radixcache.kernels import choose
from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.recurrence import recur as loop
from radixcache.runtime.model.cuda_graphs import CudaGraphRunner, pad
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.fallback.model import TransformersModel
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.state_pool import slot_arrays
from radixcache.states.recurrent import SequenceStates
from tests.helpers import engines
from tests.helpers.cover import seeds
from tests.helpers.decoders import DECODERS
from tests.helpers.models import HYBRIDS, VOCAB_SIZE, tiny_model
from tests.helpers.native import needs_kernels
from tests.helpers.traffic import serve
from tests.kernels.gpu import simulated_gpu

EVERY_RUN = ("lfm2", "qwen3_5_text", "bamba", "olmo_hybrid")
FAMILIES = [family for family in DECODERS if family in HYBRIDS]
CPU = torch.device("cpu")
LATENT = ("kimi_linear", "bailing_hybrid")
"""Those with MLA, whose chunks have no graphs, and in float32 no kernel on a GPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            path, options = tmp_path_factory.mktemp(family), DECODERS.get(family, {})
            made[family] = tiny_model(family, path, tokenizer=False, **options)
        return made[family]

    return make


@dataclass
class Text:
    """Tokens, of which so many are computed, in pages of one token; and a slot with its state."""

    tokens: np.ndarray
    table: list[int] = field(default_factory=list)
    slot: int = -1

    @property
    def done(self) -> int:
        return len(self.table)


Step = tuple[np.ndarray, PagedBatch, np.ndarray, list[SequenceStates], list[Text]]


def random_steps(seed: int, num_steps: int, pages: int, slots: int) -> Iterator[Step]:
    """Steps of some sequences, whose states move from slot to slot or stay, and are kept after any
    token; sequences go on from there. A slot that is free is written again."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    free, free_slots = [*range(pages)], [*range(slots)]
    rng.shuffle(free_slots)
    texts: list[Text] = []
    for _ in range(num_steps):
        while len(texts) < 2 or rng.random() < 0.3:
            texts.append(Text(numbers.integers(0, VOCAB_SIZE, 200).astype(np.int32)))
        chosen = rng.sample(texts, min(len(texts), rng.randint(1, 4)))
        counts = [rng.choice([1, 1, 2, 3, rng.randint(4, 20)]) for _ in chosen]
        pairs = sorted(zip(counts, chosen, strict=True), key=lambda pair: pair[0])
        states, left, kept = list[SequenceStates](), list[int](), list[Text]()
        for count, text in pairs:
            write = free_slots.pop() if text.slot < 0 or rng.random() < 0.5 else text.slot
            left += [text.slot] * (text.slot not in (-1, write))
            text.table += [free.pop() for _ in range(count)]
            places = sorted(rng.sample(range(1, count + 1), min(count, rng.choice([0, 0, 1, 2]))))
            keeps = [(n, free_slots.pop()) for n in places]
            states.append(SequenceStates(text.slot, write, tuple(keeps)))
            text.slot = write
            for n, slot in keeps:
                same = text.tokens[: text.done - count + n]
                more = numbers.integers(0, VOCAB_SIZE, 200).astype(np.int32)
                kept.append(Text(np.append(same, more), text.table[: len(same)], slot))
        ids = [text.tokens[text.done - count : text.done] for count, text in pairs]
        tables = [np.array(text.table, np.int32) for _, text in pairs]
        lens = [text.done for _, text in pairs]
        batch = PagedBatch.of(tables, [count for count, _ in pairs], lens, 1)
        yield np.concatenate(ids), batch, np.cumsum([n for n, _ in pairs]) - 1, states, [
            text for _, text in pairs
        ]  # fmt: skip
        free_slots[:0] = left
        texts += kept
        while len(texts) > 6:
            free_slots[:0] = [slot for slot in [texts.pop(0).slot] if slot >= 0]


def alone(model: PagedModel, tokens: np.ndarray) -> torch.Tensor:
    """The logits after all of `tokens`, in one forward pass."""
    count = len(tokens)
    batch = PagedBatch.of([np.arange(count, dtype=np.int32)], [count], [count], 1)
    pool, last = model.allocate(count, 1, 1), np.array([count - 1])
    return model.forward(tokens, batch, last, pool, [SequenceStates(-1, 0)])[0]


def load_on_cpu(folder: Path) -> PagedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "find_recurrence", lambda *_: loop)
        model = load_model(folder, device=CPU, dtype="float32", attention=TorchAttention(CPU))
    assert isinstance(model, Decoder)
    return model


def worst(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).abs().max() / wanted.abs().max()).nan_to_num(torch.inf))


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
@seeds(1, 9)
def test_states_move_between_slots_as_in_the_native_loop(folder, family, seed) -> None:
    model, native = load_on_cpu(folder(family)), load_model(folder(family), dtype="float32")
    assert isinstance(native, Decoder)
    pools = [m.allocate(3000, 1, 60) for m in (model, native)]
    for pool in pools:
        for tensor in pool.states.tensors.values():  # type: ignore[union-attr]
            tensor.fill_(torch.nan)
    for ids, batch, rows, states, texts in random_steps(seed, 12, 3000, 60):
        ours, theirs = (
            m.forward(ids, batch, rows, pool, states)
            for m, pool in zip((model, native), pools, strict=True)
        )
        assert worst(ours, theirs) < 1e-4
        for row, text in zip(ours, texts, strict=True):
            assert worst(row, alone(native, text.tokens[: text.done])) < 1e-4
    for one, other in zip(*(pool.states.tensors.values() for pool in pools), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LATENT])
@seeds(2, 9)
def test_a_step_in_a_graph_has_the_bits_of_the_eager_one(folder, family, seed) -> None:
    """On a simulated GPU: padded rows, kept states and slots that move, in shapes of graphs."""
    path = folder(family)
    with simulated_gpu():
        model = load_model(path, device="cuda", dtype="float32")
        assert isinstance(model, Decoder)
        pools = [model.allocate(3000, 1, 60) for _ in range(2)]
        graphs = CudaGraphRunner(model, pools[1], 8)
        for ids, batch, rows, states, _ in random_steps(seed, 8, 3000, 60):
            found = graphs.run(ids, batch, rows, states=states)
            assert found is not None
            shape = graphs._shape(len(ids), batch, len(rows))
            assert shape is not None
            # As many rows as in the graph: torch's products of fewer may round otherwise.
            ids = np.append(ids, np.zeros(shape.tokens - len(ids), np.int32))
            rows = np.append(rows, np.zeros(shape.sequences - len(rows), np.int64))
            states += [SequenceStates(-1, 60)] * (shape.sequences - len(states))
            batch = pad(batch, shape, pools[0].spare_page)
            eager = model.forward(ids, batch, rows, pools[0], states)
            assert torch.equal(found.cpu(), eager[: len(found)].cpu())
        for one, other in zip(*(pool.states.tensors.values() for pool in pools), strict=True):  # type: ignore[union-attr]
            assert torch.equal(one[:-1].cpu(), other[:-1].cpu())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in EVERY_RUN else pytest.mark.exhaustive)
        for family in (*FAMILIES, "olmo_hybrid")
    ],
)
@seeds(3, 5)
def test_random_schedules_on_a_gpu_get_the_tokens_of_transformers(
    folder, family, seed, monkeypatch
) -> None:
    """In graphs, launched ahead: chunks, preemption, aborts, steps that fail, resets. OLMo hybrid
    runs in transformers' layers, and MLA in float32, without graphs."""
    path, rng = folder(family), random.Random(seed)
    monkeypatch.setattr(engines, "paged_model", lambda *_: load_model(path, device="cuda"))
    running, page_size = rng.choice([2, 4]), rng.choice([1, 4, 16])

    def is_right(prompt: list[int], tokens: list[int], count: int) -> bool:
        with _disable_current_modes():
            return engines.is_greedy(path, prompt, tokens)

    with simulated_gpu():
        engine = engines.make_engine(
            path,
            page_size=page_size,
            num_pages=-(-rng.choice([250, 500]) // page_size) + 2,
            max_num_batched_tokens=rng.choice([30, 64]),
            max_num_seqs=running,
            num_states=2 * running + rng.choice([1, 20]),
        )
        seen = serve(engine, rng, 8, is_right, 250, arrivals=0.15)
        graphs = engine.runner.graphs
        assert seen["ahead"] > 5
        eager = family in ("olmo_hybrid", *LATENT)
        assert (graphs is None) if eager else graphs and len(graphs._replays) > 1


@pytest.mark.parametrize("name", ["conv_L_cache", "linear_conv_kernel_dim"])
def test_a_convolution_of_one_tap_keeps_no_inputs(tmp_path, name) -> None:
    family = "lfm2" if name == "conv_L_cache" else "qwen3_5_text"
    path = tiny_model(family, tmp_path, tokenizer=False, **{name: 1})
    model, native = load_on_cpu(path), load_model(path, dtype="float32")
    tokens = np.arange(9, dtype=np.int32)
    assert worst(alone(model, tokens), alone(native, tokens)) < 1e-4


def test_an_llm_on_a_gpu_has_two_states_for_each_sequence(folder) -> None:
    path = folder("lfm2")
    with simulated_gpu():
        size = load_model(path, device="cuda").bytes_per_state
        options = {"kv_cache_memory_bytes": "1MiB", "device": "cuda", "page_size": 4}
        for num_states, running in ((9, 4), (2, 1), (200, 8)):
            with LLM(path, state_memory=num_states * size, max_num_seqs=8, **options) as llm:
                assert llm.engine.scheduler.max_num_seqs == running
                states = llm.engine.kv_pool.states
                assert states is not None and states.num_slots == num_states
                graphs = llm.engine.runner.graphs
                assert graphs is not None and None not in graphs._replays.values()
                params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
                prompts = [[*range(9), i] for i in range(6)]
                found = engines.generated(engines.run(llm.engine, prompts, params))
            with _disable_current_modes():
                wanted = [engines.plain_greedy(path, prompt, 5, True) for prompt in prompts]
            assert found == [[answer] for answer in wanted]


def test_more_kept_states_than_a_graph_has_room_for_run_without_one() -> None:
    batch = PagedBatch.of([np.arange(9, dtype=np.int32)] * 2, [5, 1], [5, 6], 1)
    some = [SequenceStates(-1, 0, ((1, 2), (5, 3))), SequenceStates(4, 4)]
    *_, rows, slots = slot_arrays(batch, some, 9) or []
    assert (rows.tolist(), slots.tolist()) == ([4, 5, 0, 4], [0, 4, 2, 3])
    *_, rows, slots = slot_arrays(batch, [SequenceStates(-1, 0), some[1]], 9) or []
    assert (rows.tolist(), slots.tolist()) == ([4, 5, 0, 0], [0, 4, 9, 9])
    many = [some[0]._replace(keeps=tuple((n, n) for n in (1, 2, 3))), some[1]]
    assert slot_arrays(batch, many, 9) is None and slot_arrays(batch, many) is not None


@pytest.mark.parametrize("fails", [True, False])
def test_without_a_kernel_transformers_layers_run_without_graphs(
    folder, fails, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO", "radixcache")
    paths = {family: folder(family) for family in ("bamba", "lfm2")}
    with simulated_gpu() as gpu:

        def broken(states: Any, *inputs: Any) -> Any:
            if fails:
                raise RuntimeError("no kernel image is available\nmore lines")
            return right(states, *inputs) * 1.1

        right = gpu.kernels.move_on
        monkeypatch.setattr(gpu.kernels, "move_on", broken)
        model = load_model(paths["bamba"], device="cuda", dtype="float32")
        assert isinstance(model, TransformersModel) and not model.max_graph_rows
        why = "nothing runs its recurrent layers: Triton: no kernel image is available"
        assert (why if fails else "come out wrong in our loop") in caplog.text
        assert isinstance(load_model(paths["lfm2"], device="cuda", dtype="float32"), Decoder)
