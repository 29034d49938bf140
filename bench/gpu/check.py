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
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from radixcache.bench.gpu import processes
from radixcache.bench.gpu.report import Report, Row, failed, read_rows, table

if TYPE_CHECKING:
    from radixcache.bench.gpu.place import Place


class Section(NamedTuple):
    """A module with a function `run(place, report)`."""

    call: int
    """Of the three, of at most nine minutes each, that a borrowed machine gets."""

    seconds: int
    needs_ceilings: bool = False


SECTIONS = {
    "environment": Section(1, 25),
    "smoke": Section(1, 45),
    "correctness": Section(1, 90),
    "equality": Section(1, 85),
    "llm": Section(1, 100),
    "ceilings": Section(1, 30),
    "decode": Section(1, 90, needs_ceilings=True),
    "ttft": Section(2, 80, needs_ceilings=True),
    "cascade": Section(2, 95),
    "profiles": Section(2, 100),  # last: whoever was profiled once is slower from then on
    "reuse": Section(3, 120),
    "peers": Section(3, 100),
}
"""In order. Less time is expected; what does not fit its limit is reported as not run."""

CANNOT_RUN = 2
_RESERVE = 10  # seconds before a section's limit, in which nothing new begins


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION",
                        help="run these alone: " + ", ".join(SECTIONS))  # fmt: skip
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="run this third alone")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder to write to")
    parser.add_argument("--ceilings", type=Path, metavar="FILE",
                        help="of the device; measured and written if it is not there")  # fmt: skip
    parser.add_argument("--torch", action="store_true", help="without FlashInfer")
    parser.add_argument("--rehearse", action="store_true", help="on a pretended GPU")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FOLDER",
                        help="run nothing: merge what these hold into --out")  # fmt: skip
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args(arguments)
    args.ceilings = args.ceilings or args.out / "ceilings.json"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section:
        return run_here(args)
    if args.merge:
        return merge(args.out, args.merge)
    names = [
        name
        for name, section in SECTIONS.items()
        if (name in args.only if args.only else args.call in (None, section.call))
    ]
    return run_all(with_what_they_need(names, args.ceilings), args)


def with_what_they_need(names: Sequence[str], ceilings: Path) -> list[str]:
    """The environment first, which says whether FlashInfer runs; ceilings where they are needed."""
    needed = {"environment", *names}
    if not ceilings.exists() and any(SECTIONS[name].needs_ceilings for name in names):
        needed.add("ceilings")
    return [name for name in SECTIONS if name in needed]


def run_all(names: Sequence[str], args: argparse.Namespace) -> int:
    """Each section in a process of its own."""
    options = ["--out", str(args.out), "--ceilings", str(args.ceilings)]
    options += [flag for flag in ("--rehearse", "--torch") if vars(args)[flag[2:]]]
    for name in names:
        status = run_apart(name, command_of(name, options), SECTIONS[name].seconds, args.out)
        merge(args.out, [args.out])
        if name == "environment":
            if status == CANNOT_RUN:
                return CANNOT_RUN
            if "--torch" not in options and not _flashinfer_runs(args.out):
                options.append("--torch")
    print(f"\n{(args.out / 'gpu_check.md').read_text('utf-8')}")
    return int(failed(read_rows(args.out, names)))


def command_of(name: str, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "radixcache.bench.gpu.check", *options, "--section", name]


def run_apart(name: str, command: Sequence[str], seconds: float, out: Path) -> int:
    """A section in another process; a row says so if it ended badly. Returns its exit status."""
    rows, log = out / f"{name}.jsonl", out / f"{name}.log"
    rows.unlink(missing_ok=True)
    print(f"\n== {name}", flush=True)
    status, told = processes.run(command, seconds, log)
    if told:
        last = log.read_text("utf-8", "replace").splitlines()[-20:]
        row = Row(name, "the process", "FAIL", told, lines=last)
        row.append_to(rows)
        print(f"{row.status:8} {name}: {told}", flush=True)
    return status


def _flashinfer_runs(out: Path) -> bool:
    rows = read_rows(out, ["environment"])
    return any(row.name == "FlashInfer runs" and row.status == "ok" for row in rows)


def run_here(args: argparse.Namespace) -> int:
    """A section in this process."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    name, seconds = args.section, SECTIONS[args.section].seconds - _RESERVE
    report = Report(name, args.out / f"{name}.jsonl", seconds)
    try:
        with _place(args) as place:
            if args.ceilings.exists():
                place.ceilings = json.loads(args.ceilings.read_text())
            run_section(name, place, report)
            if name == "ceilings":
                args.ceilings.write_text(json.dumps(place.ceilings))
    except NoDevice as error:
        print(error, file=sys.stderr)
        return CANNOT_RUN
    return 0


def run_section(name: str, place: Place, report: Report) -> None:
    section: Any = importlib.import_module(f"radixcache.bench.gpu.{name}")
    section.run(place, report)


class NoDevice(Exception):
    """There is nothing to run on."""


def _place(args: argparse.Namespace) -> AbstractContextManager[Place]:
    if args.rehearse:
        # By name: the stand-in for FlashInfer is the tests', and comes with a checkout only.
        rehearsal: Any = importlib.import_module("tests.bench.gpu.rehearsal")
        place: AbstractContextManager[Place] = rehearsal.rehearsal_place(args.out)
        return place
    try:
        import torch

        if not torch.cuda.is_available():
            raise NoDevice("the GPU check cannot run here: no CUDA device is visible")
        from radixcache.bench.gpu.place import gpu_place
    except ImportError as error:
        raise NoDevice(f"the GPU check cannot run here: {error}") from error
    return nullcontext(gpu_place(args.out, with_flashinfer=not args.torch))


def merge(out: Path, folders: Sequence[Path]) -> int:
    """Write what the folders hold into one JSON and one table."""
    rows = [row for folder in folders for row in read_rows(folder, SECTIONS)]
    counts = dict.fromkeys(("ok", "FAIL", "met", "missed", "measured", "not run"), 0)
    for row in rows:
        if row.status in counts:
            counts[row.status] += 1
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    found = {"summary": counts, "rows": [asdict(row) for row in rows]}
    (out / "gpu_check.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))
    (out / "gpu_check.md").write_text(f"{table(rows)}\n\n{summary}\n", "utf-8")
    return int(failed(rows))


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)  # a section that hangs says where
    sys.exit(main())
