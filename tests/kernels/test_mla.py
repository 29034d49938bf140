"""Attention over MLA's latents, in torch and by FlashInfer's wrapper, against the naive one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import AttentionBackend, LayerInputs, LayerKind, LayerPages
from radixcache.kernels.choose import choose_attention
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.torch.attention import TorchAttention
from tests.helpers.native import needs_kernels
from tests.helpers.simulated_cuda import CPU, CUDA
from tests.kernels.backends import SHAPES
from tests.kernels.reference import Step, make_step, naive_attention

LATENT, ROTATED = 512, 64  # of which FlashInfer has kernels
SCALE = 0.04


def mla_step(seed: int, lens: list[tuple[int, int]], heads: int, dim: int, **options: Any) -> Step:
    """Keys of `dim` numbers, which are the values, too."""
    step = make_step(seed, lens, heads=(heads, 1), dim=dim, **options)
    return replace(step, value=step.key, v_pages=step.k_pages)


def kind_of(heads: int, latent: int = LATENT, rotated: int = ROTATED, **more: Any) -> LayerKind:
    return LayerKind(heads, 1, latent, rotated, SCALE, mla=True, **more)


def run(
    backend: AttentionBackend, step: Step, latent: int, place: torch.device = CPU,
    sinks: torch.Tensor | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    sides = [step.key, step.k_pages.nan_to_num(0)]
    parts = [part for side in sides for part in (side[..., :latent], side[..., latent:])]
    query, key, value, *pages = (t.contiguous().to(place) for t in (step.query, *parts))
    kind = kind_of(query.shape[1], latent, step.key.shape[2] - latent, **options)
    inputs = LayerInputs(query, key, value, LayerPages(*pages), kind, sinks)
    return backend.plan(step.batch).run(inputs)


def assert_close(out: torch.Tensor, step: Step, latent: int, **options: Any) -> None:
    """Within rounding of float32, or of the last bits of bfloat16."""
    wanted = naive_attention(step, scale=SCALE, **options)[..., :latent]
    assert out.is_contiguous() and out.dtype == step.query.dtype
    tolerance = (1 / 128, 2e-3) if out.dtype == torch.bfloat16 else (2e-5, 2e-5)
    np.testing.assert_allclose(out.cpu().double(), wanted, *tolerance)


SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0, -40.0])


ON_CPU = [TorchAttention, pytest.param(NativeAttention, marks=needs_kernels)]


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 6}, {"softcap": 5.0}, {"sinks": SINKS}], ids=str
)
def test_a_cpu_equals_the_reference(backend: Any, shape: str, options: dict[str, Any]) -> None:
    for latent, rotated in ((16, 8), (20, 6), (33, 35)):
        step = mla_step(7, SHAPES[shape], 5, latent + rotated, page_size=4)
        assert_close(run(backend(), step, latent, **options), step, latent, **options)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("place", [3, 20])
def test_only_rows_that_see_a_latent_without_numbers_become_nan(backend: Any, place: int) -> None:
    step = mla_step(9, [(5, 5), (9, 9)], 5, 24, page_size=4)
    step.key[7, 0, place] = torch.inf
    out = run(backend(), step, 16).isnan()
    assert out[7:].all() and not out[:7].any()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("heads", "sinks"), [(4, None), (5, None), (5, SINKS)])
def test_flashinfer_equals_the_reference(gpu, shape, page_size, heads, sinks) -> None:
    backend = gpu_backend(kind_of(heads))
    step = mla_step(3, SHAPES[shape], heads, 576, page_size=page_size, dtype=torch.bfloat16)
    given = {} if sinks is None else {"sinks": sinks.to(CUDA)}
    out = run(backend, step, LATENT, CUDA, **given)
    assert_close(out, step, LATENT, **({} if sinks is None else {"sinks": sinks}))
    assert gpu.kernels.calls["mla"] == 1


def gpu_backend(*kinds: LayerKind, dtype: torch.dtype = torch.bfloat16) -> AttentionBackend:
    from radixcache.kernels.flashinfer.mla import FlashInferMLA

    return FlashInferMLA(CUDA, dtype, kinds)


def test_heads_that_no_tile_holds_whole_are_filled_up(gpu, monkeypatch) -> None:
    """FlashInfer refuses to leave out the last key of a query that a tile cuts in two."""
    from radixcache.kernels.flashinfer import mla

    step = mla_step(5, [(40, 58)], 20, 576, page_size=4, dtype=torch.bfloat16)
    backend = gpu_backend(kind_of(20))
    assert_close(run(backend, step, LATENT, CUDA), step, LATENT)
    monkeypatch.setattr(mla, "_planned_heads", lambda heads: heads)
    with pytest.raises(Exception, match="omit a visible key"):
        backend.plan(step.batch)


@pytest.mark.usefixtures("gpu")
def test_what_flashinfer_cannot_do_is_left_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    assert "over latents" in choose_attention(CUDA, torch.bfloat16, [kind_of(4)]).name
    for kinds, reason in (
        ([kind_of(4, 256, 32)], "MLA of 256 and 32, only of 512 and 64"),
        ([kind_of(4, window=9)], "no window"),
        ([kind_of(129)], "at most 128 heads"),
        ([kind_of(4), LayerKind(4, 4, 64, 64, 0.1)], "heads of 512/64"),
    ):
        caplog.clear()
        assert choose_attention(CUDA, torch.bfloat16, kinds).name.startswith("torch")
        assert "plain torch, which is slow on a GPU: FlashInfer" in caplog.text
        assert reason in caplog.text
