"""The gate: which models may run over KV pages, and why the others may not.

Many models would load, run and be silently wrong over pages. Three checks stand before them, each
a `ModelError` of one sentence: what the config says (`check_config`), what the attention calls of a
probe look like (`check_calls`), and, for model types that nobody has verified yet, whether the
logits over pages equal those of the stock implementation (`check_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig

from radixcache.errors import ModelError
from radixcache.kernels.attention import LayerKind, PagedBatch

if TYPE_CHECKING:
    from radixcache.runtime.model import PagedModel

# Compared with the plain forward by this project's tests; `check_logits` is skipped for them.
VERIFIED = frozenset({"gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"})

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class AttentionCall(NamedTuple):
    """One call of the attention function during the probe."""

    layer: int
    kind: LayerKind
    causal: bool
    masked: bool
    sinks: bool


def refusal(config: PreTrainedConfig, reason: str) -> ModelError:
    """The error that says why this model type is refused."""
    return ModelError(f"model type {config.model_type!r} cannot run over KV pages: {reason}")


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the config already gives away.

    Raises:
        ModelError: encoder-decoder, layer types other than full and sliding attention, or RoPE
            frequencies that change with the longest position of a batch.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise refusal(config, "it is an encoder-decoder")
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        names = ", ".join(sorted(unknown))
        raise refusal(config, f"it has layers of type {names}, not only full and sliding attention")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one set, or one for each layer type
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if kind in _BATCH_DEPENDENT_ROPE:
            raise refusal(
                config, f"its {kind} RoPE rotates a key by the longest position of its batch"
            )


def check_calls(config: PreTrainedConfig, calls: Sequence[AttentionCall]) -> None:
    """Refuse a model whose attention is not one causal call of a known kind in every layer.

    Raises:
        ModelError: layers without attention or with two calls, masks of the model's own, attention
            sinks, bidirectional attention, or a window that is only in the config.
    """
    text = config.get_text_config()
    layers = [call.layer for call in calls]
    if len(set(layers)) < len(layers):
        raise refusal(config, "it calls attention more than once in a layer")
    if sorted(layers) != list(range(text.num_hidden_layers)):
        raise refusal(
            config,
            f"its config names {text.num_hidden_layers} layers, "
            f"but attention runs in {len(layers)}",
        )
    if not all(call.causal for call in calls):
        raise refusal(config, "its attention is bidirectional")
    if any(call.masked for call in calls):
        raise refusal(config, "it builds attention masks of its own")
    if any(call.sinks for call in calls):
        raise refusal(config, "it has attention sinks")
    windows = {call.layer: call.kind.window for call in calls}
    types = getattr(text, "layer_types", None) or ()
    for layer, kind in enumerate(types[: len(calls)]):
        if (kind == "sliding_attention") != (windows[layer] is not None):
            raise refusal(config, f"layer {layer} is of type {kind}, window {windows[layer]}")
    expected = getattr(text, "sliding_window", None)
    windowed = bool(types) or any(windows.values())  # layer types were checked above
    if expected and getattr(text, "use_sliding_window", True) and not windowed:
        raise refusal(config, f"its window of {expected} never reaches the attention function")


def check_logits(model: PagedModel) -> None:
    """Refuse a model whose logits over pages differ from those of the stock attention.

    Two short random sequences run in chunks, together and alone, then token by token.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    page_size, lens = 4, (min(48, model.max_context), min(30, model.max_context))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, length) for length in lens]
    pages = np.array_split(rng.permutation(24).astype(np.int32), [14])
    pool = model.allocate(24, page_size)
    expected = [model.stock_logits(tokens) for tokens in sequences]
    done, worst = [0, 0], 0.0
    for step in ((17, 0), (21, 11), (0, 12), (1, 1), (1, 1), (64, 64)):  # 64: whatever is left
        ends = [min(d + n, length) for d, n, length in zip(done, step, lens, strict=True)]
        runs = [i for i in (0, 1) if ends[i] > done[i]]
        if not runs:
            continue
        counts = [ends[i] - done[i] for i in runs]
        tables = [pages[i][: -(-ends[i] // page_size)] for i in runs]
        batch = PagedBatch(
            qo_indptr=np.cumsum([0, *counts], dtype=np.int32),
            kv_indptr=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            kv_indices=np.concatenate(tables),
            kv_last_page_len=np.array([(ends[i] - 1) % page_size + 1 for i in runs], np.int32),
            page_size=page_size,
        )
        tokens = np.concatenate([sequences[i][done[i] : ends[i]] for i in runs])
        got = model.forward(tokens, batch, np.arange(len(tokens)), pool)
        wanted = torch.cat([expected[i][done[i] : ends[i]] for i in runs])
        spread = wanted.max() - wanted.min()
        worst = max(worst, float(((got - wanted).abs().max() / spread).nan_to_num(torch.inf)))
        done = ends
    limit = 1e-3 if model.dtype == torch.float32 else 5e-2
    if worst > limit:
        raise refusal(
            model.config, f"its logits come out wrong there (by {worst:.1%} of their range)"
        )
