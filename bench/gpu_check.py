"""One command for a machine with an NVIDIA GPU: is every CUDA path right, and how fast is it?

Checks each path against plain torch in float32 and the engine's greedy tokens against plain
transformers, then measures a random-weight model of Llama-3.1-8B's shape, made on the device.
Prints as it goes; writes JSON after every section. Exits with 1 if anything is wrong.

`--rehearse` runs all of it on a CPU, tiny, on the tests' pretended GPU and FlashInfer.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixcache.bench.gpu.place import Place
    from radixcache.bench.gpu.report import Report

SECTIONS = {
    "ceilings": 15,
    "correctness": 90,
    "equality": 75,
    "decode": 75,
    "ttft": 60,
    "cascade": 80,
    "reuse": 60,
    "open_questions": 60,
    "peers": 40,
}
"""Seconds that each may take, in order of importance. Less is expected; the sum may be cut."""

NEED_MODEL = {"decode", "ttft", "cascade", "reuse", "peers"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", default=[],
                        help="run these alone: " + ", ".join(SECTIONS))  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="JSON to write")
    parser.add_argument("--seconds", type=float, default=460, help="start nothing after this (460)")
    parser.add_argument("--rehearse", action="store_true", help="on a pretended GPU")
    parser.add_argument("--plant", action="store_true", help="give the backend wrong pages: FAIL")
    args = parser.parse_args(arguments)

    mend_links()
    from radixcache.bench.gpu.report import DeviceLost, Report

    logging.basicConfig(format="%(levelname)s %(message)s")
    with ExitStack() as stack:
        try:
            place = _place(args.rehearse, stack)
        except (ImportError, RuntimeError) as error:
            print(f"gpu_check cannot run here: {error}", file=sys.stderr)
            return 2
        place.planted = args.plant
        report = Report(args.out, _facts(place), args.seconds)
        for name, value in report.facts.items():
            print(f"{name}: {value}")
        model = cache(partial(_big_model, place))
        try:
            for name, seconds in SECTIONS.items():
                if not args.only or name in args.only or name == "ceilings":
                    with report.section(name, seconds):
                        _run(name, place, report, model)
        except DeviceLost as error:
            report.not_run("everything else", f"the GPU answers no more {error}")
        report.save()
        print(f"\n{report.table()}\n\n{_summary(report)}, written to {args.out}")
        return int(report.failed)


def _run(name: str, place: Place, report: Report, model: Callable[[], Any]) -> None:
    section: Any = importlib.import_module(f"radixcache.bench.gpu.{name}")
    if name in NEED_MODEL:
        section.run(place, report, model())
    else:
        section.run(place, report)


def _place(rehearse: bool, stack: ExitStack) -> Place:
    if rehearse:
        # By name: the stand-in for FlashInfer is the tests', and comes with a checkout only.
        rehearsal: Any = importlib.import_module("tests.bench.rehearsal")
        place: Place = stack.enter_context(rehearsal.rehearsal_place())
        return place
    from radixcache.bench.gpu.place import gpu_place

    return gpu_place()


def _big_model(place: Place) -> Any:
    from radixcache.bench.gpu.models import random_llama

    return random_llama(place, place.sizes.big)


def _facts(place: Place) -> dict[str, Any]:
    import torch
    import transformers

    device = torch.cuda.get_device_properties(place.device)
    return {
        "device": device.name,
        "memory": f"{device.total_memory / 2**30:.0f} GiB",
        "SMs": device.multi_processor_count,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "flashinfer": place.flashinfer.__version__,
    }


def _summary(report: Report) -> str:
    counts = dict.fromkeys(("ok", "FAIL", "met", "missed", "measured", "not run"), 0)
    for row in report.rows:
        if row.status in counts:
            counts[row.status] += 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def mend_links() -> None:
    """Make radixcache.bench, .kernels and .runtime importable where their links were lost.

    They are links to folders at the top. A copy of the tree may have left them out, or made files
    of them; then the packages are made here, over the folders.
    """
    import radixcache

    package = Path(radixcache.__file__).resolve().parent
    for name in ("bench", "kernels", "runtime"):
        link, folder = package / name, package.parent / name
        if link.is_dir():
            continue
        if not folder.is_dir():
            raise SystemExit(f"neither {link} nor {folder} is a folder: is the checkout whole?")
        print(f"note: the link {link} did not survive the copying; {folder} is used instead")
        module = ModuleType(f"radixcache.{name}")
        module.__path__ = [str(folder)]
        sys.modules[module.__name__] = module
        setattr(radixcache, name, module)


if __name__ == "__main__":
    sys.exit(main())
