"""A mixture of experts by grouped products: rows are sorted by expert, without waiting for a GPU,
so that CUDA graphs can capture it. On a GPU Triton multiplies few rows, and all that are not in
bfloat16; torch multiplies the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from radixcache.kernels.quantized import dense
from radixcache.kernels.spec import Activation, Experts, Weights

GroupedProduct = Callable[..., torch.Tensor]
"""`triton/experts.py`'s product of rows with the weights of their experts."""

FEW = 32
"""Rows of an expert, in the mean, up to which Triton multiplies them in bfloat16."""

_GATHERED = 1 << 28
"""Weights that rows may copy for themselves."""


class GroupedExperts:
    """The experts of one layer; x [T, hidden] to their weighted sum [T, hidden]. The router reads
    `routed`, if it is given.

    Args:
        weights: of the layer, by the names of `layer_shapes`.
        product: Triton's, if it runs.
    """

    def __init__(
        self,
        spec: Experts,
        weights: Weights,
        dtype: torch.dtype,
        product: GroupedProduct | None = None,
    ) -> None:
        self._spec, self._product = spec, product
        self._router = dense(weights["router"]).float()
        self._router_bias = weights.get("router.bias")
        self._vectors = weights.get("correction"), weights.get("expert_scale")

        def stacked(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            """[count, out, in] and [count, out] of all experts, parts one below the other."""
            each = zip(*(weights[f"experts.{name}"] for name in names), strict=True)
            found = [torch.cat([dense(w).to(dtype) for w in parts]) for parts in each]
            bias = None
            if spec.each.bias:
                rows = zip(*(weights[f"experts.{name}.bias"] for name in names), strict=True)
                bias = torch.stack([torch.cat(parts).to(dtype) for parts in rows])
            return torch.stack(found), bias

        self._up = stacked("up", *["gate"] * spec.each.gated)  # FlashInfer's order
        self._down = stacked("down")
        self._whole = {
            name: dense(weight).to(dtype)
            for name, weight in weights.items()
            if name.startswith(("shared.", "latent_"))
        }

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        spec = self._spec
        read = (x if routed is None else routed).float()
        factors, chosen = choose(
            spec, F.linear(read, self._router, self._router_bias), *self._vectors
        )
        if spec.latent is None:
            out = self.mixed(x, factors, chosen)
        else:
            rows = self.mixed(F.linear(x, self._whole["latent_in"]), factors, chosen)
            out = F.linear(rows, self._whole["latent_out"])
        return out if spec.shared is None else out.add_(self._of_shared(x))

    def mixed(self, x: torch.Tensor, factors: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The sum of the chosen experts [T, active], by their factors."""
        spec = self._spec
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        experts = torch.arange(spec.count, device=x.device)
        ends = (flat[:, None] <= experts).sum(0, dtype=torch.int32)
        few = len(flat) <= FEW * spec.count or x.dtype != torch.bfloat16
        if self._product is not None and few:
            inner = self._activated(self._product(x, *self._up, ends, order, spec.active))
            found = self._product(inner, *self._down, ends, order)
        else:
            rows, sorted_by = x.index_select(0, order // spec.active), flat[order]
            inner = self._activated(_grouped(rows, *self._up, ends, sorted_by))
            found = torch.empty_like(rows)
            found.index_copy_(0, order, _grouped(inner, *self._down, ends, sorted_by))
        found = found.view(*chosen.shape, -1).float()
        return (found * factors[..., None]).sum(1).to(x.dtype)

    def _activated(self, both: torch.Tensor) -> torch.Tensor:
        kind = self._spec.each.activation
        if not self._spec.each.gated:
            return activate(kind, both)
        up, gate = both.chunk(2, -1)
        return activate(kind, gate, up)

    def _of_shared(self, x: torch.Tensor) -> torch.Tensor:
        spec, weights = self._spec.shared, self._whole
        assert spec is not None

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(x, weights[f"shared.{name}"], weights.get(f"shared.{name}.bias"))

        names = ["gate", "up"] if spec.gated else ["up"]
        out = linear(activate(spec.activation, *(linear(x, name) for name in names)), "down")
        return out * linear(x, "router").sigmoid() if self._spec.shared_gate else out


def choose(
    spec: Experts,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    each_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors and numbers [T, active] of each row's experts, by router logits [T, count]."""
    scores = logits
    if spec.scores != "softmax of chosen":
        scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
    by = scores if correction is None else scores + correction
    if spec.groups > 1:
        groups = by.unflatten(1, (spec.groups, -1))
        kept = _best(groups.topk(spec.group_best, -1)[0].sum(-1), spec.kept_groups)
        mask = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, kept, True)
        by = groups.masked_fill(~mask[..., None], -torch.inf).flatten(1)
    chosen = _best(by, spec.active)
    factors = scores.gather(1, chosen)
    if spec.scores == "softmax of chosen":
        factors = factors.softmax(-1)
    elif spec.renormalise:
        factors = factors / (factors.sum(-1, keepdim=True) + spec.epsilon)
    factors = factors * spec.scale
    return factors if each_scale is None else factors * each_scale[chosen], chosen


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the highest; of equal ones the first, while topk may take any."""
    return scores.sort(dim=-1, descending=True, stable=True)[1][..., :count]


def activate(kind: Activation, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """act(gate) * up, or act(gate) alone; `gate` may be overwritten."""
    if kind == "clamped":
        assert up is not None
        gate = gate.clamp(max=7.0)
        return gate * (1.702 * gate).sigmoid() * (up.clamp(-7.0, 7.0) + 1)
    if kind == "silu":
        found = F.silu(gate)
    elif kind == "relu2":
        found = F.relu(gate).square()
    else:
        found = F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    return found if up is None else found.mul_(up)


def _grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """x [N, in], sorted by expert, times each row's expert of `weight` [count, out, in].

    Args:
        ends: [count] int32, where the rows of each expert end.
        experts: [N] the rows' experts.
    """
    aligned = x.shape[1] * x.itemsize % 16 == 0
    weight = weight.transpose(1, 2)
    if aligned and (x.dtype == torch.bfloat16 or x.is_cpu):  # else it has no kernel
        out = F.grouped_mm(x, weight, offs=ends)
    elif len(x) * weight[0].numel() <= _GATHERED:
        out = by_row(x, weight, experts)
    else:
        out = by_expert(x, weight, ends)
    return out if bias is None else out + bias[experts]


def by_row(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Each row reads a copy of its expert's weight, so that a CUDA graph can capture it."""
    return torch.bmm(x[:, None], weight[experts])[:, 0]


def by_expert(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Waits for the device, to know the rows of each expert."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ one for part, one in zip(x.split(counts), weight, strict=True)])
