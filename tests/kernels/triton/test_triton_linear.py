"""Triton's products with quantized weights, in its interpreter, against those of dense weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache import SamplingParams
from radixcache.kernels.quantized import E4M3, Quantized
from radixcache.runtime.model.load import load_model
from tests.helpers import engines
from tests.helpers.gguf.files import write_model
from tests.helpers.models import tiny_model
from tests.helpers.quantised_files import quantise
from tests.helpers.simulated_cuda import simulated_cuda
from tests.kernels.native.panels import FORMATS, make
from tests.kernels.triton.triton_launches import launch_triton
from tests.runtime.engine.gpu_schedules import compare_graphs

pytest.importorskip("triton", reason="`make test-gpu` brings it")
from radixcache.kernels.triton import linear as triton_linear
from radixcache.kernels.triton import prefill as triton_prefill

if not triton_prefill.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

QUANTIZED = FORMATS[2:]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bits_of(product: Any) -> float:
    """Of a weight in memory."""
    held = [product._codes, product._scales, product._others[0]]
    size = sum(table.nbytes for table in held[: 2 + product._options["MINIMUM"]])
    return 8 * size / product._columns / product._depth


@pytest.mark.parametrize("number", range(len(QUANTIZED)))
def test_products_are_those_of_the_dense_weight_whatever_stands_beside(number) -> None:
    """Depths that fill no tile, columns that fill none, and a bias."""
    kind, dtype = QUANTIZED[number], DTYPES[number % 3]
    weight = make(kind, 70, 32 * (5 + number % 4), number)
    assert isinstance(weight, Quantized) and triton_linear.QuantizedLinear.takes(weight)
    bias = torch.randn(70).to(dtype) if number % 2 else None
    product = triton_linear.QuantizedLinear(weight, bias)
    x = torch.full((200, 512), torch.nan, dtype=dtype)[:, : weight.shape[1]]  # of a wider tensor
    x.copy_(torch.randn(x.shape))
    found = product(x)
    dense = weight.dense().to(dtype).double()
    wanted = x.double() @ dense.T + (0 if bias is None else bias.double())
    limit = {torch.float32: 1e-6}.get(dtype, 1e-2) * wanted.abs().max()
    assert (found - wanted).abs().max() <= limit
    for count in (1, 7, 64):
        at = 11 * number
        assert torch.equal(product(x[at : at + count]), found[at : at + count])


def test_memory_holds_packed_codes_and_as_few_scales_as_are_exact() -> None:
    numbers = torch.randint(0, 16, (64, 512), dtype=torch.uint8)
    groups = torch.rand(64, 4).half().float()
    scales = groups.repeat_interleave(4, 1)  # of 128, as AWQ has them
    awq = triton_linear.QuantizedLinear(Quantized(numbers, scales, -7 * scales, 4), None)
    assert bits_of(awq) == 4 + (16 + 32) / 128
    scales[0, 1] = 1 / 3  # one differs from its group's, in more than 16 bits
    odd = triton_linear.QuantizedLinear(Quantized(numbers, scales, -7 * scales, 4), None)
    assert bits_of(odd) == 4 + (32 + 32) / 32
    fp8 = triton_linear.QuantizedLinear(Quantized(numbers, groups, None, 8, E4M3), None)
    assert bits_of(fp8) == 8 + 16 / 128 and fp8._others[0] is fp8._scales
    assert not triton_linear.QuantizedLinear.takes(Quantized(numbers | 127, groups, None, 8, E4M3))


def test_a_wrong_kernel_is_not_taken(monkeypatch) -> None:
    place, right = torch.device("cpu"), triton_linear.QuantizedLinear.__call__

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        return right(self, x) * 1.5

    def crowded(self: Any, x: torch.Tensor) -> torch.Tensor:
        return right(self, x) * (1 + 1e-6 * (len(x) > 9))

    triton_linear.probe(place, torch.float32)
    for call, reason in ((wrong, "gives wrong results"), (crowded, "depends on its company")):
        monkeypatch.setattr(triton_linear.QuantizedLinear, "__call__", call)
        with pytest.raises(RuntimeError, match=reason):
            triton_linear.probe(place, torch.float32)


SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "head_dim": 64,
    "num_key_value_heads": 1, "num_hidden_layers": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
load = partial(load_model, device="cuda", dtype="float32")


@pytest.fixture
def made(tmp_path: Path, monkeypatch) -> Iterator[Any]:
    """Writes a quantised model, and what it means, within a simulated device."""

    def write(family: str, kind: str, **more: Any) -> list[Path]:
        plain = tiny_model(family, tmp_path / "plain", 3, **SIZES, **more)
        quantise(plain, kind, tmp_path / "coded", tmp_path / "dense")
        return [tmp_path / "coded", tmp_path / "dense"]

    with simulated_cuda() as device:
        launch_triton(device, monkeypatch)
        yield write


def test_a_models_weights_stay_packed_and_its_tokens_are_those_of_the_dense_model(
    made, monkeypatch
) -> None:
    """In CUDA graphs, in which rows of prompts stand beside those of answers."""
    monkeypatch.setattr(engines, "paged_model", lambda path, *_: load(path))
    prompts, answers = [[5, 6, 7] * 3, [5, 6, 7] * 2 + [9]], []
    for folder in made("llama", "awq"):
        engine = engines.make_engine(folder, page_size=4, max_num_batched_tokens=8)
        compare_graphs(engine, seen := Counter[str]())
        answers.append(engines.generated(engines.run(engine, prompts, GREEDY)))
        assert seen["mixed in graphs"] and seen["decodes in graphs"]
        layer: Any = engine.model._layers._layers[0]  # type: ignore[attr-defined]
        packed = isinstance(layer.qkv, triton_linear.QuantizedLinear)
        told = "(weights: 4-bit by Triton), attention" in engine.model.placement
        assert packed == told == (folder.name == "coded")
    assert answers[0] == answers[1]


def test_the_start_tells_what_becomes_dense(made, caplog, monkeypatch, tmp_path) -> None:
    folder, _ = made("qwen3_moe", "mlx 8", **EXPERTS)
    told = "(weights: 8-bit by Triton, dense embedding, dense experts), attention"
    assert told in load(folder).placement

    write_model(file := tmp_path / "model.gguf", None, "qwen3", ["Q4_K", "Q6_K", "IQ4_NL"])
    told = "(weights: 4-bit by Triton, 8-bit by Triton, dense embedding), attention"
    assert told in load(file).placement  # whose logits the load has compared

    def probe(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton_linear, "probe", probe)
    told = "(weights: dense, dense embedding, dense experts), attention"
    assert told in load(folder).placement
    assert "run in torch, as dense float32: Triton: no such instruction" in caplog.text
