"""Any causal LM of transformers over KV pages, with transformers' own layers.

There is no modelling code here. transformers calls a registered attention function; ours passes
each layer's query, key and value to the step's `AttentionPlan`, which writes the new K/V into the
pages and attends over them. The rest of the model sees one sequence of all the step's tokens with
explicit positions, and works row by row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

from radixcache.errors import first_sentence
from radixcache.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
    LayerInputs,
    LayerKind,
    PagedBatch,
)
from radixcache.kernels.backend import ImageRows
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.library import quiet_torch
from radixcache.runtime.model.compatibility import (
    AttentionCall,
    check_calls,
    check_config,
    is_recurrent,
    refusal,
)
from radixcache.runtime.model.fallback.patches.mla import AbsorbedProjection
from radixcache.runtime.model.fallback.recurrent import (
    find_states,
    recurrent_step,
    replace_recurrent_layers,
)
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.rope_scaling import fix_frequencies
from radixcache.states.recurrent import SequenceStates

IMPLEMENTATION = "radixcache"
"""The name under which our attention is registered in transformers."""

# The function that serves the attention calls of the forward pass under way. A context variable,
# because keyword arguments of the model's forward do not reach the layers of every model.
_Serve = Callable[
    [AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]
_serve: ContextVar[_Serve] = ContextVar("serve_attention")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in every layer: [1, heads, T, dim] in, [1, T, heads, dim] out."""
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    projection = getattr(module, "kv_b_proj", None)
    absorbed = projection if isinstance(projection, AbsorbedProjection) else None
    if absorbed is not None:  # key and value are the latent and the rotated part of the key
        query = absorbed.to_latent(query)
    call = AttentionCall(
        layer=cast(int, module.layer_idx),
        kind=LayerKind(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=scaling,
            window=sliding_window,
            softcap=softcap,
            mla=absorbed is not None,
        ),
        causal=kwargs.get("is_causal") is not False and bool(getattr(module, "is_causal", True)),
        masked=attention_mask is not None,
    )
    # Fused QKV projections give strided slices.
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    out = _serve.get()(call, flat[0], flat[1], flat[2], s_aux)
    if absorbed is not None:
        out = absorbed.from_latent(out)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)


class TransformersModel(PagedModel):
    """A causal LM of transformers over KV pages."""

    layers_by = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionBackend | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Take over `model`, whose attention is replaced.

        Args:
            max_model_len: the most tokens of a sequence; RoPE's frequencies may depend on it.

        Raises:
            ModelError: it would be wrong over pages.
        """
        self.config, self.device, self._model = model.config, model.device, model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        check_config(model.config)
        limit = fix_frequencies(model, max_model_len)
        if is_recurrent(model.config):
            self._prepare_recurrent()
        calls, vocab_size = self._probe()
        check_calls(model.config, calls)
        self._places = {call.layer: place for place, call in enumerate(sorted(calls))}
        kinds = [call.kind for call in sorted(calls)]
        text = model.config.get_text_config()
        self.hidden_size = getattr(text, "hidden_size", 0)
        generation: Any = model.generation_config  # has what `GenerationDefaults` has
        super().__init__(
            model.config.model_type,
            generation,
            model.dtype,
            model.device,
            kinds,
            vocab_size,
            limit or getattr(text, "max_position_embeddings", None),
            text.eos_token_id,
            attention,
            max_model_len=max_model_len,
        )

    @property
    def max_graph_rows(self) -> int:
        """None for recurrent layers, which run sequence by sequence."""
        return 0 if self.state_shapes else super().max_graph_rows

    def threads(self) -> AbstractContextManager[None]:
        """Recurrent layers are torch operations, which need all threads in a prefill."""
        is_packed = isinstance(self.attention, NativeAttention) and not self.state_shapes
        return quiet_torch() if is_packed else nullcontext()

    def _logits(
        self,
        pool: KVPool,
        plan: AttentionPlan,
        states: Sequence[SequenceStates],
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
    ) -> torch.Tensor:
        assert images is None, "images are for models of the decoder loop"

        def serve(
            call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            sinks: torch.Tensor | None,
        ) -> torch.Tensor:  # fmt: skip
            pages = pool.layers[self._places[call.layer]]
            return plan.run(LayerInputs(query, key, value, pages, call.kind, sinks))

        if pooled is None:
            with _serving(serve):
                return self._run(*plan.arrays)
        kept = list[torch.Tensor]()
        hook = self._model.base_model.register_forward_hook(lambda *given: kept.append(given[2][0]))
        try:
            with _serving(serve):
                logits = self._run(*plan.arrays)
        finally:
            hook.remove()
        count = len(plan.arrays[2]) - len(pooled)
        pooled.copy_(kept[0][0, plan.arrays[2][count:].long()])
        return logits[:count]

    def _prepare_recurrent(self) -> None:
        """Make the recurrent layers run over slots."""
        model_type = self.config.model_type
        try:
            self.state_shapes = find_states(self._model)
            count = replace_recurrent_layers(self._model)
        except Exception as error:  # whatever foreign modelling code raises
            reason = f"a trial run with a cache failed ({first_sentence(error)})"
            raise refusal(model_type, reason) from error
        if count != len({layer for _, layer, _ in self.state_shapes}):
            raise refusal(
                model_type,
                "its recurrent layers keep their states otherwise than in transformers 5.23 and "
                "newer (as Mamba 1 does, and any in older ones)",
            )

    def _step(
        self, batch: PagedBatch, pool: KVPool, states: Sequence[SequenceStates]
    ) -> AbstractContextManager[None]:
        return nullcontext() if pool.states is None else recurrent_step(batch, states, pool.states)

    @torch.inference_mode()
    def stock_logits(self, token_ids: NDArray[np.integer]) -> torch.Tensor:
        """[T, vocab_size] float32 of one whole sequence, with transformers' own attention."""
        self._model.set_attn_implementation("eager")
        try:
            rows = torch.arange(len(token_ids), device=self.device)
            ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(self.device)
            return self._run(ids, rows, rows).float()
        except Exception as error:  # whatever foreign modelling code raises
            reason = f"its own attention does not run ({first_sentence(error)})"
            raise refusal(self.config.model_type, reason) from error
        finally:
            self._model.set_attn_implementation(IMPLEMENTATION)

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        ids, position_ids, keep = (t.long() for t in (token_ids, positions, rows))
        options = {"logits_to_keep": keep} if self._keeps_logits else {}
        out = self._model(
            input_ids=ids[None], position_ids=position_ids[None], use_cache=False, **options
        )
        return out.logits[0] if self._keeps_logits else out.logits[0, keep]

    @torch.inference_mode()
    def _probe(self) -> tuple[list[AttentionCall], int]:
        """The attention calls of a forward pass over two tokens, and the width of its logits."""
        calls: list[AttentionCall] = []

        def serve(
            call: AttentionCall,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *_: Any,
        ) -> torch.Tensor:
            calls.append(call)
            fill = torch.nan if query.isnan().any() else 0.0  # as the attention would give
            return query.new_full((*query.shape[:2], call.kind.out_dim), fill)

        two = torch.arange(2, device=self.device)
        self._model.set_attn_implementation(IMPLEMENTATION)
        if self.config.get_text_config()._attn_implementation != IMPLEMENTATION:
            raise refusal(self.config.model_type, "it does not let its attention be replaced")
        try:
            with _serving(serve):
                logits = self._run(torch.zeros_like(two), two, two)
        except Exception as error:  # whatever foreign modelling code raises
            reason = f"a trial run failed ({first_sentence(error)})"
            raise refusal(self.config.model_type, reason) from error
        if logits.isnan().any():
            raise refusal(self.config.model_type, "its logits are not numbers")
        return calls, logits.shape[1]


@contextmanager
def _serving(serve: _Serve) -> Iterator[None]:
    token = _serve.set(serve)
    try:
        yield
    finally:
        _serve.reset(token)
