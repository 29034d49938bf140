"""What the device reaches at best: the floors of all other figures are made of these."""

from __future__ import annotations

import torch

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, Report


def run(place: Place, report: Report) -> None:
    report.measure("copy", _copy, place)
    report.measure("matrix product", _matmul, place)
    report.measure("launch", _launch, place)


def _copy(place: Place) -> Figure:
    source = torch.empty(place.sizes.copy_bytes, dtype=torch.uint8, device=place.device)
    source.random_()
    target = torch.empty_like(source)
    rate = 2 * len(source) / place.gpu_seconds([lambda: target.copy_(source)])
    place.ceilings["bytes/s"] = rate
    return Figure("device-to-device copy", rate / 1e9, "GB/s", note="bytes read and written")


def _matmul(place: Place) -> Figure:
    size = place.sizes.matmul
    a, b = place.randn(size, size), place.randn(size, size)
    out = torch.empty_like(a)
    rate = 2 * size**3 / place.gpu_seconds([lambda: torch.mm(a, b, out=out)] * 3)
    place.ceilings["flop/s"] = rate
    note = f"{place.dtype}, {size} cubed, random data"
    return Figure("matrix product", rate / 1e12, "TFLOP/s", note=note)


def _launch(place: Place) -> Figure:
    tiny = place.randn(16)
    seconds = place.wall_seconds(lambda: [tiny.add_(0) for _ in range(200)]) / 200
    place.ceilings["launch s"] = seconds
    return Figure("launch of a small kernel from Python", seconds * 1e6, "µs")
