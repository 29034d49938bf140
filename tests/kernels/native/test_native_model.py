"""The native loop over a description: right against the reference, whatever a layer has, and the
same bits for a token in any chunks, beside any others and by any threads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import LayerKind, PagedBatch
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.layers import NativeLayers
from radixcache.kernels.quantized import INT8, Quantized
from radixcache.kernels.spec import (
    MLP,
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Latent,
    Layer,
    Mamba2,
    Rope,
    ShortConv,
    Weights,
)
from radixcache.runtime.model import reference
from radixcache.runtime.model.kv_pool import KVPool, LayerShape
from radixcache.runtime.model.state_pool import StatePool
from radixcache.states.recurrent import SequenceStates
from tests.helpers.native import needs_kernels

pytestmark = needs_kernels
F32, BF16 = torch.float32, torch.bfloat16
HIDDEN, VOCAB, PAGE = 48, 90, 4
ALL_NORMS = ("input_norm", "attended_norm", "mlp_norm", "after_norm")

BESIDE = ("mlp_out_norm", "expert_norm", "router_norm", "expert_out_norm")

PLAIN = LayerKind(4, 2, 16, 16, 0.25)
WINDOW = PLAIN._replace(kv_heads=1, window=6)
HEADS = Attention(PLAIN, rope=0)
DENSE = MLP(100)
FEW = Experts(6, 2, MLP(40))
LLAMA = Layer(HEADS, DENSE)


def rope(pairs: int, base: float = 100.0, scale: float = 1.0) -> Rope:
    return Rope(base ** -(torch.arange(pairs) / pairs), scale)


def architecture(
    *layers: Layer, ropes: tuple[Rope, ...] = (rope(8),), **settings: Any
) -> Architecture:
    return Architecture("tiny", VOCAB, HIDDEN, 1000, None, layers, ropes, 1e-5, **settings)


LATENT = Latent(
    LayerKind(3, 1, 36, 10, 0.05, mla=True), 16, 20, 28, 0, bias=True, query_scaling=(0.7, 8),
    eps=1e-3,
)  # fmt: skip
KDA = DeltaNet(4, key_heads=3, heads=3, key=18, value=20, by_channel=True, rank=14)
DELTA = DeltaNet(4, key_heads=2, heads=4, key=16, value=20)
MAMBA = Mamba2(4, heads=6, value=12, state=16, groups=2, least=0.01, most=0.5)
ARCHITECTURES = {
    "llama": architecture(LLAMA, LLAMA, tied=True),
    "biases, windows, two tables": architecture(
        Layer(Attention(PLAIN._replace(window=5), 1, bias=True, out_bias=True), MLP(64, bias=True)),
        Layer(Attention(PLAIN, 0, bias=True), MLP(72, "gelu")),
        ropes=(rope(8), rope(5, 10.0, 1.2)),
    ),
    "all norms": architecture(
        *(
            Layer(Attention(kind, 0, "head"), MLP(64, "gelu_tanh"), ALL_NORMS)
            for kind in (PLAIN._replace(softcap=4.0), PLAIN._replace(window=6, softcap=4.0))
        ),
        embed_scale=6.9, logit_softcap=3.0, tied=True,
    ),
    "norms behind alone": architecture(
        *[Layer(Attention(PLAIN, 0, "whole"), DENSE, ("attended_norm", "after_norm"))] * 2
    ),
    "parallel": architecture(
        Layer(HEADS, DENSE, ("input_norm",), parallel=True, residual_scale=0.4),
        Layer(Attention(PLAIN), DENSE, ("input_norm",), parallel=True, residual_scale=0.4),
        centred=True, logit_scale=0.3,
    ),
    "sizes by layer": architecture(
        Layer(Attention(LayerKind(3, 1, 24, 20, 1.0), 0, "head", value_norm=True), DENSE,
              layer_scale=True),
        Layer(Attention(PLAIN, 0, query_scaling=(0.7, 8)), DENSE, ALL_NORMS, layer_scale=True),
    ),
    "experts with sinks": architecture(
        *[Layer(Attention(PLAIN, 0, bias=True, out_bias=True, sinks=True), replace(
            FEW, each=MLP(40, "clamped", bias=True), scores="softmax of chosen", router_bias=True,
        ))] * 2
    ),
    "experts in groups": architecture(
        LLAMA,
        Layer(HEADS, Experts(
            12, 3, MLP(24), "sigmoid", correction=True, epsilon=1e-20, scale=1.8, groups=4,
            kept_groups=2, shared=MLP(56),
        )),
    ),
    "experts, not renormalised": architecture(
        LLAMA, Layer(HEADS, replace(FEW, renormalise=False, shared=MLP(40), shared_gate=True))
    ),
    "experts in a latent space": architecture(
        LLAMA, Layer(HEADS, replace(
            FEW, each=MLP(40, "relu2", gated=False), latent=37, shared=MLP(56, "relu2", gated=False)
        ))
    ),
    "experts beside": architecture(
        *[Layer(HEADS, MLP(64, "gelu_tanh"), (*ALL_NORMS, *BESIDE), layer_scale=True,
                beside=replace(FEW, each=MLP(40, "gelu_tanh"), each_scale=True))] * 2
    ),
    "shared keys": architecture(
        *(Layer(Attention(kind, 0, "head", value_norm=True, shares=shares, gated=shares), DENSE)
          for shares in (False, False, True, True) for kind in (PLAIN, WINDOW)),
    ),
    "inputs of each layer": architecture(
        *[Layer(HEADS, DENSE, (*ALL_NORMS, "per_layer_norm"), layer_scale=True,
                per_layer=MLP(20, "gelu_tanh", gated=False))] * 3,
        embed_scale=HIDDEN**0.5,
    ),
    "latents": architecture(
        Layer(LATENT, DENSE),
        Layer(replace(LATENT, q_rank=None, bias=False, query_scaling=None), Experts(
            12, 3, MLP(24), renormalise=False, scale=1.8, groups=4, kept_groups=2, group_best=1,
        )),
        Layer(replace(LATENT, bias=False), DENSE),
        ropes=(rope(5, scale=1.2),),
    ),
    "short convolutions": architecture(
        Layer(ShortConv(3, 44), DENSE), LLAMA, Layer(ShortConv(4, 40, True, True), DENSE)
    ),
    "delta nets": architecture(
        Layer(DELTA, FEW), Layer(Attention(PLAIN, 0, "head", gated=True), DENSE),
        Layer(DELTA, DENSE),
        ropes=(rope(3),),
    ),
    "KDA": architecture(
        Layer(KDA, FEW), Layer(replace(LATENT, rope=None, gated=True), DENSE),
        Layer(replace(KDA, rank=None, bound=-3.0), DENSE),
        Layer(replace(LATENT, bias=False, gated=True), DENSE),
        ropes=(rope(5),),
    ),
    "Mamba 2": architecture(
        Layer(MAMBA, DENSE), Layer(Attention(PLAIN), FEW, residual_scale=0.7),
        Layer(replace(MAMBA, groups=1, conv_bias=False, bias=True), None,
              ("input_norm",)),
        Layer(None, MLP(80, "relu2", gated=False), ("mlp_norm",)),
        ropes=(),
    ),
}  # fmt: skip


def random_weights(a: Architecture, number: int, rng: torch.Generator, few_bits: bool) -> Weights:
    def make(name: str, shape: tuple[int, ...]) -> Any:
        x = torch.randn(shape, generator=rng)
        if name == "rate":
            return -x.exp()
        if len(shape) == 1:
            return 0.2 * x + (1 if "norm" in name or "scale" in name else 0)
        x /= 1 if name == "conv" else shape[1] ** 0.5 / 2
        return eight_bits(x) if few_bits and name in ("k", "up", "q", "k_b") else x

    def one_or_all(name: str, shape: tuple[int, ...]) -> Any:
        experts = a.layers[number].experts
        if experts is None or not name.startswith("experts."):
            return make(name, shape)
        return [make(name, shape) for _ in range(experts.count)]

    return {name: one_or_all(name, shape) for name, shape in a.layer_shapes(number).items()}


def eight_bits(x: torch.Tensor) -> Quantized:
    numbers = (x * 64).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
    return Quantized(numbers, torch.full((len(x), x.shape[1] // 16), 1 / 64), None, 8, INT8)


class Part(NamedTuple):
    """Tokens [start, end) of a text, the text's page table and its states."""

    text: np.ndarray
    start: int
    end: int
    table: np.ndarray
    states: SequenceStates


class Model:
    """The native loop with random weights, over a pool of its own."""

    def __init__(self, name: str, dtype: torch.dtype = F32) -> None:
        a, self.dtype = ARCHITECTURES[name], dtype
        self.architecture = a
        rng = torch.Generator().manual_seed(len(name))
        self.layers = [random_weights(a, i, rng, i == 1) for i in range(len(a.layers))]
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=rng) / 2
        self.head = None if a.tied else torch.randn(VOCAB, HIDDEN, generator=rng) / 7
        self.per_layer = {
            name: torch.randn(shape, generator=rng) for name, shape in a.per_layer_shapes.items()
        }
        self.last_norm = 1 + torch.randn(HIDDEN, generator=rng) / 5
        self.load()

    def load(self) -> None:
        self.packed = NativeLayers(self.architecture, self.dtype)
        self.packed.embedding(self.embedding, self.head)
        if self.per_layer:
            self.packed.per_layer(self.per_layer)
        for number, weights in enumerate(self.layers):
            self.packed.layer(number, weights)
        self.packed.loaded(self.last_norm)

    def pool(self, pages: int, slots: int) -> KVPool:
        kinds = [LayerShape(k.kv_heads, k.head_dim, k.value_dim) for k in self.architecture.kinds]
        pool = KVPool(kinds, pages, PAGE, self.dtype, torch.device("cpu"))
        if shapes := self.architecture.state_shapes:
            pool.states = StatePool(shapes, slots, torch.device("cpu"))
            for tensor in pool.states.tensors.values():
                tensor.fill_(torch.nan)
        return pool

    @torch.inference_mode()
    def step(self, pool: KVPool, parts: list[Part]) -> list[torch.Tensor]:
        """The logits of each part's tokens."""
        lens, ends = [part.end - part.start for part in parts], [part.end for part in parts]
        batch = PagedBatch.of([part.table for part in parts], lens, ends, PAGE)
        tokens = np.concatenate([part.text[part.start : part.end] for part in parts])
        plan = NativeAttention().plan(batch, tokens, batch.positions, np.arange(len(tokens)))
        states = [part.states for part in parts] if pool.states is not None else []
        return list(self.packed.run(pool, plan, states).split(lens))

    def alone(self, text: np.ndarray, *cuts: int) -> torch.Tensor:
        """[T, vocab_size] in one step, or in several."""
        table = np.arange(-(-len(text) // PAGE), dtype=np.int32)
        pool, rows = self.pool(len(table), 1), []
        for start, end in pairwise((0, *cuts, len(text))):
            state = SequenceStates(0 if start else -1, 0)
            rows += self.step(pool, [Part(text, start, end, table, state)])
        return torch.cat(rows)


def bits(logits: torch.Tensor) -> np.ndarray:
    return logits.numpy().view(np.int32)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_computes_what_the_reference_does(name: str) -> None:
    model, text = Model(name), np.random.default_rng(1).integers(0, VOCAB, 70)
    of = model.architecture, torch.tensor(text), model.embedding, model.per_layer
    hidden, shared = reference.embed(*of)
    for number, weights in enumerate(model.layers):
        hidden = reference.run_layer(model.architecture, number, hidden, weights, shared)
    head = model.embedding if model.head is None else model.head
    expected = reference.logits(model.architecture, hidden, model.last_norm, head)
    error = (model.alone(text) - expected).abs().max() / (expected.max() - expected.min())
    assert error < 1e-5


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_token_has_the_same_bits_in_any_chunks_and_company(name: str, dtype: torch.dtype) -> None:
    """Texts run in random chunks, their states move between two slots, and the last text goes on
    from a state that is kept in the middle of another's chunk."""
    rng, model = np.random.default_rng(7), Model(name, dtype)
    texts = [rng.integers(0, VOCAB, n) for n in (41, 13, 29, 1, 70, 60)]
    texts[5][:28] = texts[4][:28]
    torch.set_num_threads(1)
    expected = [model.alone(text) for text in texts]
    count, kept = len(texts), 2 * len(texts)
    tables = rng.permutation(count * 20).astype(np.int32).reshape(count, 20)
    tables[5][: 28 // PAGE] = tables[4][: 28 // PAGE]
    pool = model.pool(count * 20, kept + 1)
    done, slots, waiting = [0] * count, [-1] * count, True
    while any(done[i] < len(text) for i, text in enumerate(texts)):
        torch.set_num_threads(int(rng.integers(1, 4)))
        parts: dict[int, Part] = {}
        for i, text in enumerate(texts):
            if done[i] == len(text) or (i == 5 and waiting) or rng.random() < 0.3:
                continue
            end = min(len(text), done[i] + int(rng.choice([1, 1, 2, 5, 17, 40])))
            keeps = ((28 - done[i], kept),) if i == 4 and done[i] < 28 <= end else ()
            states = SequenceStates(slots[i], int(rng.choice([i, count + i])), keeps)
            parts[i] = Part(text, done[i], end, tables[i], states)
        if not parts:
            continue
        got = model.step(pool, list(parts.values()))
        for (i, part), rows in zip(parts.items(), got, strict=True):
            np.testing.assert_array_equal(bits(rows), bits(expected[i][part.start : part.end]))
            done[i], slots[i] = part.end, part.states.write
            if part.states.keeps:
                done[5], slots[5], waiting = 28, kept, False


@pytest.mark.parametrize(
    "name",
    [
        "experts in groups",
        "experts, not renormalised",
        "experts in a latent space",
        "experts beside",
        "inputs of each layer",
        "delta nets",
        "KDA",
        "latents",
    ],
)
def test_many_rows_have_the_bits_of_few(name: str) -> None:
    """More than an MLP takes at once, and more of one expert than of a task."""
    model, text = Model(name), np.random.default_rng(2).integers(0, VOCAB, 1200)
    torch.set_num_threads(1)
    expected = model.alone(text, *range(7, 1200, 7))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        np.testing.assert_array_equal(bits(model.alone(text)), bits(expected))


def test_equal_scores_choose_the_lower_numbers() -> None:
    model = Model("experts, not renormalised")
    weights = model.layers[1]
    weights["router"].zero_()
    for i in range(2, 6):
        weights["experts.down"][i].fill_(torch.nan)
    model.load()
    assert model.alone(np.arange(40)).isfinite().all()


@pytest.mark.parametrize(("states", "match"), [
    ((0, 3, ()), "not in 3 slots"), ((3, 0, ()), "not in 3 slots"), ((-2, 0, ()), "not in 3 slots"),
    ((-1, -1, ()), "not in 3 slots"), ((-1, 0, ((1, 3),)), "not in 3 slots"),
    ((-1, 0, ((9, 1),)), "tokens that the step does not have"),
])  # fmt: skip
def test_slots_that_do_not_exist_are_refused(states, match) -> None:
    model, text = Model("delta nets"), np.arange(8)
    pool, table = model.pool(2, 3), np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match=match):
        model.step(pool, [Part(text, 0, 8, table, SequenceStates(*states))])


@pytest.mark.parametrize("change", [
    {"q": torch.ones(64, 47)}, {"o": torch.ones(48, 65)}, {"query_norm": torch.ones(15)},
    {"conv": torch.ones(3, 144)}, {"rate": torch.ones(3)}, {"up": None},
])  # fmt: skip
def test_weights_of_other_shapes_are_refused(change: Weights) -> None:
    model = Model("delta nets")
    for number in (1, 2):
        weights = model.layers[number]
        if not change.keys() & weights.keys():
            continue
        with pytest.raises(ValueError, match=f"{next(iter(change))} should be"):
            NativeLayers(model.architecture, F32).layer(number, weights | change)


@pytest.mark.parametrize("layer", [
    Layer(Attention(PLAIN, 1), DENSE), Layer(Attention(PLAIN._replace(kv_heads=3)), DENSE),
    Layer(replace(LATENT, rope=1), DENSE), Layer(replace(DELTA, key_heads=3), DENSE),
    Layer(replace(MAMBA, groups=5), DENSE), Layer(replace(HEADS, shares=True), DENSE),
    Layer(HEADS, DENSE, per_layer=MLP(8, gated=False)),
])  # fmt: skip
def test_numbers_that_contradict_each_other_are_refused(layer: Layer) -> None:
    a = architecture(layer)
    weights = random_weights(a, 0, torch.Generator(), False)
    with pytest.raises(
        ValueError, match=r"on 3|no RoPE|different sizes|that none has|nothing makes"
    ):
        NativeLayers(a, F32).layer(0, weights)
