"""The least time that the hardware allows: bytes over bandwidth, operations over matmul rate."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but the embedding, of which it takes rows."""
    embedding, head = _embeddings(model)
    every = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return every - (0 if embedding is head else embedding.numel() * embedding.element_size())


def flops(model: PreTrainedModel, new: int, cached: int, logits: int = 1) -> float:
    """Operations of `new` tokens after `cached` ones, with logits of the last `logits`."""
    config = model.config
    ends = {id(weight): weight.numel() for weight in _embeddings(model)}
    layers = sum(w.numel() for w in model.parameters() if w.ndim > 1) - sum(ends.values())
    head = _embeddings(model)[1].numel()
    seen = new * cached + new * (new + 1) / 2
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 2 * layers * new + 2 * head * logits + 4 * seen * width


def floor_seconds(place: Place, num_bytes: float, num_flops: float) -> float:
    """The longer of the two times, by the rates that were measured here."""
    if not {"bytes/s", "flop/s"} <= set(place.ceilings):
        raise NotRun("the ceilings were not measured")
    return max(num_bytes / place.ceilings["bytes/s"], num_flops / place.ceilings["flop/s"])


def _embeddings(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights at the model's two ends."""
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight
