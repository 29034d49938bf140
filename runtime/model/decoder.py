"""A model of a family that has a description: its weights are read, checked and run by our loop.

transformers' layers are modules of many small operations, and importing them takes most of a start.
The forward pass is one loop over the layers of an `Architecture` (`layer_loop.py`; natively one
call), by the kernels of a `Backend`. Its logits are compared with `reference` at load;
transformers' layers run if they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import ModelError
from radixcache.kernels.attention import AttentionBackend, AttentionPlan, PagedBatch
from radixcache.kernels.backend import ImageRows, Pair
from radixcache.kernels.choose import choose_attention, choose_backend
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.quantized import dense_rows
from radixcache.kernels.spec import Architecture, Unknown, Weight, Weights
from radixcache.runtime.checkpoints.pooling import Pooling
from radixcache.runtime.model import reference
from radixcache.runtime.model.generation import GenerationDefaults
from radixcache.runtime.model.host.system_memory import give_back
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.layer_loop import LayerLoop, layers_of
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.pooler import Pooler, ScoreHead
from radixcache.runtime.model.progress import track
from radixcache.runtime.model.selfcheck import PagedTexts
from radixcache.runtime.model.weights.sources import ModelWeights
from radixcache.states.recurrent import SequenceStates

_CHECKED_TOKENS = 12
_CHECKED_ROWS = 4096
"""Rows of the output layer that are compared at most: all are one product."""

# Root mean square of the logits' error, over that of their spread around the mean.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_ROUNDINGS = 4  # each layer of the loop rounds some ten times; 2 to 3 were seen in deep models


def _check_numbers(weights: Weights, number: int) -> None:
    """Refuse vectors with NaN: one that chooses experts makes no logit NaN. Matrices have too many
    numbers: the check of the logits finds what they spoil."""
    for name, found in weights.items():
        for weight in found if isinstance(found, list) else [found]:
            if isinstance(weight, torch.Tensor) and weight.ndim == 1 and weight.isnan().any():
                raise ModelError(f"{name} of the model's layer {number} has values that are NaN")


class Decoder(PagedModel):
    """A decoder that is described layer by layer, over KV pages."""

    def __init__(
        self,
        architecture: Architecture,
        generation_config: GenerationDefaults,
        weights: ModelWeights,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend | None = None,
        exact: bool = False,
        max_model_len: int | None = None,
        pooling: Pooling = Pooling(),  # noqa: B008 - a constant
    ) -> None:
        """Read the weights, each once and layer by layer, and compare logits with `reference`.

        Args:
            weights: of this architecture, on `device`.
            pooling: what becomes of its rows.

        Raises:
            Unknown: no operations run the architecture, or the logits differ by more than rounding.
            ModelError: a weight is no number.
        """
        ropes = [
            replace(rope, frequencies=rope.frequencies.to(device)) for rope in architecture.ropes
        ]
        self.architecture = architecture = replace(architecture, ropes=tuple(ropes))
        attention = attention or choose_attention(device, dtype, architecture.kinds)
        self._backend = choose_backend(architecture, dtype, device, attention)
        self._layers = layers_of(self._backend)
        self.layers_by = f"radixcache with {self._backend.name}"
        super().__init__(
            architecture.family,
            generation_config,
            dtype,
            device,
            architecture.kinds,
            architecture.vocab_size,
            architecture.max_context,
            architecture.eos_token_id,
            attention,
            exact,
            max_model_len,
        )
        self.state_shapes, self.hidden_size = architecture.state_shapes, architecture.hidden_size
        self.rope_axes = any(rope.axes for rope in architecture.ropes)
        self.both_ways = any(kind.both_ways for kind in architecture.kinds)
        self.plans_slots = architecture.is_recurrent and isinstance(self._layers, LayerLoop)
        embedding, head, per_layer = weights.embedding(), weights.head(), weights.per_layer()
        tokens = torch.arange(_CHECKED_TOKENS, device=device) * 7919 % self.vocab_size
        step = -(-self.vocab_size // _CHECKED_ROWS)
        checked = torch.arange(0, self.vocab_size, step, device=device)
        hidden, shared = reference.embed(architecture, tokens, embedding, per_layer)
        rows = dense_rows(embedding if head is None else head, checked)
        self.pooler = Pooler(pooling, self._score_head(pooling, weights, embedding, head))
        self._layers.embedding(embedding, head)
        if per_layer:
            self._layers.per_layer(per_layer)
        del embedding, head, per_layer
        for number in track(range(len(architecture.layers)), "reading weights"):
            layer = weights.layer(number)
            _check_numbers(layer, number)
            hidden = reference.run_layer(architecture, number, hidden, layer, shared)
            self._layers.layer(number, layer)
            give_back()
        last_norm = weights.last_norm()
        expected = reference.logits(architecture, hidden, last_norm, rows)
        self._layers.loaded(last_norm)
        if self._backend.weights_by:
            self.layers_by += f" (weights: {', '.join(sorted(self._backend.weights_by))})"
        self.rounds, self.multi_step = self._layers.rounds, self._layers.multi_step
        self._check(tokens, checked, expected, weights)

    def _score_head(
        self, pooling: Pooling, weights: ModelWeights, embedding: Weight, head: Weight | None
    ) -> ScoreHead | None:
        found = weights.score_head()
        if (found is not None) != pooling.has_head:
            raise Unknown(f"it has {'no' if found is None else 'a'} classification head")
        if found is not None:
            return ScoreHead(found.cpu().numpy())
        if pooling.judges is None:
            return None
        if max(pooling.judges) >= self.vocab_size:
            raise ModelError(f"the model has no tokens {list(pooling.judges)}, which its score is")
        numbers = torch.tensor(pooling.judges, device=self.device)
        rows = dense_rows(embedding if head is None else head, numbers).cpu().numpy()
        return ScoreHead(rows, self.architecture.logit_scale, self.architecture.logit_softcap)

    def threads(self) -> AbstractContextManager[None]:
        return self._backend.threads()

    def _logits(
        self,
        pool: KVPool,
        plan: AttentionPlan,
        states: Sequence[SequenceStates],
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
    ) -> torch.Tensor:
        return self._layers.run(pool, plan, states, pooled, images)

    @torch.inference_mode()
    def decode(
        self,
        token_ids: NDArray[np.integer],
        batch: PagedBatch,
        positions: NDArray[np.integer],
        pool: KVPool,
        how: MultiStep,
    ) -> Pair:
        return self._layers.decode(pool, self.attention.plan(batch, token_ids, positions), how)

    def _check(
        self,
        tokens: torch.Tensor,
        checked: torch.Tensor,
        expected: torch.Tensor,
        weights: ModelWeights,
    ) -> None:
        """Compare the logits of a sequence in chunks, the last of one token, at the `checked`
        places of the vocabulary."""
        text = PagedTexts(self, [tokens.tolist()], 4)
        got = [text.run({0: count})[:, checked] for count in (len(tokens) - 3, 2, 1)]
        wrong = torch.cat(got) - expected
        error = float(wrong.std() / expected.std())
        experts = any(layer.experts for layer in self.architecture.layers)
        if experts and self.dtype != torch.float32:
            # Nearly tied experts may change places, and give some tokens another MLP.
            by_token = wrong.std(1) / expected.std()
            error = float(torch.stack([by_token[:-3].median(), by_token[-3:].median()]).max())
        limit = _TOLERANCES[self.dtype]
        if not error <= limit and self.dtype != torch.float32:  # a deep model may round as much
            rounded = reference.rounded_logits(
                self.architecture, tokens, weights, self.dtype, checked
            )
            limit = max(limit, _ROUNDINGS * float((rounded - expected).std() / expected.std()))
        if not error <= limit:  # nor if it is NaN
            fault = f"come out wrong in our loop, by {error:.1%} of their spread"
            raise Unknown(f"its logits {fault if error == error else 'are not numbers'}")
