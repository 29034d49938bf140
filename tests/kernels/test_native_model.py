"""The native loop over a description: right against the reference, whatever a layer has, and the
same bits for a token in any chunks, beside any others and by any threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import LayerKind, PagedBatch
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.native.library import problem
from radixcache.kernels.quantized import Quantized
from radixcache.runtime.model.description import (
    MLP,
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Layer,
    Mamba2,
    Rope,
    ShortConv,
    Weights,
)
from radixcache.runtime.model.kv_pool import KVPool, LayerShape
from radixcache.runtime.model.operations.native import NativeOperations
from radixcache.runtime.model.state_pool import StatePool, StateShapes
from radixcache.states import SequenceStates

pytestmark = pytest.mark.skipif(problem() is not None, reason=str(problem()))
F32, BF16 = torch.float32, torch.bfloat16
HIDDEN, VOCAB, PAGE = 48, 90, 4
ALL_NORMS = ("input_norm", "attended_norm", "mlp_norm", "after_norm")

PLAIN = LayerKind(4, 2, 16, 16, 0.25)
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


DELTA = DeltaNet(4, key_heads=2, heads=4, key=16, value=20)
MAMBA = Mamba2(4, heads=6, value=12, state=16, groups=2, norm_groups=2, least=0.01, most=0.5)
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
    "short convolutions": architecture(
        Layer(ShortConv(3, 44), DENSE), LLAMA, Layer(ShortConv(4, 40, True, True), DENSE)
    ),
    "delta nets": architecture(
        Layer(DELTA, FEW), Layer(Attention(PLAIN, 0, "head", gated=True), DENSE), Layer(DELTA, DENSE),
        ropes=(rope(3),),
    ),
    "Mamba 2": architecture(
        Layer(MAMBA, DENSE), Layer(Attention(PLAIN), FEW, residual_scale=0.7),
        Layer(replace(MAMBA, groups=1, norm_groups=1, conv_bias=False, bias=True), None, ("input_norm",)),
        Layer(None, MLP(80, "relu2", gated=False), ("mlp_norm",)),
        ropes=(),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_weights(a: Architecture, number: int, rng: torch.Generator, few_bits: bool) -> Weights:
    def make(name: str, shape: tuple[int, ...]) -> Any:
        x = torch.randn(shape, generator=rng)
        if name == "rate":
            return -x.exp()
        if len(shape) == 1:
            return 0.2 * x + (1 if "norm" in name or "scale" in name else 0)
        x /= 1 if name == "conv" else shape[1] ** 0.5 / 2
        return eight_bits(x) if few_bits and name in ("k", "up") else x

    def one_or_all(name: str, shape: tuple[int, ...]) -> Any:
        count = getattr(a.layers[number].mlp, "count", 0)
        all_of = name.startswith("experts.")
        return [make(name, shape) for _ in range(count)] if all_of else make(name, shape)

    return {name: one_or_all(name, shape) for name, shape in a.layer_shapes(number).items()}


def eight_bits(x: torch.Tensor) -> Quantized:
    numbers = (x * 64 + 128).round().clamp(0, 255).to(torch.uint8)
    scales = torch.full((len(x), x.shape[1] // 16), 1 / 64)
    return Quantized(numbers, scales, -128 * scales, 8)


class Model:
    """The native loop with random weights, over a pool of its own."""

    def __init__(self, name: str, dtype: torch.dtype = F32) -> None:
        a = self.architecture = ARCHITECTURES[name]
        rng = torch.Generator().manual_seed(len(name))
        self.layers = [random_weights(a, i, rng, i == 1) for i in range(len(a.layers))]
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=rng) / 2
        self.head = None if a.tied else torch.randn(VOCAB, HIDDEN, generator=rng) / 7
        self.last_norm = 1 + torch.randn(HIDDEN, generator=rng) / 5
        self.operations = NativeOperations(a, dtype)
        for number, weights in enumerate(self.layers):
            self.operations.layer(number, weights)
        self.operations.embedding(self.embedding, self.head)
        self.operations.loaded(self.last_norm)
        self.dtype = dtype

    def pool(self, pages: int, slots: int) -> KVPool:
        kinds = [LayerShape(k.kv_heads, k.head_dim, k.value_dim) for k in self.architecture.kinds]
        pool = KVPool(kinds, pages, PAGE, self.dtype, torch.device("cpu"))
        shapes: StateShapes = {}
        for i, mixer in enumerate(layer.mixer for layer in self.architecture.layers):
            if isinstance(mixer, ShortConv | DeltaNet | Mamba2):
                shapes["conv", i, 0] = (mixer.width - 1, mixer.channels), F32
            if isinstance(mixer, DeltaNet):
                shapes["recurrent", i, 0] = (mixer.heads, mixer.key, mixer.value), F32
            if isinstance(mixer, Mamba2):
                shapes["recurrent", i, 0] = (mixer.heads, mixer.state, mixer.value), F32
        if shapes:
            pool.states = StatePool(shapes, slots, torch.device("cpu"))
            for tensor in pool.states.tensors.values():
                tensor.fill_(torch.nan)
        return pool

    @torch.inference_mode()
    def step(
        self, pool: KVPool, parts: list[tuple[np.ndarray, int, int, np.ndarray]],
        states: list[SequenceStates],
    ) -> list[torch.Tensor]:  # fmt: skip
        """The logits of each part: (tokens of a sequence, from, to, its page table)."""
        lens, ends = [end - start for _, start, end, _ in parts], [part[2] for part in parts]
        batch = PagedBatch.of([part[3] for part in parts], lens, ends, PAGE)
        tokens = np.concatenate([part[0][part[1] : part[2]] for part in parts])
        plan = NativeBackend().plan(batch, tokens, batch.positions(), np.arange(len(tokens)))
        recurrent = states if pool.states is not None else []
        return list(self.operations.run(pool, plan, recurrent).split(lens))

    def alone(self, tokens: np.ndarray) -> torch.Tensor:
        """[T, vocab_size] in one step of one thread."""
        torch.set_num_threads(1)
        table = np.arange(-(-len(tokens) // PAGE), dtype=np.int32)
        pool, state = self.pool(len(table), 1), SequenceStates(-1, 0, ())
        return self.step(pool, [(tokens, 0, len(tokens), table)], [state])[0]


def sequences(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n) for n in (41, 13, 29, 1, 70)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_token_has_the_same_bits_in_any_chunks_and_company(name: str, dtype: torch.dtype) -> None:
    """Also when a sequence goes on from a state that another has left on its way."""
    rng, model = np.random.default_rng(7), Model(name, dtype)
    texts = sequences(3)
    texts.append(np.concatenate([texts[4][:31], texts[0]]))  # goes on from a kept state
    expected = [model.alone(text) for text in texts]
    assert all(rows.isfinite().all() for rows in expected)
    most, count = max(map(len, texts)), len(texts)
    tables = rng.permutation(count * most).astype(np.int32).reshape(count, most)
    pool, kept = model.pool(count * most, 2 * count + 1), 2 * count
    done, slot, got = [0] * count, [-1] * count, [[] for _ in texts]  # type: ignore[var-annotated]
    tables[5][:7], waits = tables[4][:7], True
    while min(n - len(t) for n, t in zip(done, texts, strict=True)):
        torch.set_num_threads(int(rng.integers(1, 4)))
        parts, states, running = [], [], []
        for i, text in enumerate(texts):
            left = len(text) - done[i]
            if not left or (i == 5 and waits) or rng.random() < 0.3:
                continue
            n = min(left, int(rng.choice([1, 1, 2, 5, 17, 40])))
            keeps = []
            if i == 4 and done[i] < 28 <= done[i] + n:
                keeps, waits = [(28 - done[i], kept)], False
            write = (
                slot[i]
                if slot[i] in (i, i + count) and rng.random() < 0.5
                else rng.choice([i, i + count])
            )
            states.append(SequenceStates(slot[i], int(write), tuple(keeps)))
            parts.append((text, done[i], done[i] + n, tables[i]))
            running.append(i)
        if not running:
            continue
        for i, rows, state in zip(running, model.step(pool, parts, states), states, strict=True):
            got[i].append(rows)
            done[i], slot[i] = done[i] + len(rows), state.write
        if 5 not in running and not waits and not done[5]:
            done[5], slot[5] = 28, kept
            got[5].append(expected[5][:28])
    for rows, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(
            torch.cat(rows).numpy().view(np.int32), want.numpy().view(np.int32)
        )
