"""Implements `kv_cache_dtype`: KV in another dtype than the model's, checked at load."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from safetensors import safe_open

from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels.choose import choose_attention
from radixcache.kernels.kv_format import BLOCK, FP8
from radixcache.runtime.model.checkpoint import checkpoint_files
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import report
from radixcache.runtime.model.selfcheck import PagedTexts

_log = logging.getLogger("radixcache")

KV_DTYPES = {n: getattr(torch, n) for n in ("float16", "bfloat16", "int8")} | {"fp8": FP8}

MOST_KL = 0.05
"""Mean Kullback-Leibler divergence of the logits, in nats, beyond which a dtype is refused. In
SmolLM2 int8 has 4e-4 and e4m3 9e-3; with 4e-2 (e5m2) every eleventh likeliest token is another one,
and 0.11 (4 bits) ruins it."""

_TOKENS = 48
_PAGE_SIZE = 16


def check_kv_dtype(name: str, device: torch.device, exact: bool) -> None:
    """Refuse a `kv_cache_dtype` that works for no model.

    Raises:
        InvalidRequest: it is unknown, or not available on this device or in exact mode.
    """
    if name not in ("auto", *KV_DTYPES):
        raise InvalidRequest(f"unknown kv_cache_dtype {name!r}: say auto, {', '.join(KV_DTYPES)}")
    if name == "fp8" and exact:
        raise InvalidRequest("exact mode takes every kv_cache_dtype but fp8: say int8")
    if name == "fp8" and device.type != "cuda":
        raise InvalidRequest(
            f"kv_cache_dtype='fp8' needs FlashInfer on an NVIDIA GPU, not {device}: say int8"
        )


def store_kv(model: PagedModel, name: str, name_or_path: str | Path) -> None:
    """Let a loaded model keep its KV in `kv_cache_dtype`, if its logits stay close.

    Raises:
        InvalidRequest: the model's layers do not support that dtype.
        ModelError: its logits change too much, or its scales of fp8 are invalid.
    """
    dtype = KV_DTYPES.get(name, model.dtype)
    if dtype == model.dtype:
        return
    odd = [dim for kind in model.kinds for dim in (kind.head_dim, kind.value_dim) if dim % BLOCK]
    for is_wrong, why in (
        (any(kind.mla for kind in model.kinds), "is not for the latents of MLA"),
        (dtype == torch.int8 and odd, f"is for heads of multiples of {BLOCK}, not of {odd[:1]}"),
        (dtype.itemsize == 2 and model.dtype != torch.float32, "is for a model in float32"),
    ):
        if is_wrong:
            raise InvalidRequest(f"kv_cache_dtype={name!r} {why}: say auto")
    report("comparing logits")
    tokens, plain = _own_text(model)
    if dtype not in model.attention.kv_dtypes:
        model.attention = choose_attention(model.device, model.dtype, model.kinds, dtype)
    scales = _scales(name_or_path, len(model.kinds)) if dtype == FP8 else ()
    model.store_kv(dtype, name, scales)
    stored = PagedTexts(model, [tokens], _PAGE_SIZE).run({0: len(tokens)}).log_softmax(-1)
    kl = float((plain.exp() * (plain - stored)).sum(-1).mean())
    if not kl <= MOST_KL:  # nor if it is NaN
        raise ModelError(
            f"this model does not bear kv_cache_dtype={name!r}: its logits change by {kl:.2g} nats "
            f"({MOST_KL} at most); say auto"
        )
    _log.info("KV in %s changes the logits by %.1e nats", name, kl)


@torch.inference_mode()
def _own_text(model: PagedModel) -> tuple[list[int], torch.Tensor]:
    """Tokens drawn from the model, with the log-probabilities [T, vocab_size] after each; random
    tokens would change the logits up to ten times as much as text."""
    count, generator = min(_TOKENS, model.max_context), torch.Generator().manual_seed(0)
    text, rows = PagedTexts(model, [[0] * count], _PAGE_SIZE), list[torch.Tensor]()
    token = (model.eos_token_ids or [0])[0]
    for at in range(count):
        text.tokens[0][at] = token
        rows.append(text.run({0: 1}).log_softmax(-1))
        if rows[-1].isnan().any():
            raise ModelError("the model's logits are not numbers: a weight is not")
        token = int(torch.multinomial(rows[-1][0].exp().cpu(), 1, generator=generator))
    return text.tokens[0].tolist(), torch.cat(rows)


def _scales(name_or_path: str | Path, layers: int) -> list[tuple[float, float]]:
    """The checkpoint's scales of each layer's keys and values; 1 where it has none."""
    found: dict[tuple[int, str], float] = {}
    for path in checkpoint_files(str(name_or_path)):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                if match := re.search(r"\blayers\.(\d+)\..*\b([kv])_scale$", name):
                    scale = file.get_tensor(name).float()
                    if scale.numel() != 1 or not 0 < scale.item() < torch.inf:
                        raise ModelError(f"the scale {name} of fp8 is not one number above 0")
                    found[int(match[1]), match[2]] = scale.item()
    numbers = sorted({number for number, _ in found}) or [*range(layers)]
    if len(numbers) != layers:
        raise ModelError(f"the scales of fp8 are of {len(numbers)} layers, and {layers} attend")
    return [(found.get((n, "k"), 1.0), found.get((n, "v"), 1.0)) for n in numbers]
