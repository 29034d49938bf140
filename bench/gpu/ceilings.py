"""What the device reaches at best: the floors of all other figures are made of these."""

from __future__ import annotations

import torch

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, Report


def run(place: Place, report: Report) -> None:
    def copy() -> Figure:
        source = torch.empty(place.sizes.copy_bytes, dtype=torch.uint8, device=place.device)
        source.random_()
        target = torch.empty_like(source)
        seconds = place.gpu_seconds([lambda: target.copy_(source)])
        report.ceilings["bytes/s"] = 2 * len(source) / seconds
        return Figure(
            "device-to-device copy",
            report.ceilings["bytes/s"] / 1e9,
            "GB/s",
            note="bytes read and written",
        )

    def matmul() -> Figure:
        size = place.sizes.matmul
        a, b = place.randn(size, size), place.randn(size, size)
        out = torch.empty_like(a)
        seconds = place.gpu_seconds([lambda: torch.mm(a, b, out=out)] * 3)
        report.ceilings["flop/s"] = 2 * size**3 / seconds
        return Figure(
            "matrix product",
            report.ceilings["flop/s"] / 1e12,
            "TFLOP/s",
            note=f"{place.dtype}, {size} cubed, random data",
        )

    def launch() -> Figure:
        tiny = place.randn(16)
        report.ceilings["launch s"] = (
            place.wall_seconds(lambda: [tiny.add_(0) for _ in range(200)]) / 200
        )
        return Figure(
            "launch of a small kernel from Python", report.ceilings["launch s"] * 1e6, "µs"
        )

    report.measure("copy", copy)
    report.measure("matrix product", matmul)
    report.measure("launch", launch)
