"""Tensor parallelism: a model whose layers are cut among processes, one for each device.

Rank 0 schedules and samples; the others compute their part of the same steps. Rank 0 broadcasts
only the three calls by which an engine reaches a model and its pages: `allocate`, `KVPool.copy` and
`forward`. So the cache, the scheduler and the sampler know nothing of ranks.

The layers are transformers', cut by its own plan, and not the decoder loop's. That plan cuts every
family that has one, while the loop knows four; its loader reads only the rank's part of each
weight; and the loop's advantages, run-ahead and CUDA graphs, are off here anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch

from radixcache.errors import (
    InvalidRequest,
    MissingDependency,
    ModelError,
    RanksLost,
    first_sentence,
)
from radixcache.runtime.checkpoints.model_files import check_model, split_gguf
from radixcache.runtime.model.compatibility import refusal
from radixcache.runtime.model.device import resolve_device, resolve_dtype
from radixcache.runtime.model.kv_dtype import check_kv_dtype, store_kv
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.parallel.workers import Ranks, as_rank_0, join
from radixcache.runtime.model.transformers_loading import load_config, load_transformers
from radixcache.runtime.model.transformers_model import TransformersModel


class LeadingModel(TransformersModel):
    """Rank 0's part of a model; until it has `ranks`, each process runs on its own."""

    ranks: Ranks | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.state_shapes:
            raise refusal(self.model_type, "its recurrent layers are not shared out among ranks")

    @property
    def max_graph_rows(self) -> int:
        return 0  # a CUDA graph would run here alone

    @property
    def can_overlap(self) -> bool:
        return False

    @property
    def alive(self) -> bool:
        return self.ranks is None or self.ranks.lost is None

    def stop(self) -> None:
        if self.ranks is not None:
            self.ranks.stop()

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()

    def allocate(self, num_pages: int, page_size: int, *_: Any, **__: Any) -> KVPool:
        if self.ranks is None:
            return super().allocate(num_pages, page_size)
        with self.ranks.broadcast("allocate", num_pages, page_size):
            return super().allocate(num_pages, page_size, make=partial(_LeadingPool, self.ranks))

    def forward(self, *step: Any) -> torch.Tensor:  # token_ids, batch, logit_rows, pool, no states
        if self.ranks is None:
            return super().forward(*step)
        with self.ranks.broadcast("forward", *step[:3]):
            logits = super().forward(*step)
            if self.device.type == "cuda":  # raises if another rank fails its part
                torch.cuda.synchronize(self.device)
            return logits


class _LeadingPool(KVPool):
    """Rank 0's heads of the pages."""

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args)
        self._ranks = ranks

    def copy(self, *copies: Sequence[tuple[int, int, int]]) -> None:
        with self._ranks.broadcast("copy", *copies):
            super().copy(*copies)


def load_parallel(
    name_or_path: str, count: int, dtype: str, device: str, kv_cache_dtype: str = "auto"
) -> PagedModel:
    """Load a model onto `count` devices, or into as many processes on a CPU.

    Raises:
        InvalidRequest: too few devices, or an argument that makes no sense.
        MissingDependency: transformers needs accelerate to cut a model.
        ModelError: it cannot be cut into so many parts, or as `load_model`.
        RanksLost: a process ended on the way.
    """
    place, kind = _resolve(device, count), resolve_dtype(dtype, resolve_device(device))
    if find_spec("accelerate") is None:
        raise MissingDependency(
            "tensor parallelism needs accelerate: in a checkout, pip install '.[tensor-parallel]'"
        )
    check_kv_dtype(kv_cache_dtype, place, exact=False)
    check_model(name_or_path)
    _check_cut(name_or_path, count)
    ranks = Ranks(count, follow)
    try:
        with as_rank_0(), TemporaryDirectory(prefix="radixcache-") as folder:
            ranks.tell(name_or_path, count, kind, place.type, f"{folder}/ranks", kv_cache_dtype)
            join(0, count, f"{folder}/ranks", place, ranks)
            model = load_transformers(name_or_path, kind, place, ranks=count, make=LeadingModel)
            assert isinstance(model, LeadingModel)
            store_kv(model, kv_cache_dtype, name_or_path)
        ranks.loaded = True
    except BaseException as error:
        reason = ranks.lost if ranks.has_lost_one() else first_sentence(error)
        foreign = ranks.lost is not None or isinstance(error, OSError | RuntimeError)
        ranks.close()
        if foreign and isinstance(error, Exception):
            raise RanksLost(f"the ranks could not load the model: {reason}") from error
        raise
    weakref.finalize(model, ranks.close)
    model.layers_by += f" on {count} ranks"
    model.ranks = ranks
    return model


def follow(rank: int, receive: Callable[[], Any]) -> None:
    """Load a rank's part of the model, and repeat rank 0's calls."""
    name_or_path, count, kind, device_type, meeting, kv_cache_dtype = receive()
    place = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    join(rank, count, meeting, place)
    model: Any = load_transformers(name_or_path, kind, place, ranks=count)
    store_kv(model, kv_cache_dtype, name_or_path)
    pool: Any = None
    while True:
        call, *given = receive()
        if call == "allocate":
            pool = model.allocate(*given)
        elif call == "copy":
            pool.copy(*given)
        else:
            model.forward(*given, pool)


def _resolve(device: str, count: int) -> torch.device:
    """The device of rank 0."""
    place, there = resolve_device(device), torch.cuda.device_count()
    if place.type == "cuda" and place.index is not None:
        raise InvalidRequest("the ranks take the first devices: say device='cuda'")
    if place.type == "cuda" and there < count:
        raise InvalidRequest(
            f"tensor_parallel_size={count} needs as many GPUs; there are {there} here"
        )
    if place.type != "cuda" and (place.type != "cpu" or there):  # transformers takes the GPUs
        raise InvalidRequest(f"tensor_parallel_size={count} is for GPUs, or a CPU without any")
    return torch.device("cuda", 0) if place.type == "cuda" else place


def _check_cut(name_or_path: str, count: int) -> None:
    """Refuse what cannot be cut, before anything is read or started."""
    if split_gguf(name_or_path)[1]:
        raise ModelError("tensor parallelism takes no GGUF file")
    config = load_config(name_or_path)
    if getattr(config, "quantization_config", None):
        raise ModelError("tensor parallelism takes no quantised checkpoint: none is checked")
    text = config.get_text_config()
    if not text.base_model_tp_plan:
        raise ModelError(f"transformers has no tensor-parallel plan for {config.model_type!r}")
    own = getattr(text, "per_layer_config", None)  # of models whose layers differ, as Gemma 4
    for layer in [text] if own is None else [own[n] for n in range(text.num_hidden_layers)]:
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        if heads % count or kv_heads % count:
            raise ModelError(
                f"{heads} query heads and {kv_heads} KV heads cannot be shared out evenly among "
                f"{count} ranks: tensor_parallel_size must divide both"
            )
