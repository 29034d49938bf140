"""The decoder loop: the forward pass of every family that has a description.

transformers' layers are modules of many small operations, and importing them takes most of a start.
This is one loop over the layers of an `Architecture`, with a set of `Operations`. Its logits are
compared with `reference` at load; transformers' layers run if they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from radixcache.errors import ModelError
from radixcache.kernels.attention import AttentionBackend, AttentionPlan, PagedBatch
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.native.library import quiet_torch
from radixcache.runtime.model import reference
from radixcache.runtime.model.description import Architecture, Experts, Unknown, Weights
from radixcache.runtime.model.generation import GenerationDefaults
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.operations.selector import choose_operations
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import track
from radixcache.runtime.model.system_memory import give_back
from radixcache.runtime.model.weights import ModelWeights
from radixcache.states import SequenceStates

_CHECKED_TOKENS = 12
_CHECKED_ROWS = 4096
"""Rows of the output layer that are compared at most: all are one product."""

# Root mean square of the logits' error, over that of their spread around the mean.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_ROUNDINGS = 4  # each layer of the loop rounds some ten times; 2 to 3 were seen in deep models


def _check_numbers(weights: Weights, number: int) -> None:
    """Refuse vectors with NaN: one that chooses experts makes no logit NaN. Matrices have too many
    numbers; what comes of theirs is seen in the logits of a step."""
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
    ) -> None:
        """Read the weights, each once and layer by layer, and compare logits with `reference`.

        Args:
            weights: of this architecture, on `device`.

        Raises:
            Unknown: no operations run the architecture, or the logits differ by more than rounding.
            ModelError: a weight is no number.
        """
        ropes = [
            replace(rope, frequencies=rope.frequencies.to(device)) for rope in architecture.ropes
        ]
        self.architecture = architecture = replace(architecture, ropes=tuple(ropes))
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
        )
        self.state_shapes = architecture.state_shapes
        self.plans_slots = architecture.is_recurrent and not isinstance(
            self.attention, NativeBackend
        )
        self._operations = choose_operations(architecture, self.attention, dtype, device)
        self.layers_by = f"radixcache with {self._operations.name}"
        embedding, head = weights.embedding(), weights.head()
        tokens = torch.arange(_CHECKED_TOKENS, device=device) * 7919 % self.vocab_size
        step = -(-self.vocab_size // _CHECKED_ROWS)
        checked = torch.arange(0, self.vocab_size, step, device=device)
        hidden = reference.embed(architecture, tokens, embedding)
        rows = reference.dense_rows(embedding if head is None else head, checked)
        self._operations.embedding(embedding, head)
        del embedding, head
        for number in track(range(len(architecture.layers)), "reading weights"):
            layer = weights.layer(number)
            _check_numbers(layer, number)
            hidden = reference.run_layer(architecture, number, hidden, layer)
            self._operations.layer(number, layer)
            give_back()
        last_norm = weights.last_norm()
        expected = reference.logits(architecture, hidden, last_norm, rows)
        self._operations.loaded(last_norm)
        self.rounds = self._operations.rounds
        self._check(tokens, checked, expected, weights)

    def threads(self) -> AbstractContextManager[None]:
        return quiet_torch() if isinstance(self.attention, NativeBackend) else nullcontext()

    def _logits(
        self, pool: KVPool, plan: AttentionPlan, states: Sequence[SequenceStates]
    ) -> torch.Tensor:
        return self._operations.run(pool, plan, states)

    def _check(
        self,
        tokens: torch.Tensor,
        checked: torch.Tensor,
        expected: torch.Tensor,
        weights: ModelWeights,
    ) -> None:
        """Compare the logits of a sequence in chunks, the last of one token, at the `checked`
        places of the vocabulary."""
        pool, pages = self.allocate(4, 4, 2), np.array([2, 0, 1], np.int32)
        got, done = list[torch.Tensor](), 0
        for count in (len(tokens) - 3, 2, 1):
            slot = len(got) % 2
            states = [SequenceStates(1 - slot if done else -1, slot)] if self.state_shapes else []
            done += count
            batch = PagedBatch.of([pages], [count], [done], 4)
            chunk = tokens[done - count : done].cpu().numpy()
            found = self.forward(chunk, batch, np.arange(count), pool, states)
            got.append(found[:, checked])
        wrong = torch.cat(got) - expected
        error = float(wrong.std() / expected.std())
        experts = any(isinstance(layer.mlp, Experts) for layer in self.architecture.layers)
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
