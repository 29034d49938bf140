"""One command for a machine with an NVIDIA GPU: is every CUDA path right, and how fast is it?

    python -m radixcache.bench.gpu.check

Each section runs in a process of its own, with a time limit: a hang, a crash or an error that
sticks to the device ends that section and no other. Rows are written as they are found, and merged
into `gpu_check.json` and `gpu_check.md` after each section. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from radixcache.bench.gpu.report import Report, Row, failed, read_rows, table

if TYPE_CHECKING:
    from radixcache.bench.gpu.place import Place


SECTIONS = {
    "environment": (1, 200),  # builds kernels if they are not packed
    "equality": (1, 85),
    "speed": (1, 200),
    "formats": (2, 80),
    "triton": (2, 100),  # most of it compiling
    "layers": (2, 70),
    "families": (2, 90),
    "serving": (2, 120),
    "correctness": (2, 90),
    "llm": (2, 100),
    "cascade": (2, 95),
    "profiles": (2, 100),  # last: profiling slows a process from then on
}
"""Modules with a function `run(place, report)`, most telling first; which of the two calls (each
at most nine minutes on a borrowed machine) runs them; and a limit in seconds. Work that does not
fit is reported as not run."""

CANNOT_RUN = 2
_RESERVE = 10  # seconds before a section's limit, in which nothing new begins
_GRACE = 10.0  # seconds after it, in which a section may print where it hangs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION",
                        help="run these alone: " + ", ".join(SECTIONS))  # fmt: skip
    parser.add_argument("--call", type=int, choices=(1, 2), help="run this half alone")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder to write to")
    parser.add_argument("--torch", action="store_true", help="without FlashInfer")
    parser.add_argument("--rehearse", action="store_true", help="on a simulated GPU")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args(arguments)
    if not args.rehearse and not torch.cuda.is_available():
        print("the GPU check cannot run here: no CUDA device is visible", file=sys.stderr)
        return CANNOT_RUN
    args.out.mkdir(parents=True, exist_ok=True)
    return run_here(args) if args.section else run_all(args)


def run_all(args: argparse.Namespace) -> int:
    """Run each section in its own process, `environment` first: it says whether FlashInfer runs."""
    wanted = args.only or [n for n, (call, _) in SECTIONS.items() if args.call in (None, call)]
    names = [name for name in SECTIONS if name in {"environment", *wanted}]
    options = ["--out", str(args.out)]
    options += [flag for flag in ("--rehearse", "--torch") if vars(args)[flag[2:]]]
    for name in names:
        status = run_apart(name, options, args.out)
        merge(args.out)
        if name == "environment":
            if status == CANNOT_RUN:
                return CANNOT_RUN
            rows = read_rows(args.out, [name])
            if not any(row.name == "FlashInfer runs" and row.status == "ok" for row in rows):
                options.append("--torch")
    print(f"\n{(args.out / 'gpu_check.md').read_text('utf-8')}")
    return int(failed(read_rows(args.out, names)))


def command_of(name: str, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "radixcache.bench.gpu.check", *options, "--section", name]


def run_apart(name: str, options: Sequence[str], out: Path) -> int:
    """Run a section in another process, with a row if that fails. Returns its exit status."""
    rows, limit = out / f"{name}.jsonl", SECTIONS[name][1]
    rows.unlink(missing_ok=True)
    print(f"\n== {name}", flush=True)
    process = subprocess.Popen(
        command_of(name, options), stdin=subprocess.DEVNULL, start_new_session=True
    )
    failure = ""
    try:
        status = process.wait(limit + _GRACE)
        if status not in (0, CANNOT_RUN):
            failure = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        status, failure = 1, f"took longer than its {limit} s"
    finally:
        with suppress(ProcessLookupError, PermissionError):  # and processes that it left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if failure:
        Row("the process", "FAIL", failure, section=name).write(rows)
    return status


def run_here(args: argparse.Namespace) -> int:
    logging.basicConfig(format="%(levelname)s %(message)s")
    name, limit = args.section, SECTIONS[args.section][1]
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)  # prints where it hangs
    report = Report(name, args.out / f"{name}.jsonl", limit - _RESERVE)
    try:
        with _place(args) as place:
            run_section(name, place, report)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def run_section(name: str, place: Place, report: Report) -> None:
    section: Any = importlib.import_module(f"radixcache.bench.gpu.{name}")
    section.run(place, report)


def _place(args: argparse.Namespace) -> AbstractContextManager[Place]:
    if args.rehearse:
        # Imported by name: the stand-in for FlashInfer is in tests/, which only a checkout has.
        rehearsal: Any = importlib.import_module("tests.bench.gpu.rehearsal")
        place: AbstractContextManager[Place] = rehearsal.rehearsal_place(args.out)
        return place
    from radixcache.bench.gpu.place import gpu_place

    return nullcontext(gpu_place(args.out, with_flashinfer=not args.torch))


def merge(out: Path) -> None:
    """Write the rows of all sections, earlier calls included, into one JSON file and one table."""
    rows = read_rows(out, SECTIONS)
    counts = Counter(row.status for row in rows)
    statuses = ("ok", "FAIL", "met", "missed", "measured", "not run")
    summary = ", ".join(f"{counts[status]} {status}" for status in statuses)
    found = {"summary": counts, "rows": [asdict(row) for row in rows]}
    (out / "gpu_check.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))
    (out / "gpu_check.md").write_text(f"{table(rows)}\n\n{summary}\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
