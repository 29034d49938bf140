"""Exact mode: every bit is what the tokens give alone; what cannot be so is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixcache import SamplingParams
from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.operators import TorchBackend
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.engine.sampler import sample, top_logprobs
from radixcache.runtime.model import exact
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.kv_pool import choose_windows
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.sampling.prompt_logprobs import _score
from tests.helpers.models import tiny_model
from tests.helpers.native import needs_kernels
from tests.runtime.model import exact_schedules
from tests.runtime.model.exact_schedules import (
    CONVERTED,
    DTYPES,
    GGUFS,
    MODELS,
    Tally,
    differing,
    exact_model,
    play,
)

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


@needs_kernels
@companies
def test_rows_of_all_other_operations_have_the_same_bits_in_any_company(counts, number) -> None:
    torch.set_num_threads(number)
    operations: dict[str, tuple[Function, int]] = {
        "softmax": (lambda x: x.softmax(-1), 261),
        "log_softmax": (lambda x: x.log_softmax(-1), 261),
        "logsumexp": (lambda x: x.logsumexp(-1, keepdim=True), 261),
        "cap of logits": (torch.tanh, 261),
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


def schedules(model: PagedModel, seeds: range) -> Tally:
    tally = sum((play(model, seed) for seed in seeds), Tally())
    print(f"seeds {seeds}: {tally}")
    return tally


NARROW = [family for family in MODELS if family not in exact_schedules.NEVER_WIDE]


@needs_kernels
@pytest.mark.parametrize(
    ("family", "dtype", "kv", "activations"),
    [
        *((one, DTYPES[n % 2], "auto", "off") for n, one in enumerate([*MODELS, *GGUFS])),
        *((one, DTYPES[n % 2], "int8", "off") for n, one in enumerate(NARROW, 1)),
        *((one, "float32", "float16", "off") for one in ("qwen3", "gpt_oss", "llama of 4 bits")),
        *((one, DTYPES[n % 2], "auto", "on") for n, one in enumerate([*GGUFS, *CONVERTED])),
        ("gemma3_text", "float32", "bfloat16", "off"),
    ],
)
def test_no_bit_of_random_schedules_differs_from_the_tokens_alone(family, dtype, kv, activations):
    model = exact_model(family, dtype, kv, activations)
    assert model.quantized_activations == (activations == "on")
    tally = schedules(model, range(SEED, SEED + 4))
    assert isinstance(model, Decoder)
    assert tally.differing == tally.flips == 0
    assert tally.loaded or model.state_shapes or any(model.windows)
    assert tally.rows > 20 and tally.values > 1000 and tally.hit_tokens


@needs_kernels
@pytest.mark.parametrize(
    "families",
    [("llama", "gpt_oss", "lfm2"), pytest.param([*MODELS], marks=pytest.mark.exhaustive)],
)
def test_the_number_of_threads_changes_no_bit(families) -> None:
    for family, dtype in product(families, DTYPES):
        model, tokens = exact_model(family, dtype), np.arange(40)
        logits, kv = exact_schedules.run_alone(model, tokens)
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            again, kv_again = exact_schedules.run_alone(model, tokens)
            assert differing(logits, again) == 0, family
            assert not any(map(differing, kv, kv_again)), family


# Each rule switched off: the schedules find it, and so does the check at load.


def loop_by_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        "radixcache.runtime.model.decoder.choose_backend", lambda *given: TorchBackend(*given)
    )
    return "llama"


def attention_by_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    backend = partial(TorchAttention, torch.device("cpu"))
    monkeypatch.setattr("radixcache.runtime.model.decoder.choose_attention", lambda *_: backend())
    return "qwen3"


RULES = [loop_by_torch, attention_by_torch]


@needs_kernels
@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_bits_differ_and_the_load_sees_it(rule, monkeypatch) -> None:
    family = rule(monkeypatch)
    load = partial(load_model, exact_schedules.folder(family), device="cpu", exact=True)
    with pytest.raises(ModelError, match=r"exact mode does not hold for .* of a token are other"):
        load()
    monkeypatch.setattr(exact, "check", lambda model: None)
    model = load()
    assert any(play(model, seed).differing for seed in range(SEED, SEED + 40))


@needs_kernels
def test_the_loop_is_exact_by_default_too() -> None:
    model = load_model(exact_schedules.folder("qwen3"), device="cpu", dtype="bfloat16")
    assert not model.exact
    assert schedules(model, range(SEED, SEED + 2)).differing == 0


@needs_kernels
@pytest.mark.parametrize(
    ("layer", "part", "named"),
    [(0, 0, "the keys of layer 0"), (1, 1, "the values of layer 1"), (None, 0, "the logits")],
)
def test_the_check_names_what_differs(layer, part, named, monkeypatch) -> None:
    model = exact_model("llama", "float32")
    forward = model.forward

    def damage(tokens: Any, batch: Any, rows: Any, pool: Any, _: Any) -> torch.Tensor:
        logits = forward(tokens, batch, rows, pool)
        if len(tokens) == 1 and layer is None:
            logits = logits.nextafter(logits + 1)
        elif len(tokens) == 1:
            slot = pool.layers[layer][part].flatten(0, 1)[batch.slots()[0]]
            slot[0, 3] = -slot[0, 3]
        return logits

    monkeypatch.setattr(model, "forward", damage)
    with pytest.raises(ModelError, match=rf": {named} of a token are other bits in other chunks"):
        exact.check(model)
    monkeypatch.undo()
    exact.check(model)


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


def test_without_native_kernels_the_reason_is_said(monkeypatch) -> None:
    monkeypatch.setattr(exact, "problem", lambda: "no C++ compiler")
    with pytest.raises(ModelError, match=r"needs the native kernels, which .*: no C\+\+ compiler"):
        load_model(BUNDLED_MODEL, device="cpu", exact=True)
    assert exact.describe().startswith("no: exact mode needs the native kernels")


@needs_kernels
def test_transformers_layers_are_refused(tmp_path: Path) -> None:
    folder = tiny_model("starcoder2", tmp_path, tokenizer=False)
    said = "exact mode takes only models of our own loop: no loop for starcoder2"
    with pytest.raises(ModelError, match=said):
        load_model(folder, device="cpu", exact=True)


@needs_kernels
def test_what_looking_back_computes_on_the_way_is_left_to_nobody(tmp_path: Path) -> None:
    """Three layers see 21 tokens back: where a sequence begins there, its first windows are not
    whole, and the next prompt must not resume from them."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    options: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8}
    path = tiny_model("gemma3_text", tmp_path, tokenizer=False, **options)
    model = load_model(path, device="cpu", dtype="float32", exact=True)
    windows = choose_windows(model.shapes, model.windows, 4)
    assert windows is not None and windows.page_size <= 4
    schedule = exact_schedules.Schedule(model, 1, 9, windows)
    watch, cache = exact_schedules.Watch(schedule.engine), schedule.cache
    assert cache.windows is not None
    stem, params = schedule.text(100), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    hits = []
    for prompt in (stem, [*stem[:72], 5, 6], [*stem[:60], 7, 8], [*stem[:56], 9]):
        request = schedule.engine.add_request(prompt, params)
        schedule.finish()
        hits.append(request.sequences[0].cached_tokens)
        if prompt is stem:
            schedule.lose_windows(cache.windows)
    assert hits[1] == 72 - 21, "it has looked back"
    for sequence, position, values in watch.logits:
        logits, _ = exact_schedules.run_alone(model, sequence.tokens)
        assert differing(values, logits[position]) == 0, (len(sequence.tokens), position)
