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
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels.attention import AttentionBackend, LayerKind, PagedBatch
from radixcache.kernels.choice import choose_backend
from radixcache.runtime import conformance
from radixcache.runtime.conformance import AttentionCall
from radixcache.runtime.kv_pool import KVPool, LayerShape, bytes_per_token
from radixcache.runtime.packed_linear import pack_linears

_NAME = "radixcache"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

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
        conformance.check_config(self.config)
        calls, self.vocab_size = self._probe()
        conformance.check_calls(self.config, calls)
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
    ) -> torch.Tensor:
        """`forward` once the step is planned and its inputs are on the device."""

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
            return self._logits(token_ids, positions, logit_rows)

    @torch.inference_mode()
    def stock_logits(self, token_ids: NDArray[np.integer]) -> torch.Tensor:
        """[T, vocab_size] float32 of one whole sequence, with transformers' own attention."""
        self._model.set_attn_implementation("eager")
        try:
            rows = torch.arange(len(token_ids), device=self.device)
            ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(self.device)
            return self._logits(ids, rows, rows)
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
        return (out.logits[0] if self._keeps_logits else out.logits[0, keep]).float()

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
            raise conformance.refusal(self.config, "it does not let its attention be replaced")
        try:
            with _serving(serve):
                logits = self._logits(torch.zeros_like(two), two, two)
        except Exception as error:  # whatever foreign modelling code raises
            reason = f"a trial run failed ({_first_line(error)})"
            raise conformance.refusal(self.config, reason) from error
        return calls, logits.shape[1]


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    attention: AttentionBackend | None = None,
) -> PagedModel:
    """Load a causal LM from a folder or the Hugging Face hub, and refuse what would be wrong.

    Args:
        dtype: "float32", "bfloat16", "float16" or a torch dtype; "auto" is float32 on a CPU and the
            checkpoint's own elsewhere.
        device: a torch device; "auto" is CUDA where there is one.
        attention: the backend; None chooses the fastest that works.

    Raises:
        ModelError: there is no such model, or it cannot be loaded or trusted over pages.
        InvalidRequest: a dtype or device that does not exist.
    """
    place = resolve_device(device)
    config = _load(name_or_path, AutoConfig.from_pretrained)
    conformance.check_config(config)  # before the weights are read
    kind: Any = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype == "auto" and place.type == "cpu":
        kind = torch.float32
    elif dtype != "auto" and kind not in _DTYPES.values():
        raise InvalidRequest(f"unknown dtype {dtype!r}: say auto, {', '.join(_DTYPES)}")
    read = partial(AutoModelForCausalLM.from_pretrained, config=config, dtype=kind)
    model, report = _load(name_or_path, partial(read, output_loading_info=True))
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the checkpoint of {name_or_path} lacks {len(missing)} weights, {missing[0]} for one"
        )
    model = model.to(place).eval()
    pack_linears(model)
    paged = PagedModel(model, attention)
    if config.model_type not in conformance.VERIFIED:
        conformance.check_logits(paged)
    return paged


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The torch device of that name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        InvalidRequest: there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(f"unknown device {device!r}: say auto, cpu or cuda") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {str(device)!r} was asked for, but there is no CUDA here")
    if place.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=place).item()
        except (RuntimeError, AssertionError):  # not built in, not here, or without memory (meta)
            raise InvalidRequest(f"device {str(device)!r} cannot be used here") from None
    return place


def _load(name_or_path: str | Path, read: Callable[..., Any]) -> Any:
    """`read(name_or_path)`, with what transformers raises said in one sentence."""
    try:
        return read(str(name_or_path), trust_remote_code=False)
    except Exception as error:
        reason = _first_line(error)
        # What transformers does not find is an OSError; so is a model that must be asked for first.
        absent = isinstance(error, OSError) and "gated repo" not in reason
        if absent and not Path(name_or_path).is_dir():
            raise ModelError(
                f"no model at {name_or_path}: no such folder, and no model of that name in reach"
            ) from None
        raise ModelError(f"the model at {name_or_path} does not load: {reason}") from None


def _first_line(error: Exception) -> str:
    """The first sentence of an error's message."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return text.partition(". ")[0].rstrip(".")


@contextmanager
def _serving(serve: _Serve) -> Iterator[None]:
    token = _serve.set(serve)
    try:
        yield
    finally:
        _serve.reset(token)
