"""The decoder loop: the forward pass of some families, operation by operation.

transformers' layers are modules of many small operations, and importing them takes most of a start.
This is the loop that Llama, Mistral, Qwen2 and Qwen3 share, over the checkpoint's weights and a set
of `Operations`. It refuses what it does not know for sure, and its logits are compared with
`reference` at load; transformers' layers run if either fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from transformers.generation.configuration_utils import GenerationConfig

from radixcache.kernels.attention import AttentionBackend, AttentionPlan, PagedBatch
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.native.library import quiet_torch
from radixcache.kernels.quantized import Quantized
from radixcache.runtime.model import old_reference as reference
from radixcache.runtime.model.architecture import Architecture, Unknown
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.operations.base import Layer, Loaded, Weight
from radixcache.runtime.model.operations.selector import choose_operations
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
        weight: Callable[[str], torch.Tensor | Quantized],
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend | None = None,
        exact: bool = False,
    ) -> None:
        """Read the weights, each once and layer by layer, and compare logits with `reference`.

        Args:
            weight: gives the weights of `architecture.shapes()` by their names, on `device`: as
                `dtype`, or those of two dimensions in fewer bits, where they are stored so.

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
        self._operations = choose_operations(architecture, self.attention, dtype)
        self.layers_by = f"radixcache with {self._operations.name}"

        def norm_weight(name: str) -> torch.Tensor:
            found = weight(name)
            assert isinstance(found, torch.Tensor)
            return found

        embedding = weight("model.embed_tokens.weight")
        checked = torch.arange(_CHECKED_TOKENS, device=device) * 7919 % vocab_size
        hidden = reference.rows(embedding, checked)
        count = len(kinds)
        norms = [norm_weight(f"model.layers.{i}.input_layernorm.weight") for i in range(count)]
        norms.append(norm_weight("model.norm.weight"))
        layers = []
        for number in track(range(count), "reading weights"):
            shapes = architecture.layer_shapes(number)
            weights = {name: weight(f"model.layers.{number}.{name}") for name in shapes}
            hidden = reference.run_layer(architecture, number, hidden, weights)
            layers.append(self._layer(number, weights, norms[number + 1]))
        head = None if architecture.tied else weight("lm_head.weight")
        hidden = reference.rms_norm(hidden, norms[-1], architecture.eps)
        expected = reference.product(hidden, embedding if head is None else head)
        table, output = self._operations.embedding(embedding, head)
        del embedding, head, weights
        self._operations.loaded(Loaded(table, norms[0], layers, output))
        self._check(checked, expected, weight)

    def _layer(
        self,
        number: int,
        weights: Mapping[str, torch.Tensor | Quantized],
        norm_after: torch.Tensor,
    ) -> Layer:
        def part(name: str) -> Weight:
            return weights[f"{name}_proj.weight"], norm(f"{name}_proj.bias")

        def norm(name: str) -> torch.Tensor | None:
            found = weights.get(name)
            assert not isinstance(found, Quantized)
            return found

        operations, mlp_norm = self._operations, norm("post_attention_layernorm.weight")
        assert mlp_norm is not None
        return Layer(
            kind=self._architecture.kinds[number],
            qkv=operations.qkv(*(part(f"self_attn.{name}") for name in "qkv")),
            query_norm=norm("self_attn.q_norm.weight"),
            key_norm=norm("self_attn.k_norm.weight"),
            out=operations.product(part("self_attn.o")),
            mlp_norm=mlp_norm,
            gate_up=operations.gate_up(part("mlp.gate"), part("mlp.up")),
            down=operations.product(part("mlp.down")),
            norm_after=norm_after,
        )

    def threads(self) -> AbstractContextManager[None]:
        return quiet_torch() if isinstance(self.attention, NativeBackend) else nullcontext()

    def _logits(self, pool: KVPool, plan: AttentionPlan) -> torch.Tensor:
        return self._operations.run(pool, plan)

    def _check(
        self,
        tokens: torch.Tensor,
        expected: torch.Tensor,
        weight: Callable[[str], torch.Tensor | Quantized],
    ) -> None:
        """Compare the logits of a sequence in chunks, the last of one token."""
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
