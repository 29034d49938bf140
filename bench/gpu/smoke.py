"""Each kind of layer that a model of the gate has, once through the backend's kernels."""

from __future__ import annotations

import torch

from radixcache.bench.gpu.kernel_names import GATE, attention_kernels
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report
from radixcache.kernels.attention import LayerKind
from radixcache.kernels.choice import try_out


def run(place: Place, report: Report) -> None:
    for dtype in (place.dtype, *place.sizes.other_dtypes):
        for model, kinds in GATE.items():
            for kind in kinds:
                group = kind.query_heads // kind.kv_heads  # how many there are is no matter
                kind = kind._replace(query_heads=2 * group, kv_heads=2)
                heads = f"{2 * group}/2 x {kind.head_dim}"
                rules = f"window {kind.window}, softcap {kind.softcap}"
                report.check(f"{model}, {dtype}, {heads}, {rules}", _try, place, dtype, kind)


def _try(place: Place, dtype: torch.dtype, kind: LayerKind) -> str:
    backend = place.make_backend(kind, dtype=dtype)
    try_out(backend, place.device, dtype, [kind])
    torch.cuda.synchronize()
    return ", ".join(kernel.use for kernel in attention_kernels([kind], torch.float16))
