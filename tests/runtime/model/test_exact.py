"""Exact mode: every bit is what the tokens give alone; what cannot be so is refused."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from radixcache import LLM, SamplingParams
from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels import native
from radixcache.kernels.torch_backend import TorchBackend
from radixcache.runtime.engine.prompt_logprobs import _score
from radixcache.runtime.engine.sampler import sample, top_logprobs
from radixcache.runtime.files import BUNDLED_MODEL
from radixcache.runtime.model import exact, exact_layers
from radixcache.runtime.model.architecture import understand
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.native_operations import ExactOperations
from radixcache.runtime.model.operations import Operations
from radixcache.runtime.model.packed_linear import PackedLinear, PackedProduct, can_pack
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.stock_model import StockModel
from tests.models import tiny_model
from tests.runtime.model import exact_schedules
from tests.runtime.model.exact_schedules import LOOPED, Tally, differing, exact_model, play
from tests.runtime.model.test_decoder import settings_of

reason = native.problem() or (None if can_pack(torch.float32) else "no packed weights")
needs_exact = pytest.mark.skipif(reason is not None, reason=str(reason))
F32, BF16 = torch.float32, torch.bfloat16
SEED = 20_261_122


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# A row of an operation, in the company of 0 to 139 others.

Function = Callable[[torch.Tensor], torch.Tensor]


SOME, ALL = (*range(2, 10), 16, 17, 31, 33, 64, 65, 128, 140), range(2, 141)
companies = pytest.mark.parametrize(
    ("counts", "number"),
    [(SOME, 2), *(pytest.param(ALL, n, marks=pytest.mark.exhaustive) for n in (1, 2, 3))],
    ids=["some", "1-thread", "2-threads", "3-threads"],
)
"""Numbers of rows, and threads."""


def differing_rows(function: Function, row: torch.Tensor, counts: Sequence[int]) -> int:
    """Bits of a row's result that change with the number of rows, their values and its place."""
    generator, found = torch.Generator().manual_seed(SEED), 0
    others = torch.randn(200, len(row), generator=generator).mul_(3).to(row.dtype)
    alone: torch.Tensor | None = None
    for count in counts:
        rows = others[count % 60 :][:count].clone()
        places = sorted({0, count // 2, count - 1})
        rows[places] = row
        out = function(rows)
        alone = out[0].clone() if alone is None else alone
        found += sum(differing(out[place], alone) for place in places)
    return found


def make_row(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(width)).mul_(3).to(dtype)


def make_product(
    width: int, outer: int, dtype: torch.dtype, *, bias: bool = False
) -> PackedProduct:
    generator = torch.Generator().manual_seed(width + outer)
    weight = torch.randn(outer, width, generator=generator).mul_(width**-0.5).to(dtype)
    return PackedProduct(
        weight, torch.randn(outer, generator=generator).to(dtype) if bias else None
    )


@needs_exact
@companies
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_of_a_packed_product_has_the_same_bits_among_two_rows_or_more(
    counts, number, dtype
) -> None:
    torch.set_num_threads(number)
    for width, outer in ((64, 60), (100, 77), (1536, 64)):
        row, one = make_row(width, dtype), make_product(width, outer, dtype, bias=width == 100)
        assert differing_rows(one, row, counts) == 0, (width, outer)


@needs_exact
@companies
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_of_a_packed_product_has_the_same_bits_alone_where_that_is_said(
    counts, number, dtype
) -> None:
    torch.set_num_threads(number)
    for width, outer in ((64, 60), (100, 77), (513, 64), (1024, 70), (1100, 64), (4224, 65)):
        weight, bias = make_row(width * outer, dtype).view(outer, width), make_row(outer, dtype)
        one = PackedProduct(weight, bias, row=True)
        if not one.same_alone:
            pytest.skip("oneDNN sums in another order here")
        row = make_row(width, dtype)
        assert differing_rows(one, row, [1, *counts]) == 0, (width, outer)
        rest = PackedProduct(weight, -one._by_onednn(row[None], None)[0], row=True)
        assert differing_rows(rest, row, [1, *counts]) == 0, "rounding hides it"


@needs_exact
@companies
def test_a_row_of_a_small_product_has_the_same_bits_alone_and_among_others(counts, number) -> None:
    torch.set_num_threads(number)
    for width, outer in ((5, 3), (64, 60), (100, 77), (256, 512)):
        row, weight = make_row(width, F32), make_row(width * outer, F32).view(outer, width)
        one = native.SmallProduct(weight, make_row(outer, F32) if width == 100 else None)
        assert differing_rows(one, row, [1, *counts]) == 0, (width, outer)


def rotate(positions: torch.Tensor) -> torch.Tensor:
    architecture = understand(settings_of(exact_schedules.folder("qwen3")))
    operations = ExactOperations(architecture, native.NativeBackend(), F32)
    return torch.cat(operations.rotation(positions[:, 0].abs().mul(1000).long()), 1)


@needs_exact
@companies
def test_rows_of_all_other_operations_have_the_same_bits_in_any_company(counts, number) -> None:
    torch.set_num_threads(number)
    operations: dict[str, tuple[Function, int]] = {
        "rotation tables": (rotate, 5),
        "softmax": (lambda x: x.softmax(-1), 261),
        "log_softmax": (lambda x: x.log_softmax(-1), 261),
        "logsumexp": (lambda x: x.logsumexp(-1, keepdim=True), 261),
        "cap of logits": (torch.tanh, 261),
        "softplus": (exact_layers._Whole(F.softplus), 75),
        "tanh": (exact_layers._Native("gelu_tanh"), 75),
        "norm": (lambda x: x * x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt(), 96),
    }
    for name, (function, width) in operations.items():
        for dtype in (F32, BF16):
            assert differing_rows(function, make_row(width, dtype), counts) == 0, (name, dtype)


@pytest.mark.parametrize("steps", [2, 1 << 12])
def test_what_a_row_is_sampled_scored_and_reported_does_not_depend_on_its_company(steps) -> None:
    """With few values of logits, many are equal: ties are broken alike, too."""
    params = [
        SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, seed=1, logprobs=n)
        for t, p, k, m, n in (
            (0, 1.0, 0, 0.0, 5), (0.7, 1.0, 0, 0.0, 0), (1.0, 0.9, 0, 0.0, 20),
            (1.3, 1.0, 7, 0.0, 1), (1.0, 1.0, 0, 0.1, 3), (2.0, 0.5, 40, 0.01, 8),
        )
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(len(params), 1003, generator=generator).mul_(steps).round_() / steps

    def draw(rows: list[int]) -> list[Any]:
        chosen = [params[row] for row in rows]
        tokens, _ = sample(
            logits[rows].clone(), chosen, [torch.Generator().manual_seed(row) for row in rows]
        )
        counts = [one.logprobs or 0 for one in chosen]
        ids, values = top_logprobs(logits[rows], tokens, counts)
        scores = _score(logits[rows], tokens.numpy().astype(np.int32), 21)
        told = zip(ids.tolist(), values.tolist(), counts, strict=True)
        top = [(i[: 1 + n], v[: 1 + n]) for i, v, n in told]
        return list(zip(tokens.tolist(), top, scores.tolist(), strict=True))

    together = draw([*range(len(params))])
    assert together == [draw([row])[0] for row in range(len(params))]
    assert draw([3, 1, 4]) == [together[row] for row in (3, 1, 4)]


# Engines.


def schedules(model: PagedModel, seeds: range) -> Tally:
    tally = sum((play(model, seed) for seed in seeds), Tally())
    print(f"seeds {seeds}: {tally}")
    return tally


@needs_exact
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("qwen3", "bfloat16"), ("mistral", "float32"), ("gemma2", "float32"),
     ("gemma3_text", "bfloat16")],
)  # fmt: skip
def test_no_bit_of_random_schedules_differs_from_the_tokens_alone(family, dtype) -> None:
    tally = schedules(exact_model(family, dtype), range(SEED, SEED + 3))
    assert tally.differing == tally.flips == 0
    assert tally.rows > 20 and tally.values > 1000 and tally.hit_tokens


@needs_exact
@pytest.mark.parametrize(("family", "dtype"), [("gemma2", "float32"), ("llama", "bfloat16")])
def test_where_the_check_finds_other_bits_of_one_row_there_is_none(
    family, dtype, monkeypatch
) -> None:
    model = exact_model(family, dtype)
    monkeypatch.setattr(model, "fills_up", False)
    counted, compute = [], model._logits

    def one_row_differs(pool: Any, tokens: Any, positions: Any, rows: Any) -> torch.Tensor:
        counted.append((len(tokens), len(rows)))
        logits = compute(pool, tokens, positions, rows)
        return logits.nextafter(logits + 1) if len(rows) == 1 else logits

    monkeypatch.setattr(model, "_logits", one_row_differs)
    exact.check(model)
    assert model.fills_up and (1, 1) in counted
    counted.clear()
    play(model, SEED)
    exact.check(model)  # asks for the last row's logits alone, too
    assert model.fills_up and len(counted) > 20
    assert all(tokens > 1 and rows != 1 for tokens, rows in counted), "a row was alone"


@needs_exact
def test_transformers_layers_take_one_row_alone_where_every_product_may() -> None:
    for dtype in exact_schedules.DTYPES:
        model = exact_model("gemma2", dtype)
        assert isinstance(model, StockModel)
        linears = [m for m in model._model.modules() if isinstance(m, PackedLinear)]
        assert len(linears) > 10
        assert model.fills_up or all(linear.product.same_alone for linear in linears)


@needs_exact
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", exact_schedules.DTYPES)
@pytest.mark.parametrize("family", exact_schedules.MODELS)
def test_no_bit_of_more_schedules_differs(family, dtype) -> None:
    tally = Tally()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        tally += schedules(exact_model(family, dtype), range(100 * number, 100 * number + 30))
    assert tally.differing == tally.flips == 0
    assert tally.hit_tokens and tally.evicted and tally.copied and tally.answers > 200


@needs_exact
@pytest.mark.parametrize(
    "families", [LOOPED, pytest.param(("gemma2", "gemma3_text"), marks=pytest.mark.exhaustive)]
)
def test_the_number_of_threads_changes_no_bit(families) -> None:
    for family, dtype in product(families, exact_schedules.DTYPES):
        model, tokens = exact_model(family, dtype), np.arange(40)
        logits, kv = exact_schedules.run_alone(model, tokens)
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            again, kv_again = exact_schedules.run_alone(model, tokens)
            assert differing(logits, again) == 0, family
            assert not any(map(differing, kv, kv_again)), family


# Each rule switched off: the schedules find it, and so does the check at load.


def by_default(monkeypatch: pytest.MonkeyPatch) -> str:
    return "llama"


def one_row_alone(monkeypatch: pytest.MonkeyPatch) -> str:
    forward = PagedModel.forward

    def unfilled(self: PagedModel, *args: Any) -> torch.Tensor:
        self.fills_up = False
        return forward(self, *args)

    monkeypatch.setattr(PagedModel, "forward", unfilled)
    monkeypatch.setattr(PackedProduct, "_take_row_product", lambda *_: None)
    return "llama"


def one_row_in_another_order(monkeypatch: pytest.MonkeyPatch) -> str:
    take = PackedProduct._take_row_product

    def take_unseen(self: PackedProduct, weight: torch.Tensor) -> None:
        take(self, weight)
        if self._row is not None:
            self._row._block = 96
            self.same_alone = True

    monkeypatch.setattr(PackedProduct, "_take_row_product", take_unseen)
    return "llama"


def small_products_unpacked(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ExactOperations, "small_product", Operations.small_product)
    return "llama"


def silu_by_onednn(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ExactOperations, "gated", Operations.gated)
    return "llama"


def attention_by_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    backend = partial(TorchBackend, torch.device("cpu"))
    monkeypatch.setattr("radixcache.runtime.model.paged_model.choose_backend", lambda *_: backend())
    monkeypatch.setattr("radixcache.kernels.choice.choose_backend", lambda *_: backend())
    return "gemma3_text"


def activations_by_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(exact_layers, "_NATIVE", {})
    monkeypatch.setattr(exact_layers, "_KINDS", set())
    return "gemma3_text"


RULES = [
    by_default, one_row_alone, one_row_in_another_order, small_products_unpacked, silu_by_onednn,
    attention_by_torch, activations_by_torch,
]  # fmt: skip


@needs_exact
@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_bits_differ_and_the_load_sees_it(rule, monkeypatch) -> None:
    family = rule(monkeypatch)
    load = partial(load_model, exact_schedules.folder(family), device="cpu")
    if rule in (one_row_in_another_order, silu_by_onednn):  # then steps of one row are filled up
        model = load(exact=True)
        assert model.fills_up and not play(model, SEED).differing
    elif rule is not by_default:
        with pytest.raises(
            ModelError, match=r"exact mode does not hold for .* of a token are other"
        ):
            load(exact=True)
    with monkeypatch.context() as patch:
        patch.setattr(exact, "check", lambda model: None)
        model = load(exact=rule is not by_default)
    assert any(play(model, seed).differing for seed in range(SEED, SEED + 40))


@needs_exact
@pytest.mark.parametrize(
    ("layer", "part", "named"),
    [(0, 0, "the keys of layer 0"), (1, 1, "the values of layer 1"), (None, 0, "the logits")],
)
def test_the_check_names_what_differs(layer, part, named, monkeypatch) -> None:
    model = exact_model("llama", "float32")
    forward = model.forward

    def damage(tokens: Any, batch: Any, rows: Any, pool: Any) -> torch.Tensor:
        logits = forward(tokens, batch, rows, pool)
        if len(tokens) == 1 and layer is None:
            logits = logits.nextafter(logits + 1)
        elif len(tokens) == 1:
            slot = pool.layers[layer][part].flatten(0, 1)[batch.slots()[0]]
            slot[0, 3] = -slot[0, 3]
        return logits

    monkeypatch.setattr(model, "fills_up", model.fills_up)
    monkeypatch.setattr(model, "forward", damage)
    with pytest.raises(ModelError, match=rf": {named} of a token are other bits in other chunks"):
        exact.check(model)
    monkeypatch.undo()
    exact.check(model)


# What is refused.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float16"}, "exact mode computes in float32 or bfloat16, not in float16"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
    ],
)
def test_other_dtypes_are_refused_in_one_sentence(options, said) -> None:
    with pytest.raises(InvalidRequest, match=said):
        load_model(BUNDLED_MODEL, **{"device": "cpu", **options}, exact=True)


def test_another_device_is_refused_in_one_sentence() -> None:
    with pytest.raises(InvalidRequest, match="runs on a CPU only, not on cuda:1: say device cpu"):
        exact.require(torch.device("cuda", 1), torch.float32)


def test_without_native_kernels_or_packed_weights_the_reason_is_said(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native, "problem", lambda: "no C++ compiler")
        with pytest.raises(
            ModelError, match=r"needs the native kernels, which .*: no C\+\+ compiler"
        ):
            load_model(BUNDLED_MODEL, device="cpu", exact=True)
        assert exact.describe().startswith("no: exact mode needs the native kernels")
    if native.problem() is None:
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(ModelError, match="needs oneDNN's packed weights, and has none here"):
            load_model(BUNDLED_MODEL, device="cpu", exact=True)


@needs_exact
def test_a_model_that_multiplies_in_other_ways_is_refused(tmp_path: Path) -> None:
    folder = tiny_model(
        "gpt2", tmp_path, tokenizer=False, n_embd=64, n_layer=2, n_head=4, n_positions=128
    )
    with pytest.raises(ModelError, match=r"exact mode: its transformer.h.0.* \(Conv1D\) is no lin"):
        load_model(folder, device="cpu", exact=True)


# Where it is said.


@needs_exact
def test_an_llm_says_that_it_is_exact_and_answers_as_by_default() -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(exact=True, kv_memory="8MiB") as exactly, LLM(kv_memory="8MiB") as plain:
        assert repr(exactly).endswith("attention by native kernels, exact)")
        assert not repr(plain).endswith("exact)")
        answers = [llm.generate("| 1 | Nora", params)[0] for llm in (exactly, plain)]
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids


@needs_exact
@pytest.mark.parametrize("family", LOOPED)
def test_the_default_packs_no_small_product_and_fills_up_no_step(family, monkeypatch) -> None:
    monkeypatch.setattr("radixcache.runtime.model.paged_model._fill_up", None)
    model = load_model(exact_schedules.folder(family), device="cpu")
    assert isinstance(model, Decoder) and not model.exact
    assert bool(model._operations._packed) == (family == "llama")  # which has big ones
    logits, _ = exact_schedules.run_alone(model, np.arange(1))
    assert logits.shape == (1, model.vocab_size)
