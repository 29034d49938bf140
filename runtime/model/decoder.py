"""The decoder loop: the forward pass of some families, operation by operation.

transformers' layers are modules of many small operations, and importing them takes most of a start.
Here is the one loop that Llama, Mistral, Qwen2 and Qwen3 have in common, over the weights of the
checkpoint and a set of `Operations`. It refuses whatever it does not know for sure, and what it
computes is held against `reference` as it is loaded; transformers' layers run in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers.generation.configuration_utils import GenerationConfig

from radixcache.kernels.attention import AttentionBackend, PagedBatch
from radixcache.runtime.model import reference
from radixcache.runtime.model.architecture import Architecture, Unknown
from radixcache.runtime.model.choice import choose_operations
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.operations import Layer, Weight
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.progress import track

_CHECKED_TOKENS = 12
# Root mean square of the logits' error, over that of their spread around the mean.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_ROUNDINGS = 4  # each layer of the loop rounds some ten times; 2 to 3 were seen in deep models


class Decoder(PagedModel):
    """A pre-norm decoder with RMSNorm, RoPE and a gated MLP over KV pages."""

    def __init__(
        self,
        architecture: Architecture,
        generation_config: GenerationConfig,
        weight: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend | None = None,
        exact: bool = False,
    ) -> None:
        """Read the weights, each once and layer by layer, and compare logits with `reference`.

        Args:
            weight: gives the weights of `architecture.shapes()` by their names, as `dtype` on
                `device`.

        Raises:
            Unknown: the logits differ by more than rounding.
        """
        frequencies = architecture.inverse_frequencies.to(device)
        architecture = architecture._replace(inverse_frequencies=frequencies)
        self._architecture = architecture
        kinds, vocab_size = architecture.kinds, architecture.vocab_size
        super().__init__(
            architecture.family,
            generation_config,
            dtype,
            device,
            kinds,
            vocab_size,
            architecture.max_context,
            architecture.eos_token_id,
            attention,
            exact,
        )
        self._operations = choose_operations(architecture, self.attention, dtype, exact)
        self.layers_by = f"radixcache with {self._operations.name}"
        embedding = weight("model.embed_tokens.weight")
        checked = torch.arange(_CHECKED_TOKENS, device=device) * 7919 % vocab_size
        hidden = embedding[checked].float()
        norms = [weight(f"model.layers.{i}.input_layernorm.weight") for i in range(len(kinds))]
        norms.append(weight("model.norm.weight"))
        self._first_norm = norms[0]
        self._layers = []
        for number in track(range(len(kinds)), "reading weights"):
            shapes = architecture.layer_shapes(number)
            weights = {name: weight(f"model.layers.{number}.{name}") for name in shapes}
            hidden = reference.run_layer(architecture, number, hidden, weights)
            self._layers.append(self._layer(number, weights, norms[number + 1]))
        head = embedding if architecture.tied else weight("lm_head.weight")
        hidden = reference.rms_norm(hidden, norms[-1], architecture.eps)
        expected = hidden @ head.float().T
        self._head = self._operations.product((head, None))
        tied = self._head if architecture.tied else None
        self._embed = self._operations.lookup(embedding, tied)
        del embedding, head, weights
        self._operations.loaded()
        self.fills_up = exact and not self._operations.same_alone
        self._check(checked, expected, weight)

    def _layer(
        self, number: int, weights: dict[str, torch.Tensor], norm_after: torch.Tensor
    ) -> Layer:
        def part(name: str) -> Weight:
            return weights[f"{name}_proj.weight"], weights.get(f"{name}_proj.bias")

        product, kind, head_norms = self._operations.product, self._architecture.kinds[number], None
        if "self_attn.q_norm.weight" in weights:
            query, key = (weights[f"self_attn.{name}_norm.weight"] for name in "qk")
            head_norms = torch.stack([query] * kind.query_heads + [key] * kind.kv_heads)
        return Layer(
            kind=kind,
            qkv=product(*(part(f"self_attn.{name}") for name in "qkv")),
            head_norms=head_norms,
            out=product(part("self_attn.o")),
            mlp_norm=weights["post_attention_layernorm.weight"],
            gate_up=self._operations.gate_up(part("mlp.gate"), part("mlp.up")),
            down=product(part("mlp.down")),
            norm_after=norm_after,
        )

    def _logits(
        self,
        pool: KVPool,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        operations = self._operations
        residual = self._embed(token_ids)
        rotation = operations.rotation(positions)
        x = operations.norm(residual, self._first_norm)
        for layer, pages in zip(self._layers, pool.layers, strict=True):
            x = operations.attend(x, rotation, layer, pages)
            if layer is self._layers[-1]:  # all K/V are written: the rest is for the logits alone
                x, residual = x.index_select(0, logit_rows), residual.index_select(0, logit_rows)
                if not len(logit_rows):
                    return x.new_empty(0, self.vocab_size)
            residual, x = operations.project(x, layer.out, residual, layer.mlp_norm)
            mlp = partial(operations.mlp, layer)
            residual, x = operations.project(x, mlp, residual, layer.norm_after)
        return self._head(x)

    def _check(
        self,
        tokens: torch.Tensor,
        expected: torch.Tensor,
        weight: Callable[[str], torch.Tensor],
    ) -> None:
        """Compare the logits of a sequence that comes in chunks, the last of one token."""
        pool, pages = self.allocate(4, 4), np.array([2, 0, 1], np.int32)
        got, done = [], 0
        for count in (len(tokens) - 3, 2, 1):
            done += count
            batch = PagedBatch.of([pages], [count], [done], 4)
            chunk = tokens[done - count : done].cpu().numpy()
            got.append(self.forward(chunk, batch, np.arange(count), pool))
        error = float((torch.cat(got) - expected).std() / expected.std())
        limit = _TOLERANCES[self.dtype]
        if not error <= limit and self.dtype != torch.float32:  # a deep model may round as much
            rounded = reference.rounded_logits(self._architecture, tokens, weight, self.dtype)
            limit = max(limit, _ROUNDINGS * float((rounded - expected).std() / expected.std()))
        if not error <= limit:  # nor if it is NaN
            raise Unknown(f"its logits come out wrong in our loop, by {error:.1%} of their spread")
