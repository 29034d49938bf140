"""A model's layers in the structures of the native kernels, which run them in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32
from itertools import groupby
from threading import Thread
from typing import Any

import torch

from radixcache.kernels.attention import AttentionPlan, LayerKind, TablesPlan
from radixcache.kernels.backend import ImageRows, Layers, Pair, Pool, SlotUse
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.huge_pages import use_huge_pages
from radixcache.kernels.native import model as native
from radixcache.kernels.native.attention import NativePlan, heads_of
from radixcache.kernels.native.linear import PackedLinear
from radixcache.kernels.native.linear import Weight as WeightStruct
from radixcache.kernels.quantized import Quantized, join_rows
from radixcache.kernels.spec import (
    MLP,
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Latent,
    Mixer,
    ShortConv,
    Weight,
    Weights,
)


class NativeLayers(Layers):
    """`Layers` of float32 or bfloat16, and quantized ones, on a CPU."""

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        weights_by: set[str] | None = None,
    ) -> None:
        """`weights_by` is that of `Backend`."""
        self.architecture, self._dtype = architecture, dtype
        self._weights_by = set[str]() if weights_by is None else weights_by
        self._packed: list[PackedLinear] = []
        self._rounds = c_int32(0)
        self._held: list[object] = []  # what the structures' addresses point to
        self._sublayers: list[native.Sublayer] = []
        self._per_layer: native.PerLayer | None = None
        self._first = native.Joint(None, None, architecture.embed_scale, 1.0, False)
        self._joint = self._first  # behind the last sublayer so far
        self._pages: list[LayerKind] = []  # of the layers that have some
        self._pool: Pool | None = None
        self.multi_step = not architecture.is_recurrent

    def embedding(self, embedding: Weight, head: Weight | None) -> None:
        self._table = self._pack([embedding])
        self._head = self._table if head is None else self._pack([head])

    def per_layer(self, weights: Weights) -> None:
        _check_shapes(weights, self.architecture.per_layer_shapes)
        structs = (self._product(weights, name).struct for name in ("table", "projection"))
        norm = weights["norm"]
        self._per_layer = native.PerLayer(*structs, self._vector(norm), len(norm))

    def layer(self, number: int, weights: Weights) -> None:
        """As in `Layers`; `ValueError` if the shapes are others, or the layer's numbers contradict
        each other."""
        layer = self.architecture.layers[number]
        _check_shapes(weights, self.architecture.layer_shapes(number))

        def add(
            sublayer: native.Layer,
            before: str,
            after: str,
            parallel: bool = False,
            beside: native.Beside | None = None,
            at: int = -1,
        ) -> None:
            self._joint.before = self._vector(weights.get(before))
            norm = self._vector(weights.get(after))
            self._joint = native.Joint(norm, None, layer.residual_scale, 1.0, parallel)
            self._sublayers.append(native.Sublayer(sublayer, self._joint, beside, at))

        if layer.mixer is not None:
            add(self._mixer(layer.mixer, weights), "input_norm", "attended_norm", layer.parallel)
        if isinstance(layer.mlp, MLP):
            beside = None if layer.beside is None else self._beside(layer.beside, weights)
            add(self._mlp(layer.mlp, weights), "mlp_norm", "after_norm", beside=beside)
        elif layer.mlp is not None:
            add(self._experts(layer.mlp, weights), "mlp_norm", "after_norm")
        if (mlp := layer.per_layer) is not None:
            if self._per_layer is None:
                raise ValueError("a layer has inputs that nothing makes")
            own = self._mlp(mlp, weights, "per_layer.")
            add(own, "", "per_layer_norm", at=number * mlp.inner)
        self._sublayers[-1] = self._sublayers[-1]._replace(ends=number)
        if layer.layer_scale:
            self._joint.sum_scale = float(weights["layer_scale"])

    def loaded(self, last_norm: torch.Tensor) -> None:
        a = self.architecture
        _check_shapes({"last_norm": last_norm}, {"last_norm": (a.hidden_size,)})
        self._joint.before = self._vector(last_norm)
        ropes = [
            native.RopeTable(
                self._vector(rope.frequencies),
                self._axes(rope.axes),
                *(rope.scale, len(rope.frequencies)),
            )
            for rope in a.ropes
        ]
        self._model = native.NativeModel(
            *(self._sublayers, ropes, self._first, self._table, self._head, self._dtype),
            self._per_layer,
            eps=a.eps,
            centred=a.centred,
            logit_scale=a.logit_scale,
            logit_softcap=a.logit_softcap or 0.0,
        )
        blocks = [packed.block for packed in self._packed]
        Thread(target=use_huge_pages, args=(blocks,), daemon=True).start()  # nobody waits for it

    def run(
        self,
        pool: Pool,
        plan: AttentionPlan,
        states: Sequence[SlotUse] = (),
        pooled: torch.Tensor | None = None,
        images: ImageRows | None = None,
    ) -> torch.Tensor:
        full, window = _tables_of(plan)
        if pool is not self._pool:
            tensors = {} if pool.states is None else pool.states.tensors
            self._pool = pool
            self._states = [tensors[name] for name in self.architecture.state_shapes]
        rows = full.numbers[:3]
        return self._model.forward(
            full, window, pool.layers, self._states, states, *rows, pooled=pooled, images=images
        )

    def decode(self, pool: Pool, plan: AttentionPlan, how: MultiStep) -> Pair:
        full, window = _tables_of(plan)
        token_ids, positions = full.numbers
        return self._model.decode(full, window, pool.layers, token_ids, positions, how)

    # ---- Structures of one layer.

    def _mixer(self, mixer: Mixer, w: Weights) -> native.Layer:
        if isinstance(mixer, Attention):
            return self._attention(mixer, w)
        if isinstance(mixer, Latent):
            return self._latent(mixer, w)
        conv = self._vector(w["conv"]), self._vector(w.get("conv.bias"))
        out, rate = self._product(w, "o").struct, w.get("rate")
        names, of_latents, limits = {"in": 0}, dict[str, int](), (0.0, float("inf"), 0.0)
        by_channel = False
        if isinstance(mixer, ShortConv):
            sizes = 0, 0, 0, 0
        elif isinstance(mixer, DeltaNet):
            sizes = mixer.key_heads, mixer.heads, mixer.key, mixer.value
            (names, of_latents), by_channel = mixer.products, mixer.by_channel
            limits = (*limits[:2], mixer.bound or 0.0)
            rate = w["rate"].repeat_interleave(mixer.decays // mixer.heads)
        else:
            sizes = mixer.groups, mixer.heads, mixer.state, mixer.value
            limits = mixer.least, mixer.most, 0.0
        vectors = [self._vector(w.get(n)) for n in ("rate_bias", "skip", "mixer_norm")]
        if sizes[1] % (sizes[0] or 1):
            raise ValueError(f"{mixer} cuts its heads into parts of different sizes")
        kind = native.RECURRENCES.index(type(mixer).__name__)
        inputs = self._structs(6, self._products(w, *names))
        latents = self._structs(2, [self._product(w, name) for name in of_latents])
        return native.RecurrentLayer(
            *(inputs, out, latents, *conv, self._vector(rate), *vectors, *limits),
            *(kind, mixer.width, mixer.channels, *sizes, by_channel),
        )

    def _attention(self, attention: Attention, w: Weights) -> native.AttentionLayer:
        kind, rope = attention.kind, self._rope(attention.rope, attention.kind.head_dim)
        names = ["q"] + ["q_gate"] * attention.gated + ["k", "v"] * (not attention.shares)
        if not attention.shares:
            self._pages.append(kind)
        elif kind not in self._pages:
            raise ValueError("a layer shares K/V that none has")
        pages = len(self._pages) - 1 - self._pages[::-1].index(kind)
        scaling, length = attention.query_scaling or (0.0, 0)
        return native.AttentionLayer(
            *(heads_of(kind), self._structs(4, self._products(w, *names))),
            self._product(w, "o").struct,
            *(self._vector(w.get(name)) for name in ("query_norm", "key_norm", "sinks")),
            *(
                pages,
                attention.shares,
                rope,
                attention.gated,
                attention.head_norms == "whole",
                attention.value_norm,
            ),
            *(length, scaling),
        )

    def _latent(self, latent: Latent, w: Weights) -> native.LatentLayer:
        kind, whole = latent.kind, latent.q_rank is None
        scaling, length = latent.query_scaling or (0.0, 0)
        if isinstance(w["v_b"], Quantized) and not isinstance(w["k_b"], Quantized):
            self._weights_by.add("dense k_b")
        self._pages.append(kind)
        return native.LatentLayer(
            heads_of(kind),
            self._structs(2, self._products(w, "q" if whole else "q_a", "kv_a")),
            () if whole else self._product(w, "q_b").struct,
            self._product(w, "z").struct if latent.gated else (),
            self._product(w, "o").struct,
            *(self._by_head(w[name], kind.query_heads) for name in ("k_b", "v_b")),
            *(self._vector(w.get(name)) for name in ("q_a_norm", "kv_a_norm")),
            len(self._pages) - 1,
            self._rope(latent.rope, kind.value_dim),
            *(latent.nope, latent.value, length, scaling, latent.eps),
        )

    def _rope(self, number: int | None, dim: int) -> int:
        """The number of a RoPE that heads of this size may have; -1 for None."""
        rope, ropes = -1 if number is None else number, self.architecture.ropes
        if not -1 <= rope < len(ropes) or (rope >= 0 and 2 * len(ropes[rope].frequencies) > dim):
            raise ValueError(f"no RoPE number {rope} for heads of {dim}")
        return rope

    def _mlp(self, mlp: MLP, w: Weights, prefix: str = "") -> native.MLP:
        names = [f"{prefix}gate", f"{prefix}up"] if mlp.gated else [f"{prefix}up"]
        return native.MLP(
            self._structs(2, self._products(w, *names)),
            self._product(w, f"{prefix}down").struct,
            *(mlp.inner, mlp.gated, native.ACTIVATIONS.index(mlp.activation)),
        )

    def _beside(self, experts: Experts, w: Weights) -> native.Beside:
        names = "expert_norm", "router_norm", "expert_out_norm", "mlp_out_norm"
        return native.Beside(self._experts(experts, w), *(self._vector(w[name]) for name in names))

    def _experts(self, experts: Experts, w: Weights) -> native.Experts:
        names = [name for name in w if name.startswith("experts.")]
        each = (native.MLP * experts.count)(
            *(
                self._mlp(experts.each, {name: w[name][i] for name in names}, "experts.")
                for i in range(experts.count)
            )
        )
        shared = None if experts.shared is None else self._mlp(experts.shared, w, "shared.")
        self._held += [each, shared]
        gate = self._product(w, "shared.router").struct if experts.shared_gate else ()
        latent: list[Any] = [(), ()]
        if experts.latent is not None:
            latent = [self._product(w, name).struct for name in ("latent_in", "latent_out")]
        return native.Experts(
            ctypes.addressof(each),
            None if shared is None else ctypes.addressof(shared),
            *(
                self._product(w, "router", torch.float32).struct,
                gate,
                *latent,
                *(self._vector(w.get(name)) for name in ("correction", "expert_scale")),
            ),
            *(native.SCORES.index(experts.scores), experts.count, experts.active, experts.groups),
            *(experts.kept_groups, experts.group_best, experts.renormalise),
            *(experts.epsilon, experts.scale),
        )

    # ---- Weights.

    def _vector(self, weight: torch.Tensor | None) -> int | None:
        """The address of a float32 copy of a weight that is no product; None for None."""
        if weight is None:
            return None
        kept = weight.detach().float().contiguous()
        self._held.append(kept)
        return kept.data_ptr()

    def _axes(self, axes: tuple[int, ...] | None) -> int | None:
        kept = None if axes is None else torch.tensor(axes, dtype=torch.int32)
        self._held.append(kept)
        return None if kept is None else kept.data_ptr()

    def _product(self, w: Weights, name: str, dtype: torch.dtype | None = None) -> PackedLinear:
        rounded = not name.endswith("router")
        return self._pack([w[name]], w.get(f"{name}.bias"), dtype, rounded)

    def _products(self, w: Weights, *names: str) -> list[PackedLinear]:
        """Products side by side; those of one format are one: threads wait once per product."""
        packed = []
        for _, same in groupby(names, key=lambda name: _format(w[name])):
            group = list(same)
            biases = [w.get(f"{name}.bias", torch.zeros(w[name].shape[0])) for name in group]
            has_bias = any(f"{name}.bias" in w for name in group)
            bias = torch.cat([each.float() for each in biases]) if has_bias else None
            packed.append(self._pack([w[name] for name in group], bias))
        return packed

    def _by_head(self, weight: Weight, heads: int) -> int:
        """The address of the products that stand below each other in a weight."""
        numbers = torch.arange(weight.shape[0]).chunk(heads)
        parts = (weight.rows(n) if isinstance(weight, Quantized) else weight[n] for n in numbers)
        each = self._structs(heads, [self._pack([part], rounded=False) for part in parts])
        self._held.append(each)
        return ctypes.addressof(each)

    def _structs(self, most: int, products: list[PackedLinear]) -> Any:
        return (WeightStruct * most)(*(product.struct for product in products))

    def _pack(
        self,
        weights: list[Any],
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        rounded: bool = True,
    ) -> PackedLinear:
        """The product of joined weights of one format, in `dtype`, which is the step's if it is
        None, or in fewer bits. `rounded`: whether rows may be, to 8 bits; those of routers and of
        MLA's heads are not."""
        rounds: c_int32 | None = None
        dtype = dtype or self._dtype
        if isinstance(weights[0], Quantized):
            joined: Weight = Quantized.join(weights)
            if rounded and weights[0].whole:
                self.rounds = rounds = self._rounds
        else:
            joined = join_rows(weights)
            joined = joined if joined.itemsize <= dtype.itemsize else joined.to(dtype)
        self._packed.append(PackedLinear(joined, bias, rounds))
        return self._packed[-1]


def _format(weight: Weight) -> Any:
    return weight.format if isinstance(weight, Quantized) else weight.dtype


def _tables_of(plan: AttentionPlan) -> tuple[NativePlan, NativePlan]:
    """The plans of layers without a window, and with one; or the same twice."""
    full, window = (plan.full, plan.window) if isinstance(plan, TablesPlan) else (plan, plan)
    assert isinstance(full, NativePlan) and isinstance(window, NativePlan)
    return full, window


def _check_shapes(weights: Weights, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        found = weights.get(name)
        for weight in found if isinstance(found, list) else [found]:
            if weight is None or tuple(weight.shape) != shape:
                given = "nothing" if weight is None else list(weight.shape)
                raise ValueError(f"{name} should be {list(shape)}, and is {given}")
