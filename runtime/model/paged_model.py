"""Models: any causal LM of transformers, run one flat step at a time over KV pages.

There is no modelling code here. transformers lets a model's attention be replaced by a registered
function; ours hands each layer's query, key and value to an `AttentionBackend`, which writes the
new K/V into the pages and attends over them. The rest of the model sees one sequence of all the
step's tokens with explicit positions, and works row by row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, PreTrainedModel

from radixcache.errors import first_sentence
from radixcache.kernels.attention import AttentionBackend, LayerKind, PagedBatch
from radixcache.kernels.choice import choose_backend
from radixcache.runtime.model import gate
from radixcache.runtime.model.gate import AttentionCall
from radixcache.runtime.model.kv_pool import KVPool, LayerShape, bytes_per_token

_NAME = "radixcache"

# The function that serves the attention calls of the forward pass under way. A context variable,
# because keyword arguments of the model's forward do not reach the layers of every model.
_Serve = Callable[[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
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
    """What transformers calls in every layer: [1, heads, T, dim] in, [1, T, heads, dim] out."""
    call = AttentionCall(
        layer=cast(int, module.layer_idx),
        kind=LayerKind(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
        ),
        causal=kwargs.get("is_causal") is not False and bool(getattr(module, "is_causal", True)),
        masked=attention_mask is not None,
        sinks=s_aux is not None,
    )
    # Fused QKV projections give strided slices.
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    return _serve.get()(call, flat[0], flat[1], flat[2])[None], None


AttentionInterface.register(_NAME, _attention)


class PagedModel:
    """A causal LM over KV pages.

    Attributes:
        config, generation_config: transformers' configs.
        attention: the backend that this model plans and runs: FlashInfer on a GPU where it works.
        dtype, device: of the weights and of the KV pages.
        shapes: what a token keeps in each layer, for `KVPool`.
        vocab_size: width of the logits.
        max_context: the most tokens that a sequence may have.
        eos_token_ids: the tokens that end a text, by the model's generation config.
    """

    def __init__(self, model: PreTrainedModel, attention: AttentionBackend | None = None) -> None:
        """Take over `model`, whose attention is replaced.

        Raises:
            ModelError: it would be wrong over pages.
        """
        self.config, self.generation_config = model.config, model.generation_config
        self.dtype, self.device = model.dtype, model.device
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        gate.check_config(self.config)
        calls, self.vocab_size = self._probe()
        gate.check_calls(self.config, calls)
        kinds = [call.kind for call in sorted(calls)]
        self.shapes = [LayerShape(k.kv_heads, k.head_dim, k.value_dim) for k in kinds]
        self.attention = attention or choose_backend(self.device, self.dtype, kinds)
        text = self.config.get_text_config()
        self.max_context: int = getattr(text, "max_position_embeddings", None) or 1 << 30
        eos = getattr(self.generation_config, "eos_token_id", None)
        eos = text.eos_token_id if eos is None else eos
        self.eos_token_ids: list[int] = [eos] if isinstance(eos, int) else list(eos or ())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token keeps in all layers."""
        return bytes_per_token(self.shapes, self.dtype)

    @property
    def placement(self) -> str:
        """Where and with what the model runs, in one line."""
        place = str(self.device)
        if self.device.type == "cuda":
            place += f" ({torch.cuda.get_device_name(self.device)})"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.config.model_type} in {dtype} on {place}, attention by {self.attention.name}"

    def allocate(self, num_pages: int, page_size: int) -> KVPool:
        """A pool of KV pages for this model."""
        return KVPool(self.shapes, num_pages, page_size, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: NDArray[np.integer] | torch.Tensor,
        batch: PagedBatch,
        logit_rows: NDArray[np.integer],
        pool: KVPool,
    ) -> torch.Tensor:
        """Run one step: write the new tokens' KV into `pool` and return logits.

        Args:
            token_ids: [T] the new tokens, in the order of `batch`; a tensor is on the device.
            batch: the step's page tables.
            logit_rows: [R] rows of the flat batch whose logits are wanted; may be empty.
            pool: the pages that `batch` numbers.

        Returns:
            [R, vocab_size] float32, on the model's device.
        """
        on_host = token_ids if isinstance(token_ids, np.ndarray) else np.arange(0)
        ids, positions, rows = self.attention.plan(batch, on_host, batch.positions(), logit_rows)
        ids = token_ids if isinstance(token_ids, torch.Tensor) else ids
        return self.compute(pool, ids, positions, rows)

    @torch.inference_mode()
    def compute(
        self,
        pool: KVPool,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` once the step is planned and its inputs are on the device; into `out`."""

        def serve(
            call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            return self.attention.run(
                query,
                key,
                value,
                *pool.layers[call.layer],
                scale=call.kind.scale,
                window=call.kind.window,
                softcap=call.kind.softcap,
            )

        with _serving(serve):
            logits = self._logits(token_ids, positions, logit_rows)
        return logits.float() if out is None else out.copy_(logits)

    @torch.inference_mode()
    def stock_logits(self, token_ids: NDArray[np.integer]) -> torch.Tensor:
        """[T, vocab_size] float32 of one whole sequence, with transformers' own attention."""
        self._model.set_attn_implementation("eager")
        try:
            rows = torch.arange(len(token_ids), device=self.device)
            ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(self.device)
            return self._logits(ids, rows, rows).float()
        finally:
            self._model.set_attn_implementation(_NAME)

    def _logits(
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
            call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            calls.append(call)
            return query.new_zeros(*query.shape[:2], value.shape[2])

        two = torch.arange(2, device=self.device)
        self._model.set_attn_implementation(_NAME)
        if self.config.get_text_config()._attn_implementation != _NAME:
            raise gate.refusal(self.config, "it does not let its attention be replaced")
        try:
            with _serving(serve):
                logits = self._logits(torch.zeros_like(two), two, two)
        except Exception as error:  # whatever foreign modelling code raises
            reason = f"a trial run failed ({first_sentence(error)})"
            raise gate.refusal(self.config, reason) from error
        return calls, logits.shape[1]


@contextmanager
def _serving(serve: _Serve) -> Iterator[None]:
    token = _serve.set(serve)
    try:
        yield
    finally:
        _serve.reset(token)
