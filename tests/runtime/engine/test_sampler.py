"""Sampling against distributions worked out by brute force, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixcache import SamplingParams
from radixcache.kernels.choose import choose_filter
from radixcache.kernels.draw import Draw
from radixcache.kernels.native.sampling import draw_tokens
from radixcache.kernels.torch.top_p import Filter, filter_by_sort
from radixcache.runtime.engine import sampler
from radixcache.runtime.engine.sampler import draw_of, sample
from tests.helpers.native import needs_kernels

SEED = 20_261_125
GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=0.8)
FILTERED = SamplingParams(top_k=9, top_p=0.9, min_p=0.01)


def probabilities(
    logits: torch.Tensor, params: list[SamplingParams], keep: Filter = filter_by_sort
) -> torch.Tensor:
    return sampler._probabilities(logits.clone(), params, keep)


def brute_force(logits: torch.Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """[vocab] probabilities in float64 before the filters, in descending order: them, and which of
    them stay; -1 where rounding may decide."""
    scaled = logits.double().numpy() / max(params.temperature, 1e-30)
    probs = np.sort(np.exp(scaled - scaled.max()))[::-1]
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    kept = before < params.top_p if params.top_p < 1 else np.full(len(probs), True)
    if params.top_k > 0:
        kept[params.top_k :] = False
    kept &= probs >= params.min_p * probs[0]
    kept[0] = True
    least = params.min_p * probs[0]
    border = (probs != least) & (np.abs(probs - least) < 1e-6 * least)  # where rounding decides
    if params.top_p < 1:
        border |= np.abs(before - params.top_p) < min(2e-5, params.top_p / 2)
    return probs, np.where(border, -1, kept)


def make_logits(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    logits = 4 * torch.randn(vocab, generator=generator)
    if kind == "ties":  # as a model in bfloat16 gives them
        logits = logits.bfloat16().float()
    if kind == "masked":
        logits[1:][torch.rand(vocab - 1, generator=generator) < 0.5] = -torch.inf
    return logits


CASES: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 1 << 30}, {"top_p": 0.9}, {"top_p": 1e-9},
    {"top_p": 0.999}, {"min_p": 0.05}, {"min_p": 1.0}, {"temperature": 1e-6}, {"top_k": -1},
    {"temperature": 1e-300}, {"temperature": 1e38}, {"temperature": 0.3, "top_p": 0.7},
    {"top_k": 7, "top_p": 0.8}, {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "temperature": 1.7},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("vocab", [5, 1000, 128_000])
@pytest.mark.parametrize("by", ["sort", "flashinfer"])
def test_the_kept_tokens_and_their_weights_are_those_of_brute_force(by, vocab, kind, gpu) -> None:
    generator = np.random.default_rng(SEED)
    logits = make_logits(kind, vocab, torch.Generator().manual_seed(int(generator.integers(99999))))
    params = [SamplingParams(**options) for options in CASES]
    table = logits.expand(len(params), -1)
    device = torch.device("cuda", 0) if by == "flashinfer" else torch.device("cpu")
    keep = choose_filter(device)
    found = probabilities(table.to(device), params, keep).cpu()
    assert (keep is filter_by_sort) == (by == "sort")
    for one, row in zip(params, found, strict=True):
        probs, kept = brute_force(logits, one)
        got = row.double().sort(descending=True).values.numpy()
        got /= got[kept == 1].sum() / probs[kept == 1].sum() if (kept == 1).any() else 1
        if by == "flashinfer" and (one.top_k > 0 or one.top_p < 1):  # ties with the last one
            kept = np.where((kept == 0) & np.isin(probs, probs[kept != 0]), -1, kept)
        sure = probs > 1e-37  # else 0 in float32
        np.testing.assert_allclose(got[sure & (kept == 1)], probs[sure & (kept == 1)], rtol=2e-5)
        assert not got[kept == 0].any(), f"{one}, seed {SEED}"
        assert (kept >= 0).mean() > 0.5


@needs_kernels
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("vocab", [1, 5, 17, 1000, 128_003])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_kernel_draws_each_kept_token_for_its_share_of_the_noise(vocab, kind, options) -> None:
    """400 draws with even noise: of each token as many as its probability says, but for one."""
    logits, draws = make_logits(kind, vocab, torch.Generator().manual_seed(SEED)), 400
    params = SamplingParams(**options)
    how = draw_of(params, 0.0)
    even = [how._replace(uniform=(i + 0.5) / draws) for i in range(draws)]
    tokens, highest = draw_tokens(logits.expand(draws, -1), even)
    assert (highest == logits.max()).all()
    probs, kept = brute_force(logits, params)
    descending = logits.sort(descending=True).values.numpy()
    levels, place = np.unique(descending, return_inverse=True)  # equal ones count together
    seen = np.bincount(np.searchsorted(levels, logits[tokens].numpy()), minlength=len(levels))
    some, sure = (np.bincount(place, probs * chosen) for chosen in (kept != 0, kept == 1))
    assert not seen[some == 0].any(), f"{options}, seed {SEED}"
    few, many = sure / some.sum() * draws, some / sure.sum() * draws
    assert (seen > few - 1.5 - 4 * few**0.5).all(), f"{options}, seed {SEED}"
    assert (seen < many + 1.5 + 4 * many**0.5).all(), f"{options}, seed {SEED}"


@needs_kernels
def test_a_row_is_drawn_alike_in_any_company() -> None:
    generator, vocab = torch.Generator().manual_seed(SEED), 5003
    logits = 3 * torch.randn(9, vocab, generator=generator)
    noise = torch.rand(9, generator=generator).tolist()
    draws = [Draw(0.9, noise[i], 0.7 * (i % 3), 0.01 * (i % 2), 40 * (i % 4)) for i in range(9)]
    together = draw_tokens(logits, draws)[0].tolist()
    alone = [draw_tokens(logits[i : i + 1], draws[i : i + 1])[0].item() for i in range(9)]
    assert together == alone
    spread = torch.zeros(vocab, 9).T.copy_(logits)
    assert draw_tokens(spread, draws)[0].tolist() == together
    greedy = torch.tensor([[1.0, 7.0, 7.0, -torch.inf]])
    assert draw_tokens(greedy, [Draw()])[0].item() == 1
    with pytest.raises(ValueError, match=r"1 draws from torch\.float64"):
        draw_tokens(greedy.double(), [Draw()])


@pytest.mark.parametrize("by", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("options", CASES[:-1], ids=str)
def test_frequencies_follow_the_distribution(options, by) -> None:
    """Chi-square over 6 tokens; beyond 60 once in 10^11."""
    generator, draws = torch.Generator().manual_seed(SEED), 20_000
    logits = torch.randn(6, generator=generator)
    params = SamplingParams(**options)
    rows = logits.expand(draws, -1)
    if by == "native":
        noise = torch.rand(draws, generator=generator, dtype=torch.float64).tolist()
        tokens, _ = draw_tokens(rows, [draw_of(params, uniform) for uniform in noise])
    else:
        tokens, _ = sample(rows, [params] * draws, [generator] * draws)
    seen = np.bincount(tokens.numpy(), minlength=6)[logits.argsort(descending=True).numpy()]
    probs, kept = brute_force(logits, params)
    expected = np.where(kept == 1, probs, 0) / probs[kept == 1].sum() * draws
    assert not seen[expected == 0].any()
    some = expected > 1e-9
    assert ((seen - expected)[some] ** 2 / expected[some]).sum() < 60, f"seed {SEED}"


@pytest.mark.parametrize("params", [GREEDY, PLAIN, FILTERED])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("by", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize("place", [7, 49])
def test_what_is_no_number_is_told_and_no_filter_sees_it(params, bad, by, place) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(SEED))
    logits[1, slice(None) if bad == -torch.inf else place] = bad
    before = logits.clone()

    def keep(probs, top_k, top_p):
        assert probs.isfinite().all()
        return filter_by_sort(probs, top_k, top_p)

    if by == "native":
        tokens, highest = draw_tokens(logits, [draw_of(params, 0.5)] * 3)
    else:
        tokens, highest = sample(logits, [params] * 3, [torch.Generator()] * 3, keep)
    assert highest.isfinite().tolist() == [True, False, True]
    assert torch.equal(highest[[0, 2]], logits[[0, 2]].amax(-1)) and 0 <= tokens[1] < 50
    assert torch.equal(highest[1].nan_to_num(9), torch.tensor(bad).nan_to_num(9))
    assert logits.nan_to_num(9).equal(before.nan_to_num(9))


@pytest.mark.parametrize("params", [GREEDY, PLAIN, FILTERED])
def test_on_a_gpu_nobody_waits_and_nothing_is_sorted(gpu, params) -> None:
    device = torch.device("cuda", 0)
    keep, logits = choose_filter(device), torch.randn(6, 300).to(device)
    gpu.device.ops.clear()
    gpu.device.waits.clear()
    sample(logits, [params, GREEDY] * 3, [torch.Generator(device)] * 6, keep)
    assert not gpu.device.waits and "sort" not in gpu.device.ops
    assert ("top_p_renorm_probs" in gpu.device.ops) == (params is FILTERED)
    if params is GREEDY:
        assert gpu.device.ops == ["argmax", "gather"]


def test_kernels_that_cannot_be_trusted_are_replaced_by_a_sort(gpu, monkeypatch, caplog) -> None:
    device = torch.device("cuda", 0)
    assert choose_filter(device) is not filter_by_sort
    found = gpu.flashinfer.top_p_renorm_probs

    def wrong(probs, top_p, is_deterministic=False):
        return found(probs, top_p / 2, is_deterministic=is_deterministic)

    def missing(probs, top_p, is_deterministic=False):
        raise RuntimeError("no kernel image\nmore lines")

    for kernel, reason in ((wrong, "wrong results"), (missing, "no kernel image")):
        monkeypatch.setattr(gpu.flashinfer, "top_p_renorm_probs", kernel)
        assert choose_filter(device) is filter_by_sort
        assert caplog.records.pop().getMessage().endswith(reason)
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    assert choose_filter(device) is filter_by_sort and not caplog.records
