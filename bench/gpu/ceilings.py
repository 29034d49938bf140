"""What the device reaches at best, and the least times that follow from it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report, Row, figure


def run(place: Place, report: Report) -> None:
    report.measure("copy", _copy, place)
    report.measure("matrix product", _matmul, place)


def _copy(place: Place) -> Row:
    source = torch.empty(place.sizes.copy_bytes, dtype=torch.uint8, device=place.device)
    source.random_()
    target = torch.empty_like(source)
    rate = 2 * len(source) / place.gpu_seconds([lambda: target.copy_(source)])
    place.ceilings["bytes/s"] = rate
    return figure("device-to-device copy", rate / 1e9, "GB/s", note="bytes read and written")


def _matmul(place: Place) -> Row:
    size = place.sizes.matmul
    a, b = place.randn(size, size), place.randn(size, size)
    out = torch.empty_like(a)
    rate = 2 * size**3 / place.gpu_seconds([lambda: torch.mm(a, b, out=out)] * 3)
    place.ceilings["flop/s"] = rate
    note = f"{place.dtype}, {size} cubed, random data"
    return figure("matrix product", rate / 1e12, "TFLOP/s", note=note)


def floor_seconds(
    place: Place, model: PreTrainedModel, batch: int, new: int, cached: int, token_bytes: int
) -> float:
    """The least time of `batch` sequences with `new` tokens after `cached` ones.

    The longer of reading weights and KV once, and of all operations, at the rates measured here.
    """
    if not {"bytes/s", "flop/s"} <= set(place.ceilings):
        raise NotRun("the ceilings were not measured")
    read = _weight_bytes(model) + batch * (cached + new) * token_bytes
    flops = batch * _flops(model, new, cached)
    return max(read / place.ceilings["bytes/s"], flops / place.ceilings["flop/s"])


def _weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it takes rows."""
    embedding, head = _embeddings(model)
    every = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return every - (0 if embedding is head else embedding.numel() * embedding.element_size())


def _flops(model: PreTrainedModel, new: int, cached: int) -> float:
    """Operations of `new` tokens after `cached` ones, with logits of the last."""
    config = model.config
    ends = {id(weight): weight.numel() for weight in _embeddings(model)}
    layers = sum(w.numel() for w in model.parameters() if w.ndim > 1) - sum(ends.values())
    seen = new * cached + new * (new + 1) / 2
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 2 * layers * new + 2 * _embeddings(model)[1].numel() + 4 * seen * width


def _embeddings(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights at the model's two ends."""
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight
