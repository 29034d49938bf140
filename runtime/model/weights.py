"""The weights of a checkpoint by the names of a description: cut, reordered and added to.

Families name and join their weights in many ways, which become one here; see `description`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

from radixcache.errors import ModelError, first_sentence
from radixcache.kernels.quantized import E2M1, Quantized
from radixcache.runtime.model.checkpoint import Checkpoint
from radixcache.runtime.model.description import (
    MLP,
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Mamba2,
    ShortConv,
    Unknown,
    Weight,
    Weights,
)
from radixcache.runtime.model.families.table import FAMILIES

# Where the text of a model is, and what else it may be beside; of the others all is text.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
_TEXT_PREFIXES = ("model.", "backbone.")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_LAST_NORMS = ("norm.weight", "embedding_norm.weight", "norm_f.weight", "final_layernorm.weight")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Names below a layer, as they are written here; each is tried in turn.
_RENAMES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(self_attn|linear_attn|mamba|conv)\.", "mixer."),
        (r"^(feed_forward|block_sparse_moe)\.", "mlp."),
        (r"^(mixer\.[qk])_layernorm\.", r"\1_norm."),
        (r"^mixer\.(conv|conv1d)\.", "mixer.conv."),
        (r"^mixer\.out_proj\.", "mixer.o_proj."),
        (r"\.shared_experts\.", ".shared_expert."),
        (r"\.input_linear\.", ".gate_up_proj."),
        (r"\.output_linear\.", ".down_proj."),
        (r"^mlp\.experts\.(gate_up|down)_proj$", r"mlp.\1_proj.weight"),
        (r"^mlp\.experts\.(gate_up|down)_proj_(bias|blocks|scales)$", r"mlp.\1_proj.\2"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"^mlp\..*(e_score_correction_bias|expert_bias)$", "mlp.correction"),
        (r"^mlp\.(gate|router\.layer)\.", "mlp.router."),
    )
]
_HEAD_NORMS = ("query_norm", "key_norm")
_CODES = ("_blocks", "_scales")
"""Ends of the names of MXFP4's tensors, which are uint8."""


class ModelWeights(Protocol):
    """Gives the weights of a model by the names of its description."""

    def embedding(self) -> Weight:
        """[vocab_size, hidden_size]."""

    def head(self) -> Weight | None:
        """[vocab_size, hidden_size]; None if the embedding is the head, too."""

    def last_norm(self) -> torch.Tensor:
        """[hidden_size] float32."""

    def layer(self, number: int) -> Weights:
        """The weights of `Architecture.layer_shapes(number)`."""


class CheckpointWeights:
    """The weights of safetensors files, as transformers saves them or as the hub has them."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        """
        Raises:
            Unknown: the checkpoint has other weights than the description.
            ModelError: it has one of another shape.
        """
        self._checkpoint, self._architecture = checkpoint, architecture
        self._shapes, self._used = checkpoint.shapes, set[str]()
        found = {
            name[: -len(end)] for name in self._shapes for end in _EMBEDDINGS if name.endswith(end)
        }
        self._prefix = next((p for p in (*_PREFIXES, *_TEXT_PREFIXES) if p in found), "")
        self._embedding = self._find(*(self._prefix + name for name in _EMBEDDINGS))
        self._last_norm = self._find(*(self._prefix + name for name in _LAST_NORMS))
        stored = any(name in self._shapes for name in _HEADS)
        self._head = self._find(*_HEADS) if stored or not architecture.tied else None
        self._layers = self._names_of_layers()
        for number in range(len(architecture.layers)):
            self._check_layer(number)
        for name in sorted(self._shapes.keys() - self._used):
            if not self._is_spare(name):
                raise Unknown(f"its checkpoint has other weights: it has {name}")

    def embedding(self) -> Weight:
        return self._tensor(self._embedding)

    def head(self) -> Weight | None:
        if self._head is None:
            return None
        head = self._tensor(self._head)
        if self._architecture.tied and torch.equal(head, self._tensor(self._embedding)):
            return None  # stored twice
        return head

    def last_norm(self) -> torch.Tensor:
        return self._tensor(self._last_norm) + self._architecture.norm_offset

    def layer(self, number: int) -> Weights:
        found = _Layer(self._architecture, number, self._layers[number], self._tensor).weights
        for name in found.keys() & {*self._architecture.layers[number].norms, *_HEAD_NORMS}:
            found[name] = found[name] + self._architecture.norm_offset
        if "rate" in found:
            found["rate"] = -found["rate"].exp()
        return found

    def _names_of_layers(self) -> list[dict[str, str]]:
        """The names of each layer's tensors by those that this file uses."""
        found: list[dict[str, str]] = [{} for _ in self._architecture.layers]
        start = re.compile(re.escape(self._prefix) + r"layers\.(\d+)\.(.*)")
        for stored in self._shapes:
            if (match := start.fullmatch(stored)) and int(match[1]) < len(found):
                layer = self._architecture.layers[int(match[1])]
                name = _name(match[2], layer.mixer is None, isinstance(layer.mlp, MLP))
                found[int(match[1])][name] = stored
        return found

    def _find(self, *names: str) -> str:
        """The one of these names that the checkpoint has: of the embedding, the head or a norm."""
        found = [name for name in names if name in self._shapes]
        if len(found) != 1:
            reason = f"it has {' and '.join(found)}" if found else f"it lacks {names[0]}"
            raise Unknown(f"its checkpoint has other weights: {reason}")
        name = found[0]
        self._used.add(name)
        rows = (self._architecture.vocab_size,) if len(self._shapes[name]) > 1 else ()
        self._check(name, self._shapes[name], (*rows, self._architecture.hidden_size))
        return name

    def _check_layer(self, number: int) -> None:
        def empty(name: str) -> torch.Tensor:
            self._used.add(name)
            kind = torch.uint8 if name.endswith(_CODES) else torch.float32
            return torch.empty(self._shapes[name], dtype=kind, device="meta")

        try:
            layer = _Layer(self._architecture, number, self._layers[number], empty)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:  # of another shape
            raise ModelError(
                f"the checkpoint's layer {number} cannot be cut where its config says "
                f"({first_sentence(error)})"
            ) from None
        wanted = self._architecture.layer_shapes(number)
        for name in sorted(layer.weights.keys() ^ wanted.keys()):
            reason = f"it {'lacks' if name in wanted else 'has'} {name} in layer {number}"
            raise Unknown(f"its checkpoint has other weights: {reason}")
        for name, weight in layer.weights.items():
            parts = weight if isinstance(weight, list) else [weight]
            experts = self._architecture.layers[number].mlp
            if parts is weight and len(parts) != getattr(experts, "count", 0):
                raise ModelError(
                    f"the checkpoint's layer {number} has {len(parts)} experts, where its config "
                    f"says {getattr(experts, 'count', 0)}"
                )
            for each in parts:
                self._check(layer.stored.get(name, name), tuple(each.shape), wanted[name])

    def _check(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise ModelError(
                f"the checkpoint has {name} as {list(shape)}, where its config says {list(wanted)}"
            )

    def _is_spare(self, name: str) -> bool:
        """Whether a tensor is not for the layers of a text's next token, but for images, say."""
        skipped = (".rotary_emb.inv_freq", ".k_scale", ".v_scale")  # the scales of fp8: `kv_dtype`
        if re.match(r"(model\.)?(mtp|visual)", name) or name.endswith(skipped):
            return True
        if layer := re.match(re.escape(self._prefix) + r"layers\.(\d+)\.", name):
            spare = FAMILIES[self._architecture.family].spare_layers
            return spare and int(layer[1]) >= len(self._architecture.layers)
        text = self._prefix in _TEXT_PREFIXES or name.startswith(self._prefix) or name in _HEADS
        return not text

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor; vectors are float32, of the step's dtype unless more of them counts.

        Raises:
            ModelError: it is not of the kind of number that it should be.
        """
        rounded = name.endswith((".weight", ".bias")) and not self._architecture.norm_offset
        vector = len(self._shapes[name]) == 1 or name.endswith("correction_bias")
        found = self._checkpoint.tensor(name, exact=vector and not rounded)
        if found.is_floating_point() == name.endswith(_CODES):
            raise ModelError(f"the checkpoint has {name} in {str(found.dtype)[6:]}")
        return found.float() if vector else found


class _Layer:
    """Makes the weights of a layer out of its tensors, or of tensors without data.

    Only of operations that torch has for both: the first of any other imports for a second.
    """

    def __init__(
        self,
        architecture: Architecture,
        number: int,
        names: dict[str, str],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._architecture, self._names, self._read = architecture, names, read
        self._family = FAMILIES[architecture.family]
        self.weights: Weights = {}
        self.stored: dict[str, str] = {}
        layer = architecture.layers[number]
        for name in layer.norms:
            self._product(name, self._family.norms[name])
        if layer.layer_scale:
            self.weights["layer_scale"] = self._take("layer_scalar", "layer_scale")
        if isinstance(layer.mixer, Attention):
            self._attention(layer.mixer)
        elif layer.mixer is not None:
            self._recurrent(layer.mixer)
        if isinstance(layer.mlp, MLP):
            self._mlp("", "mlp")
        elif layer.mlp is not None:
            self._experts(layer.mlp)

    def _take(self, name: str, ours: str) -> torch.Tensor:
        if name not in self._names:
            raise Unknown(f"its checkpoint has other weights: a layer lacks {name}")
        self.stored[ours] = self._names[name]
        return self._read(self._names[name])

    def _product(self, ours: str, name: str) -> None:
        self.weights[ours] = self._take(f"{name}.weight", ours)
        if f"{name}.bias" in self._names:
            self.weights[f"{ours}.bias"] = self._take(f"{name}.bias", f"{ours}.bias")

    def _attention(self, attention: Attention) -> None:
        weights, kind = self.weights, attention.kind
        widths = [kind.query_heads * kind.head_dim, *[kind.kv_heads * kind.head_dim] * 2]
        if "mixer.qkv_proj.weight" in self._names:
            self._cut("qkv", "mixer.qkv_proj", lambda joined: joined.split(widths))
        elif "mixer.gate_proj.weight" in self._names:  # a gate per head
            self._product("q", "mixer.q_proj")
            gates = self._take("mixer.gate_proj.weight", "q_gate")
            weights["q_gate"] = gates.repeat_interleave(kind.value_dim, 0)
        elif attention.gated:
            heads = (kind.query_heads, 2, kind.head_dim)
            self._cut(
                ("q", "q_gate"),
                "mixer.q_proj",
                lambda rows: [part.flatten(0, 1) for part in rows.unflatten(0, heads).unbind(1)],
            )
        else:
            self._product("q", "mixer.q_proj")
        if "k" not in weights:
            self._product("k", "mixer.k_proj")
            keys = self._family.value_is_key and kind.window is None
            keys = keys and "mixer.v_proj.weight" not in self._names
            self._product("v", "mixer.k_proj" if keys else "mixer.v_proj")
        self._product("o", "mixer.o_proj")
        if attention.head_norms is not None:
            for name, theirs in zip(_HEAD_NORMS, "qk", strict=True):
                self._product(name, f"mixer.{theirs}_norm")
        if attention.sinks:
            weights["sinks"] = self._take("mixer.sinks", "sinks")
        if self._family.pairs and attention.rope is not None:
            turned = 2 * len(self._architecture.ropes[attention.rope].frequencies)
            for name in ("q", "k", "q.bias", "k.bias"):
                if name in weights:
                    weights[name] = _halves(weights[name], kind.head_dim, turned)

    def _cut(
        self,
        ours: str | tuple[str, ...],
        name: str,
        cut: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        """Several weights out of the rows of one, and of its bias."""
        for end in ("", ".bias"):
            if not end or f"{name}{end}" in self._names:
                parts = cut(self._take(f"{name}{end or '.weight'}", ours[0]))
                for one, part in zip(ours, parts, strict=True):
                    self.stored[f"{one}{end}"] = self.stored[ours[0]]
                    self.weights[f"{one}{end}"] = part

    def _recurrent(self, mixer: ShortConv | DeltaNet | Mamba2) -> None:
        weights = self.weights
        weights["conv"] = self._take("mixer.conv.weight", "conv")[:, 0].T.contiguous().float()
        if "mixer.conv.bias" in self._names:
            weights["conv.bias"] = self._take("mixer.conv.bias", "conv.bias")
        self._product("o", "mixer.o_proj")
        if not isinstance(mixer, DeltaNet):
            self._product("in", "mixer.in_proj")
        elif "mixer.in_proj_qkvz.weight" in self._names:  # head by head of the keys
            each, keys = mixer.heads // mixer.key_heads, (mixer.key_heads, -1)
            sizes = [mixer.key, mixer.key, each * mixer.value, each * mixer.value]
            rows = self._take("mixer.in_proj_qkvz.weight", "in").unflatten(0, keys)
            *queries, z = (part.flatten(0, 1) for part in rows.split(sizes, 1))
            weights["in"], weights["z"] = _join(queries), z
            both = self._take("mixer.in_proj_ba.weight", "ba").unflatten(0, keys).chunk(2, 1)
            weights["ba"] = _join([part.flatten(0, 1) for part in both])
        else:
            self._product("in", "mixer.in_proj_qkv")
            self._product("z", "mixer.in_proj_z")
            ba = [self._take(f"mixer.in_proj_{name}.weight", "ba") for name in "ba"]
            weights["ba"] = _join(ba)
        if isinstance(mixer, ShortConv):
            return
        weights["rate"] = self._take("mixer.A_log", "rate")
        weights["rate_bias"] = self._take("mixer.dt_bias", "rate_bias")
        weights["mixer_norm"] = self._take("mixer.norm.weight", "mixer_norm")
        if isinstance(mixer, Mamba2):
            weights["skip"] = self._take("mixer.D", "skip")

    def _mlp(self, ours: str, name: str) -> None:
        if f"{name}.gate_up_proj.weight" in self._names:
            both = (f"{ours}gate", f"{ours}up")
            self._cut(both, f"{name}.gate_up_proj", lambda rows: rows.chunk(2))
        for part in ("gate", "up"):
            if f"{name}.{part}_proj.weight" in self._names:
                self._product(f"{ours}{part}", f"{name}.{part}_proj")
        self._product(f"{ours}down", f"{name}.down_proj")

    def _experts(self, experts: Experts) -> None:
        self._product("router", "mlp.router")
        if experts.correction:
            self.weights["correction"] = self._take("mlp.correction", "correction").flatten()
        if "mlp.experts.0.up_proj.weight" in self._names:
            for part in ("gate", "up", "down") if experts.each.gated else ("up", "down"):
                self.weights[f"experts.{part}"] = [
                    self._take(f"mlp.experts.{number}.{part}_proj.weight", f"experts.{part}")
                    for number in range(experts.count)
                ]
        else:
            self._fused_experts(experts)
        if experts.shared is not None:
            self._mlp("shared.", "mlp.shared_expert")
        if experts.shared_gate:
            self._product("shared.router", "mlp.shared_expert_gate")

    def _fused_experts(self, experts: Experts) -> None:
        """Experts that are one tensor [expert, gate and up, in], or gpt-oss's."""
        for end, ours in (("weight", ""), ("bias", ".bias"))[: 1 + experts.each.bias]:
            both, down = (self._fused(f"mlp.{name}_proj", end) for name in ("gate_up", "down"))
            for number, part in enumerate(("gate", "up")):
                halves = [self._half(each, number) for each in both]
                self.weights[f"experts.{part}{ours}"] = halves
            self.weights[f"experts.down{ours}"] = down

    def _fused(self, name: str, end: str) -> list[Any]:
        if f"{name}.blocks" in self._names and end == "weight":
            pair = (self._take(f"{name}.{part}", "experts") for part in ("blocks", "scales"))
            return [_mxfp4(*each) for each in zip(*pair, strict=True)]
        found = self._take(f"{name}.{end}", "experts")
        if end == "bias":
            return [*found.float()]
        return [*(found.transpose(1, 2).contiguous() if self._family.alternating else found)]

    def _half(self, both: Weight, number: int) -> Weight:
        """The rows of the gate (0) or of up (1)."""
        if not self._family.alternating:
            assert not isinstance(both, Quantized)
            return both.chunk(2)[number]
        if not isinstance(both, Quantized):
            return both[number::2].contiguous()
        return both.rows(torch.arange(number, both.shape[0], 2))


@lru_cache(4096)
def _name(name: str, single: bool, dense: bool) -> str:
    """A name below a layer, as this file has it; a single block has only an MLP."""
    if single:
        name = re.sub(r"^mixer\.", "mlp.", name)
    name = re.sub(r"^shared_mlp\.", "mlp." if dense else "mlp.shared_expert.", name)
    for pattern, ours in _RENAMES:
        name = pattern.sub(ours, name)
    return name


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts' rows, one part after the other."""
    joined, at = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:])), 0
    for part in parts:
        joined[at : at + len(part)].copy_(part)
        at += len(part)
    return joined


def _halves(rows: torch.Tensor, head_dim: int, turned: int) -> torch.Tensor:
    """Rows of heads whose first `turned` are pairs side by side, as two halves."""
    heads = torch.arange(len(rows)).unflatten(0, (-1, head_dim))
    order = [heads[:, 0:turned:2], heads[:, 1:turned:2], heads[:, turned:]]
    return rows.index_select(0, torch.cat(order, 1).flatten().to(rows.device))


def _mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """Blocks of 32 numbers of 4 bits [out, in / 32, 16] and exponents [out, in / 32] of 2."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
    halves = (scales.float() - 128).exp2()
    return Quantized(codes, halves, -12 * halves, 4, E2M1)
