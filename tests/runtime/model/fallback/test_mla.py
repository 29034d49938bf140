"""MLA of transformers' layers over pages of latents: its answers, in a part of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache.kernels.torch.attention import TorchAttention
from radixcache.runtime.model.fallback.loading import load_transformers
from radixcache.runtime.model.fallback.model import TransformersModel
from radixcache.runtime.model.fallback.patches import mla
from radixcache.runtime.model.families.table import FAMILIES
from radixcache.runtime.model.kv_pool import LayerShape
from radixcache.runtime.model.load import load_model
from tests.helpers.models import MLA, tiny_model
from tests.runtime.model.steps import (
    STEPS,
    plain_logits,
    random_sequences,
    relative_error,
    run_steps,
)

CPU = torch.device("cpu")
WIDE = {"v_head_dim": 24, "qk_rope_head_dim": 8, "head_dim": 8}  # no two sizes alike


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in MLA if family not in FAMILIES),
        ("deepseek_v3", {"rope_interleave": False, **WIDE}),
        ("glm4_moe_lite", {"rope_interleave": False}),
    ],
    ids=str,
)
def test_logits_of_any_chunks_are_those_of_one_forward_and_a_wrong_page_shows(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    model, sequences = load_model(folder, device="cpu"), random_sequences()
    assert isinstance(model, TransformersModel)
    rotated = options.get("qk_rope_head_dim", 16)
    assert model.shapes == [LayerShape(1, 32, rotated)] * len(model.shapes)
    assert model.bytes_per_token == len(model.shapes) * (32 + rotated) * 4
    plain = plain_logits(folder, sequences)
    for page_size in (16,) if options else (1, 16):
        for steps in STEPS:
            assert relative_error(run_steps(model, sequences, steps, page_size), plain) < 1e-5
        damaged = run_steps(model, sequences, STEPS[2], page_size, damage=True)
        assert relative_error(damaged, plain) > 1e-2


def test_latents_that_give_wrong_logits_are_not_kept(tmp_path, monkeypatch, caplog) -> None:
    folder = tiny_model("minicpm3", tmp_path, tokenizer=False)
    right = mla.AbsorbedProjection.from_latent
    monkeypatch.setattr(
        mla.AbsorbedProjection, "from_latent", lambda self, out: right(self, out).flip(1)
    )
    for dtype in ("float32", "bfloat16"):
        model = load_model(folder, device="cpu", dtype=dtype)
        assert model.shapes[0] == LayerShape(4, 32, 16)
        told = "keys and values of all heads are tried: model type 'minicpm3'"
        assert told in caplog.text
        caplog.clear()
    sequences = random_sequences()
    model = load_model(folder, device="cpu")
    logits = run_steps(model, sequences, STEPS[0], 4)
    assert relative_error(logits, plain_logits(folder, sequences)) < 1e-5


def test_a_chosen_backend_keeps_keys_and_values(tmp_path: Path) -> None:
    folder = tiny_model("minicpm3", tmp_path, tokenizer=False)
    expanded = [LayerShape(4, 32, 16)] * 2
    assert load_model(folder, device="cpu", attention=TorchAttention()).shapes == expanded


def test_a_weight_that_is_not_plain_keeps_its_layer_expanded(tmp_path, monkeypatch) -> None:
    """As a quantised checkpoint's: latents of one layer, keys and values of the other."""
    folder = tiny_model("deepseek_v2", tmp_path, tokenizer=False)
    keep = mla.keep_latents

    class Quantised(torch.nn.Linear):
        pass

    def with_another_class(model: Any, name: str) -> bool:
        model.model.layers[1].self_attn.kv_b_proj.__class__ = Quantised
        return keep(model, name)

    monkeypatch.setattr(mla, "keep_latents", with_another_class)
    model, sequences = load_transformers(folder, torch.float32, CPU), random_sequences()
    assert model.shapes == [LayerShape(1, 32, 16), LayerShape(4, 32, 16)]
    logits = run_steps(model, sequences, STEPS[0], 4)
    assert relative_error(logits, plain_logits(folder, sequences)) < 1e-5
