"""`radixcache bench`: caching schemes on the same requests, in the same memory."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixcache import __version__
from radixcache.bench.machine import conditions
from radixcache.bench.schemes.named import (
    GROUPS,
    HYBRID,
    INDEX_ONLY,
    find_schemes,
    parse_memory,
    windowed_schemes,
)
from radixcache.bench.schemes.windows import MODELS as WINDOWED
from radixcache.bench.workloads.choice import DEFAULT, FORMATS, TRACES, choose
from radixcache.bench.workloads.generators import GENERATORS
from radixcache.bench.workloads.public_data import PUBLIC
from radixcache.errors import InvalidRequest, MissingDependency

if TYPE_CHECKING:
    from radixcache.bench.replay.index_level import Serving
    from radixcache.bench.report.results import Report
    from radixcache.runtime.model.paged_model import PagedModel

SUMMARY = "compare caching schemes: radix, hash-block, none, in the same memory"

LEVELS = ("index", "engine", "both")
DEFAULT_PAGE = Path("bench-report.html")
_TOKEN_BYTES = 131_072  # Llama 3 8B in bfloat16: 32 layers x 8 heads x 2 x 128 x 2 bytes
_LEAST, _MOST = 1e-9, 1e12  # beyond, times and rates are no numbers any more
_MOST_STATES = 1 << 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help=f"{', '.join(GENERATORS)}; with numbers of their own as in chat:turns=4,user=30; or "
        f"on public data, if at hand, {', '.join(PUBLIC)} "
        f"({' '.join(DEFAULT)}, unless --file)",
    )
    add("--level", choices=LEVELS, default="index", help="(index)")
    add(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        default=["default"],
        help="none, hash-B, radix-P, radix-P+Nx (over a tier N times its size), whole-P, "
        "aligned-P, cow-B, prefix-B, template-B; "
        f"or {', '.join(GROUPS)} (default)",
    )
    add(
        "--memory",
        nargs="+",
        metavar="SIZE",
        default=["30%", "100%"],
        help="for KV pages: tokens, 512MiB, or a share of the workload's distinct tokens "
        "(30%% 100%%)",
    )
    add(
        "--states",
        type=int,
        metavar="N",
        help="a model with recurrent layers, where a hit needs a state besides KV (index level): "
        "compare rules which states to keep, each with N slots for them, one of which every "
        "running request takes: ours, Marconi's, SGLang's and vLLM's",
    )
    add(
        "--windows",
        choices=WINDOWED,
        help="a model with sliding windows (index level): compare keeping all of its KV, and rules "
        "which windows to keep, at equal bytes: ours, vLLM's and SGLang's",
    )
    files = parser.add_argument_group("requests from a file").add_argument
    files("--file", type=Path, metavar="F", help="trace, log or prompts; may be .gz")
    files("--format", choices=FORMATS, help="what the file is")
    files("--hash-block", type=int, metavar="N", help="tokens of an id (the trace's own, or 512)")
    files("--limit", type=int, metavar="N", help="read no more than N records")
    serving = parser.add_argument_group("serving").add_argument
    serving(
        "--arrivals",
        choices=("closed", "poisson", "trace"),
        default="closed",
        help="as others end, at random, or at the file's times (closed)",
    )
    serving(
        "--concurrency", type=int, default=8, metavar="N", help="closed: requests in flight (8)"
    )
    serving("--rate", type=float, metavar="R", help="poisson: requests a second")
    serving(
        "--speed", type=float, default=1, metavar="X", help="trace: times as fast as recorded (1)"
    )
    serving(
        "--step-time", type=float, default=0.025, metavar="S", help="index level: seconds (0.025)"
    )
    serving("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="per step (2048)")
    serving("--max-num-seqs", type=int, default=64, metavar="N", help="running (64)")
    serving("--schedule-policy", choices=("fcfs", "lpm"), default="fcfs")
    engine = parser.add_argument_group("engine level").add_argument
    engine("--model", metavar="M", help="folder, .gguf file or hub id (the bundled model)")
    engine("--kv-cache-dtype", metavar="D", help="of KV pages: int8, say (the model's dtype)")
    engine("--quantized-activations", choices=("auto", "on", "off"), default="auto")
    engine("--device", default="auto", metavar="D", help="cpu, cuda or auto")
    engine(
        "--speculate", choices=("off", "auto"), default="off", help="draft from earlier texts (off)"
    )
    engine("--repeats", type=int, default=3, metavar="N", help="timed runs (3)")
    add("--seed", type=int, default=0, metavar="N")
    add("--token-bytes", type=int, metavar="N", help=f"KV bytes per token ({_TOKEN_BYTES})")
    add("--json", type=Path, metavar="F", help="write the figures as JSON; - shows")
    add("--report", type=Path, metavar="F", help=f"write a page ({DEFAULT_PAGE}, unless --json)")


def run(args: argparse.Namespace) -> int:
    page = _page(args)
    report = measure(args)
    from radixcache.bench.report.files import NEEDED, write
    from radixcache.bench.report.pages import as_html
    from radixcache.bench.report.terminal import print_report
    from radixcache.bench.tables import console

    if page is not None:
        write(page, as_html(report))
    if str(args.json) == "-":
        print(report.to_json())
        return 0
    if args.json is not None:
        write(args.json, report.to_json())
    shown = console()
    print_report(report, shown)
    if page is not None:
        shown.print(f"The report is in {page}.", markup=False, soft_wrap=True)
    elif args.json is None:
        shown.print(f"No report is written: it {NEEDED}.", markup=False, soft_wrap=True)
    return 0


def measure(args: argparse.Namespace) -> Report:
    """Parse the flags; raises `InvalidRequest` before anything is loaded."""
    _check_order(args)
    schemes = HYBRID if args.states is not None else find_schemes(args.schemes)
    if args.windows is not None:
        schemes = windowed_schemes(args.windows)
    memories = [parse_memory(text) for text in args.memory]
    _check(args)
    rules = [scheme.name for scheme in schemes if scheme.kind in INDEX_ONLY or scheme.tier]
    if rules and args.level != "index":
        raise InvalidRequest(f"{', '.join(rules)}: at index level only, without a model")
    from radixcache.bench.comparison import compare
    from radixcache.bench.report.results import Report

    model = _load_model(args) if args.level != "index" else None
    token_bytes = args.token_bytes or (model.bytes_per_token if model else _TOKEN_BYTES)
    if args.windows is not None:
        token_bytes = sum(WINDOWED[args.windows][:2])
    vocabulary = model.vocab_size if model else 1 << 15
    serving = _serving(args)
    found = compare(
        choose(args, vocabulary), schemes, memories, serving, token_bytes=token_bytes,
        with_index=args.level != "engine", model=model, repeats=args.repeats,
    )  # fmt: skip
    return Report(_settings(args, serving, token_bytes, vocabulary, model), [*found])


def _check_order(args: argparse.Namespace) -> None:
    """Refuse workloads that a flag with many values has swallowed."""
    for flag in ("schemes", "memory"):
        for value in getattr(args, flag):
            if value.partition(":")[0] in {*GENERATORS, *PUBLIC}:
                raise InvalidRequest(f"{value} is a workload: name it before --{flag}, not after")


def _page(args: argparse.Namespace) -> Path | None:
    """The page's file: as requested, or a default if it can be drawn and no JSON is wanted."""
    if args.report is not None or args.json is not None:
        return args.report
    return DEFAULT_PAGE if find_spec("vl_convert") else None


def _check(args: argparse.Namespace) -> None:
    """Refuse senseless settings before anything is loaded."""
    from radixcache.bench.report.files import check_page, check_writable

    positive = "concurrency rate step_time max_num_batched_tokens max_num_seqs repeats limit"
    positive += " hash_block token_bytes speed"
    for name in positive.split():
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InvalidRequest(f"--{name.replace('_', '-')} must be more than 0, not {value}")
        if value is not None and not _LEAST <= value <= _MOST:
            raise InvalidRequest(
                f"--{name.replace('_', '-')} must be from {_LEAST:g} to {_MOST:g}, not {value:g}"
            )
    as_in_file = args.format in TRACES and not args.workloads
    times = f"--arrivals trace needs a file with times, alone: --format {' or '.join(TRACES)}"
    wrong = [
        (args.states is not None and not 2 <= args.states <= _MOST_STATES,
         f"--states must be from 2 to {_MOST_STATES}, not {args.states}"),
        (args.states and args.level != "index", "--states are simulated: --level index alone"),
        (args.windows and args.level != "index", "--windows are simulated: --level index alone"),
        (args.windows and args.states, "--windows and --states are of different models"),
        (args.windows and args.token_bytes, "--windows has its model's own --token-bytes"),
        (args.speculate != "off" and args.level == "index",
         "--speculate needs a model: --level engine or both"),
        (args.kv_cache_dtype is not None and args.level == "index",
         "--kv-cache-dtype is a model's: at --level index say --token-bytes"),
        (args.seed < 0, f"--seed must be at least 0, not {args.seed}"),
        ((args.file is None) != (args.format is None), "--file and --format go together"),
        *_unused(args),
        (args.arrivals == "poisson" and args.rate is None, "--arrivals poisson needs a --rate"),
        (args.arrivals == "trace" and not as_in_file, times),
    ]  # fmt: skip
    for is_wrong, why in wrong:
        if is_wrong:
            raise InvalidRequest(why)
    if (page := _page(args)) is not None:
        check_page(page)
    places = {"--file": args.file, "--json": args.json, "--report": page}
    if str(args.json) == "-":
        del places["--json"]
    taken: dict[Path, str] = {}
    for flag, place in places.items():
        if place is None:
            continue
        if flag == "--json":
            check_writable(place)
        other = taken.setdefault(place.resolve(), flag)
        if other != flag and (place.is_file() or not place.exists()):
            raise InvalidRequest(f"{other} and {flag} are one file: {place}")


def _unused(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Flags that would have no effect, so that the user must have meant something else."""
    for name, default, is_unused, where in (
        ("hash_block", None, args.format not in TRACES, "with a trace"),
        ("limit", None, args.file is None, "with a --file"),
        ("rate", None, args.arrivals != "poisson", "with --arrivals poisson"),
        ("speed", 1, args.arrivals != "trace", "with --arrivals trace"),
        ("schemes", ["default"], args.states is not None, "without --states"),
        ("schemes", ["default"], args.windows is not None, "without --windows"),
    ):
        is_wrong = is_unused and getattr(args, name) != default
        yield is_wrong, f"--{name.replace('_', '-')} goes {where} only"


def _serving(args: argparse.Namespace) -> Serving:
    from radixcache.bench.replay.index_level import Serving
    from radixcache.bench.replay.play import Arrivals

    arrivals = {
        "closed": Arrivals(concurrency=args.concurrency),
        "poisson": Arrivals(rate=args.rate, seed=args.seed),
        "trace": Arrivals(as_recorded=True, speed=args.speed),
    }[args.arrivals]
    return Serving(
        arrivals,
        args.max_num_batched_tokens,
        args.max_num_seqs,
        args.schedule_policy,
        args.step_time,
        args.states or 0,
        args.speculate == "auto",
    )


def _load_model(args: argparse.Namespace) -> PagedModel:
    try:
        from transformers.utils import logging

        from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
        from radixcache.runtime.model.load import load_model
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"a model needs {error.name}: pip install '.[runtime,bench]' in a checkout"
        ) from error

    if args.model is None:
        logging.disable_progress_bar()
    return load_model(
        args.model or BUNDLED_MODEL,
        device=args.device,
        kv_cache_dtype=args.kv_cache_dtype or "auto",
        quantized_activations=args.quantized_activations,
    )


def _settings(
    args: argparse.Namespace,
    serving: Serving,
    token_bytes: int,
    vocabulary: int,
    model: PagedModel | None,
) -> dict[str, Any]:
    settings = {
        "command": shlex.join(["radixcache", *sys.argv[1:]]),
        "radixcache": __version__,
        "level": args.level,
        "arrivals": str(serving.arrivals),
        "schedule": args.schedule_policy,
        "tokens a step": args.max_num_batched_tokens,
        "seed": args.seed,
        "vocabulary": vocabulary,
        "bytes a token": token_bytes,
        "machine": conditions(),
    }
    if serving.speculate:
        settings["drafts"] = "at engine level"
    if args.windows is not None:
        settings["windows of"] = args.windows
    if args.states is not None:
        settings["states"] = args.states
    if model is not None:
        settings |= {"model": args.model or "tabletalk", "device": str(model.device)}
    if args.kv_cache_dtype is not None:
        settings["KV"] = args.kv_cache_dtype
    if model is not None and model.quantized_activations:
        settings["activations"] = "8 bits"
    return settings
