"""Logits over pages, by transformers alone, and by the plain pass over a description."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.spec import ATTENDS, Architecture
from radixcache.runtime.model import reference
from radixcache.runtime.model.checkpoint import open_checkpoint
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.weights.sources import SafetensorsSource
from radixcache.states.recurrent import SequenceStates
from tests.helpers.models import VOCAB_SIZE, auto_class

LENS = (70, 33, 50)

# New tokens of each sequence in each step: fresh, suffix, chunked, decode and mixed batches.
STEPS = (
    [(31, 0, 0), (1, 0, 0), (1, 17, 0), (20, 0, 5), (1, 1, 1), (1, 1, 1), (5, 14, 43), (10, 0, 0)],
    [(70, 33, 50)],
    [(16, 16, 16), (16, 16, 16), (16, 1, 1), (1, 0, 1), (21, 0, 16)],
)


def plain_logits(folder: Path, sequences: list[np.ndarray]) -> list[torch.Tensor]:
    """Logits of every token with transformers alone, one sequence at a time."""
    kind = auto_class(AutoConfig.from_pretrained(folder).model_type)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return [model(torch.tensor(tokens)[None]).logits[0] for tokens in sequences]


def run_steps(
    model: PagedModel,
    sequences: list[np.ndarray],
    steps: Sequence[tuple[int, ...]],
    page_size: int,
    damage: bool = False,
) -> list[torch.Tensor]:
    """Logits of every token, computed step by step over shuffled pages.

    With `damage`, sequence 0 finds another's page as its latest one after every step.
    """
    rng = np.random.default_rng(1)
    counts = [-(-len(tokens) // page_size) for tokens in sequences]
    shuffled = rng.permutation(sum(counts)).astype(np.int32)
    tables = np.split(shuffled, np.cumsum(counts)[:-1])
    pool = model.allocate(sum(counts), page_size, len(sequences))
    for layer in pool.layers:
        for tensor in layer:
            tensor.fill_(torch.nan)
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        runs = [i for i, count in enumerate(step) if count]
        ends = {i: done[i] + step[i] for i in runs}
        used = [tables[i][: -(-ends[i] // page_size)] for i in runs]
        batch = PagedBatch(
            qo_indptr=np.cumsum([0, *(step[i] for i in runs)], dtype=np.int32),
            kv_indptr=np.cumsum([0, *map(len, used)], dtype=np.int32),
            kv_indices=np.concatenate(used),
            kv_last_page_len=np.array([(ends[i] - 1) % page_size + 1 for i in runs], np.int32),
            page_size=page_size,
        )
        tokens = np.concatenate([sequences[i][done[i] : ends[i]] for i in runs])
        states = [SequenceStates(i if done[i] else -1, i) for i in runs if model.state_shapes]
        flat = model.forward(tokens, batch, np.arange(len(tokens)), pool, states)
        for i, rows in zip(runs, flat.split([step[i] for i in runs]), strict=True):
            logits[i].append(rows)
            done[i] = ends[i]
        if damage and done[0] < len(sequences[0]):
            tables[0][(done[0] - 1) // page_size] = tables[1][0]
    assert done == [len(tokens) for tokens in sequences]
    return [torch.cat(rows) for rows in logits]


def relative_error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest logit; NaN counts as infinite."""
    scale = max(float(rows.abs().max()) for rows in wanted)
    difference = (torch.cat(got) - torch.cat(wanted)).abs().max()
    return float(difference.nan_to_num(torch.inf)) / scale


def random_sequences(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length) for length in LENS]


LOOPED = ["llama", "mistral", "qwen2", "qwen3"]

LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


def assert_right(folder: Path, step: int = 0) -> None:
    sequences = random_sequences()
    with _disable_current_modes():
        plain = plain_logits(folder, sequences)
    model = load_model(folder, device="cuda", dtype="float32")
    assert "layers by radixcache with FlashInfer" in model.placement
    got = [rows.cpu() for rows in run_steps(model, sequences, STEPS[step], 4)]
    assert relative_error(got, plain) < 1e-4


TOKENS = torch.tensor(np.random.default_rng(0).integers(0, 256, 60))
"""More than a window, and than RoPE was scaled from."""


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = PreTrainedConfig.get_config_dict(folder)[0]
    return found


@contextmanager
def read(
    folder: Path, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Architecture, SafetensorsSource]]:
    architecture = describe(settings_of(folder))
    with open_checkpoint(folder, torch.device("cpu"), dtype) as checkpoint:
        yield architecture, SafetensorsSource(checkpoint, architecture)


@torch.inference_mode()
def logits_by_reference(
    folder: Path,
    described: Architecture | None = None,
    fault: Any = None,
    tokens: torch.Tensor = TOKENS,
) -> torch.Tensor:
    """[T, vocab_size], by what is described and read, or by what is wrong in it."""
    with read(folder) as (right, weights):
        architecture = described or right
        per_layer = weights.per_layer()
        if fault is not None:
            fault(per_layer, None, 0)
        hidden, shared = reference.embed(architecture, tokens, weights.embedding(), per_layer)
        for number, layer in enumerate(architecture.layers):
            found, attention = weights.layer(number), None
            if isinstance(layer.mixer, ATTENDS):
                attention = layer.mixer
            if fault is not None:
                rope = None if attention is None else attention.rope
                turned = 0 if rope is None else 2 * len(architecture.ropes[rope].frequencies)
                fault(found, attention, turned)
            hidden = reference.run_layer(architecture, number, hidden, found, shared)
        head = weights.embedding() if architecture.tied else weights.head()
        assert head is not None
        return reference.logits(architecture, hidden, weights.last_norm(), head)
