"""Recurrent layers of transformers over numbered state slots.

All these layers (gated delta net, KDA, Mamba, short convolution) call the same few methods of their
cache; `_States` implements them over the slots of a step's sequences. Attention, MLPs and norms run
over the flat step as a whole. A recurrent layer must not carry one sequence's state into another,
so it runs once for all decodes and once for each other sequence. Where a state is to be kept in the
middle of a sequence's new tokens, only the recurrent layer is cut there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.recurrence import StateName, StateShapes
from radixcache.runtime.model.state_pool import StatePool
from radixcache.states.recurrent import SequenceStates

_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
"""Names of a layer's cache argument in transformers: the first since 5.24, the others before."""

_DROPPED = (*_CACHE_ARGUMENTS, "attention_mask", "position_ids")


class _Step(NamedTuple):
    qo_indptr: NDArray[np.int32]
    num_decodes: int
    states: Sequence[SequenceStates]
    pool: StatePool


_step: ContextVar[_Step | None] = ContextVar("recurrent_step", default=None)


@contextmanager
def recurrent_step(
    batch: PagedBatch, states: Sequence[SequenceStates], pool: StatePool
) -> Iterator[None]:
    """Makes the recurrent layers of a forward pass inside run this step."""
    token = _step.set(_Step(batch.qo_indptr, batch.num_decodes, states, pool))
    try:
        yield
    finally:
        _step.reset(token)


class _States:
    """A layer's cache for transformers: the states of some sequences, read from their slots."""

    def __init__(
        self, tensors: dict[StateName, torch.Tensor], states: Sequence[SequenceStates]
    ) -> None:
        self._tensors, self._states = tensors, states
        reads = [max(state.read, 0) for state in states]
        fresh = [i for i, state in enumerate(states) if state.read < 0]
        self._live = {name: tensor[reads] for name, tensor in tensors.items()}
        for live in self._live.values() if fresh else ():
            live[fresh] = 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._live.get(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._live.get(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        name = ("conv", layer_idx, state_idx)
        whole = torch.cat([self._live[name], conv_states], dim=-1)
        self._live[name] = whole[..., -self._live[name].shape[-1] :]
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._live["recurrent", layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def store(self) -> None:
        writes = [state.write for state in self._states]
        for name, live in self._live.items():
            self._tensors[name][writes] = live.to(self._tensors[name].dtype)


def replace_recurrent_layers(model: PreTrainedModel) -> int:
    """Make each recurrent layer run within `recurrent_step`; returns their number."""
    count = 0
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if layer is not None and "get_conv_state(" in inspect.getsource(type(module)):
            module.forward = _over_slots(module.forward, _cache_argument(module), layer)
            count += 1
    return count


def _cache_argument(module: torch.nn.Module) -> str:
    names = inspect.signature(type(module).forward).parameters
    if found := [name for name in _CACHE_ARGUMENTS if name in names]:
        return found[0]
    raise TypeError(f"{type(module).__name__} takes no {', '.join(_CACHE_ARGUMENTS)}")


def _over_slots(forward: Callable[..., Any], cache: str, layer: int) -> Callable[..., Any]:
    """A layer's forward over a flat step [1, T, hidden]; outside of a step, unchanged."""

    def over_slots(hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        step = _step.get()
        if step is None:
            out: torch.Tensor = forward(hidden_states, *args, **options)
            return out
        options = {name: value for name, value in options.items() if name not in _DROPPED}
        tensors, flat, parts = step.pool.of_layer[layer], hidden_states[0], []

        def run(rows: torch.Tensor, states: Sequence[SequenceStates]) -> torch.Tensor:
            view = _States(tensors, states)
            out: torch.Tensor = forward(rows, **{cache: view}, **options)
            view.store()
            return out

        decodes = step.num_decodes
        if decodes:
            parts.append(run(flat[:decodes, None], step.states[:decodes])[:, 0])
        for i, state in enumerate(step.states):
            first, end = map(int, step.qo_indptr[i : i + 2])
            start = first if i >= decodes else end
            for count, slot in state.keeps:
                if start < first + count:
                    parts.append(run(flat[None, start : first + count], [state])[0])
                    start, state = first + count, state._replace(read=state.write)
                for tensor in tensors.values():
                    tensor[slot] = tensor[state.write]
            if start < end:
                parts.append(run(flat[None, start:end], [state])[0])
        return torch.cat(parts)[None]

    return over_slots


@torch.inference_mode()
def find_states(model: PreTrainedModel) -> StateShapes:
    """A sequence's states in each recurrent layer, found by running two tokens with a cache."""
    cache = DynamicCache(config=model.config)
    two = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    model(input_ids=two, use_cache=True, **{_cache_argument(model): cache})
    shapes: dict[StateName, tuple[tuple[int, ...], torch.dtype]] = {}
    for number, layer in enumerate(cache.layers):
        for kind, name in (("conv", "conv_states"), ("recurrent", "recurrent_states")):
            for index, state in (getattr(layer, name, None) or {}).items():
                if state is not None:
                    shapes[kind, number, index] = tuple(state.shape[1:]), state.dtype
    return shapes
