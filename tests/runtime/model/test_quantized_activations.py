"""`quantized_activations`: which models take it, when "auto" is "on", and what it changes."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from radixcache import InvalidRequest, ModelError
from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.native import linear
from radixcache.kernels.quantized import Quantized
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.runtime.kv_offload.fingerprint import fingerprint
from radixcache.runtime.model import quantized_activations, reference
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.gguf.config import open_gguf
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.quantized_activations import check_activations
from radixcache.runtime.model.weights.sources import GGUFSource
from radixcache.states.recurrent import SequenceStates
from tests.helpers.native import needs_kernels
from tests.runtime.model.exact_schedules import CONVERTED, GGUFS, folder

load = partial(load_model, device="cpu")
TOKENS = np.arange(60) * 7919 % 250


def logits_of(model: PagedModel) -> torch.Tensor:
    pool, states = model.allocate(1, 64, 1), [SequenceStates(-1, 0)] * bool(model.state_shapes)
    batch = PagedBatch.of([np.zeros(1, np.int32)], [60], [60], 64)
    return model.forward(TOKENS, batch, np.arange(60), pool, states)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).std(1) / other.std(1)).median())


@needs_kernels
@pytest.mark.parametrize("family", [*GGUFS, *CONVERTED])
def test_all_products_but_the_routers_round_their_rows(family, monkeypatch) -> None:
    """A plain pass that rounds what `on` promises to round comes closer than one that does not."""
    plain, rounded = (load(folder(family), quantized_activations=a) for a in ("off", "on"))
    assert "activations in 8 bits" in rounded.placement
    assert "activations" not in plain.placement
    assert 0.002 < (lost := error(logits_of(rounded), logits_of(plain))) < 0.15
    product = reference.product

    def likewise(x: torch.Tensor, weight: Any) -> torch.Tensor:
        return weight.times_rounded(x) if isinstance(weight, Quantized) else product(x, weight)

    monkeypatch.setattr(reference, "product", likewise)
    file = open_gguf(folder(family))
    assert isinstance(rounded, Decoder) and file is not None
    spec = rounded.architecture
    weights = GGUFSource(file, spec, rounded.device, rounded.dtype)
    hidden, shared = reference.embed(spec, torch.from_numpy(TOKENS), weights.embedding(), {})
    for number in range(len(spec.layers)):
        hidden = reference.run_layer(spec, number, hidden, weights.layer(number), shared)
    head = weights.head()
    head = weights.embedding() if head is None else head
    expected = reference.logits(spec, hidden, weights.last_norm(), head)
    assert error(logits_of(rounded), expected) < lost / 3


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_rounds_where_it_pays_and_no_exact_float32_is_asked_for(dtype, monkeypatch) -> None:
    load_it = partial(load, folder("llama of 4 bits"), dtype=dtype)
    monkeypatch.setattr(quantized_activations, "rounding_is_fast", lambda: True)
    assert load_it().quantized_activations
    assert load_it(exact=True).quantized_activations == (dtype == "bfloat16")
    assert load_it(exact=True, quantized_activations="on").quantized_activations
    assert not load_it(quantized_activations="off").quantized_activations
    assert not load_it(attention=TorchAttention()).quantized_activations
    assert not load(folder("qwen3")).quantized_activations
    monkeypatch.setattr(quantized_activations, "rounding_is_fast", lambda: False)
    assert not load_it().quantized_activations
    assert load_it(quantized_activations="on").quantized_activations


def test_what_cannot_round_is_refused(monkeypatch) -> None:
    with pytest.raises(InvalidRequest, match="unknown quantized_activations 'yes': say auto, on"):
        load(folder("qwen3"), quantized_activations="yes")
    load_it = partial(load, folder("llama of 4 bits"), quantized_activations="on")
    with monkeypatch.context() as patched:  # before anything is read
        patched.setattr("radixcache.runtime.model.load._load_decoder", None)
        with pytest.raises(InvalidRequest, match="'on' needs float32 or bfloat16, not float16: sa"):
            load_it(dtype="float16")
        with pytest.raises(InvalidRequest, match="'on' runs on a CPU only, not on meta: say off"):
            check_activations("on", torch.device("meta"), "auto")
        patched.setattr(quantized_activations, "problem", lambda: "no C++ compiler")
        with pytest.raises(InvalidRequest, match=r"'on' needs the native kernels.*no C\+\+ comp"):
            load_it()
    monkeypatch.setattr(quantized_activations, "problem", lambda: None)
    monkeypatch.setattr(quantized_activations, "rounding_problem", lambda: None)
    for attempt in (partial(load_it, attention=TorchAttention()), partial(load, folder("qwen3"))):
        with pytest.raises(InvalidRequest, match="'on' needs quantized weights in our own loop"):
            attempt(quantized_activations="on")


@needs_kernels
def test_wrong_kernels_and_models_that_do_not_bear_it_are_told(monkeypatch, caplog) -> None:
    path = folder("llama of 4 bits")
    monkeypatch.setattr(quantized_activations, "MOST_ERROR", 1e-4)
    monkeypatch.setattr(quantized_activations, "rounding_is_fast", lambda: True)
    told = r"its logits change by \d\.\d% of their spread"
    with pytest.raises(ModelError, match=f"does not bear quantized_activations: {told} .*say off"):
        load(path, quantized_activations="on")
    with caplog.at_level(logging.INFO, "radixcache"):
        assert not load(path).quantized_activations
    assert "activations stay as they are: its logits change by" in caplog.text
    monkeypatch.setattr(Quantized, "times_rounded", lambda self, x: self.dense() @ x.T)
    linear.rounding_problem.cache_clear()
    with pytest.raises(InvalidRequest, match="wrong products of 8-bit rows"):
        load(path, quantized_activations="on")
    linear.rounding_problem.cache_clear()


@needs_kernels
def test_kv_of_one_mode_is_not_that_of_the_other(monkeypatch) -> None:
    path = folder("llama of 4 bits")
    models = [load(path, quantized_activations=asked) for asked in ("on", "off")]
    # Even where the probe's KV were the same.
    monkeypatch.setattr("radixcache.runtime.kv_offload.fingerprint._probe", lambda *_: "")
    assert len({fingerprint(model, str(path), model.allocate(1, 16)) for model in models}) == 2
