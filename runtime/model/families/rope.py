"""The frequencies of RoPE, from the parameters of a config."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import torch

from radixcache.kernels.spec import Rope, Unknown
from radixcache.runtime.model.families.config import Config, Lacks
from radixcache.runtime.model.families.family import Family
from radixcache.runtime.model.rope_scaling import log_limit

_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_KNOWN = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
    "long_factor", "low_freq_factor", "max_position_embeddings", "mscale", "mscale_all_dim",
    "mrope_interleaved", "mrope_section", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "truncate", "type",
})  # fmt: skip


class Ropes:
    """The RoPE of each type of layer, each made once."""

    def __init__(self, config: Config, family: Family, length: int | None) -> None:
        """
        Args:
            length: the most tokens of a sequence, for frequencies that depend on it.
        """
        self._config, self._family, self._length = config, family, length
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")  # without RoPE, too
        if family.partial_rope:  # it stands in the parameters, too
            config.ignore("partial_rotary_factor")
        self._indices: dict[tuple[str, int], int] = {}
        self.made: list[Rope] = []
        self.max_context = config.size("max_position_embeddings")

    def parameters(self, layer_type: str) -> dict[str, Any]:
        """The parameters of a type of layer: one dictionary is for all types."""
        found = _parameters(self._config)
        if self._family.nested_rope and isinstance(found.get(layer_type), dict):
            found = found[layer_type]
        if (kind := found.get("rope_type")) not in _KINDS:
            raise Unknown(f"its RoPE is {kind or 'not one for all layers'}")
        known = _KNOWN | {"llama_4_scaling_beta"} if self._family.query_scaling else _KNOWN
        if unknown := {name for name, value in found.items() if value is not None} - known:
            raise Unknown(f"its RoPE has {', '.join(sorted(unknown))}")
        # Where RoPE may differ by type of layer, transformers reads it for scaled RoPE alone.
        whole = not self._family.partial_rope or (self._family.nested_rope and kind == "default")
        if found.get("partial_rotary_factor") not in (None, 1) and whole:
            raise Unknown(f"its RoPE is {kind}, for a part of a head")
        return found

    def index(self, layer_type: str, dim: int) -> int:
        """The index in `made` of the RoPE of a type of layer, for heads of `dim`."""
        if (layer_type, dim) not in self._indices:
            self._indices[layer_type, dim] = len(self.made)
            self.made.append(self._make(self.parameters(layer_type), dim))
        return self._indices[layer_type, dim]

    def mscale(self, layer_type: str) -> float:
        """The factor of YaRN on queries, and on keys, of MLA."""
        rope = self.parameters(layer_type)
        by, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1
        if rope["rope_type"] == "default" or not by or factor <= 1:
            return 1.0
        return 0.1 * float(by) * log(factor) + 1

    def query_scaling(self, layer_type: str) -> tuple[float, int] | None:
        """The `Attention.query_scaling` of a type of layer."""
        rope = self.parameters(layer_type)
        if rope.get("llama_4_scaling_beta") is None:
            return None
        return float(rope["llama_4_scaling_beta"]), int(rope["original_max_position_embeddings"])

    def _make(self, rope: Mapping[str, Any], dim: int) -> Rope:
        kind = rope["rope_type"]
        if kind == "default":
            part = rope.get("partial_rotary_factor")
            turned = dim if part is None else int(dim * part)
            if not 0 < turned <= dim:
                raise Unknown(f"its RoPE turns {turned} elements of heads of {dim}")
            steps = torch.arange(0, turned, 2, dtype=torch.int64).float() / turned
            return Rope(1.0 / rope["rope_theta"] ** steps, axes=self._axes(rope, turned // 2))
        needed: dict[str, Any] = {"rope_parameters": dict(rope), "head_dim": dim}
        for name in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
            needed[name] = self._config.get(name)
        length = None
        if kind == "longrope":
            short = rope["original_max_position_embeddings"]
            longer = self._length is not None and self._length > short
            length = short + 1 if longer else short
            if not longer and short < self.max_context:
                log_limit(short, kind)
                self.max_context = short
        from transformers.configuration_utils import PreTrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        make = ROPE_INIT_FUNCTIONS[kind]
        frequencies, scale = make(PreTrainedConfig(**needed), torch.device("cpu"), length)
        axes = self._axes(rope, len(frequencies))
        return Rope(frequencies.float(), float(scale), axes)

    def _axes(self, rope: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
        """The axis of each frequency, where images have three; None, too, if they do not fit."""
        parts = rope.get("mrope_section")
        if self._family.axes is None or not isinstance(parts, list) or len(parts) != 3:
            return None
        if self._family.axes == "blocks":
            axes = [axis for axis, size in enumerate(parts) for _ in range(size)]
            return tuple(axes) if len(axes) == count else None
        return tuple(i % 3 if i < 3 * parts[i % 3] else 0 for i in range(count))


def _parameters(config: Config) -> dict[str, Any]:
    """`rope_parameters`, or what said the same before transformers 5."""
    rope, scaling = config.maybe("rope_parameters"), config.maybe("rope_scaling")
    theta = config.maybe("rope_theta")
    if rope is not None and scaling:
        raise Unknown("its config says RoPE twice")
    if rope is None and theta is not None:
        rope = {"rope_theta": theta, **(scaling or {})}
        rope.setdefault("rope_type", rope.pop("type", "default"))
    elif rope is None:
        raise Lacks("rope_parameters")
    return dict(rope)
