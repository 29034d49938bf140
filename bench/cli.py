"""`radixcache bench`: caching schemes on the same requests, in the same memory."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixcache import __version__
from radixcache.bench.args import TOKEN_BYTES, WORKLOADS, BenchArgs
from radixcache.bench.choice import choose
from radixcache.bench.machine import conditions
from radixcache.bench.schemes.named import (
    HYBRID,
    INDEX_ONLY,
    find_schemes,
    parse_memory,
    windowed_schemes,
)
from radixcache.bench.schemes.windows import MODELS as WINDOWED
from radixcache.errors import InvalidRequest, MissingDependency
from radixcache.runtime.config import flags

if TYPE_CHECKING:
    from radixcache.bench.replay.index_level import Serving
    from radixcache.bench.report.results import Report
    from radixcache.runtime.model.paged_model import PagedModel

SUMMARY = "compare caching schemes: radix, hash-block, none, in the same memory"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=WORKLOADS)
    flags.add_flags(parser, BenchArgs)


def run(given: argparse.Namespace) -> int:
    args = BenchArgs.of(given)
    report = measure(args)
    from radixcache.bench.report.files import NEEDED, write
    from radixcache.bench.report.pages import as_html
    from radixcache.bench.report.terminal import print_report
    from radixcache.bench.tables import console

    if args.page is not None:
        write(args.page, as_html(report))
    if str(args.json) == "-":
        print(report.to_json())
        return 0
    if args.json is not None:
        write(args.json, report.to_json())
    shown = console()
    print_report(report, shown)
    if args.page is not None:
        shown.print(f"The report is in {args.page}.", markup=False, soft_wrap=True)
    elif args.json is None:
        shown.print(f"No report is written: it {NEEDED}.", markup=False, soft_wrap=True)
    return 0


def measure(args: BenchArgs) -> Report:
    """Raises `InvalidRequest` for schemes and amounts of memory before anything is loaded."""
    schemes = HYBRID if args.states is not None else find_schemes(args.schemes)
    if args.windows is not None:
        schemes = windowed_schemes(args.windows)
    memories = [parse_memory(text) for text in args.memory]
    rules = [scheme.name for scheme in schemes if scheme.kind in INDEX_ONLY or scheme.tier]
    if rules and args.level != "index":
        raise InvalidRequest(f"{', '.join(rules)}: at index level only, without a model")
    from radixcache.bench.comparison import compare
    from radixcache.bench.report.results import Report

    model = _load_model(args) if args.level != "index" else None
    token_bytes = args.token_bytes or (model.bytes_per_token if model else TOKEN_BYTES)
    if args.windows is not None:
        token_bytes = sum(WINDOWED[args.windows][:2])
    vocabulary = model.vocab_size if model else 1 << 15
    found = compare(
        choose(args, vocabulary), schemes, memories, _serving(args), token_bytes=token_bytes,
        with_index=args.level != "engine", model=model, repeats=args.repeats,
    )  # fmt: skip
    settings = _settings(args, model) | {"vocabulary": vocabulary, "bytes a token": token_bytes}
    return Report(settings, [*found])


def _serving(args: BenchArgs) -> Serving:
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


def _load_model(args: BenchArgs) -> PagedModel:
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
        kv_cache_dtype=args.kv_cache_dtype,
        quantized_activations=args.quantized_activations,
    )


def _settings(args: BenchArgs, model: PagedModel | None) -> dict[str, Any]:
    """The command, what it sets, files apart, and the machine."""
    settings: dict[str, Any] = {
        "command": shlex.join(["radixcache", *sys.argv[1:]]),
        "radixcache": __version__,
        "machine": conditions(),
    }
    for one in flags.settings_of(BenchArgs):
        value = getattr(args, one.name)
        if value != one.default and one.type is not Path:
            settings[one.name] = " ".join(value) if isinstance(value, list) else value
    if model is not None:
        settings |= {"model": args.model or "tabletalk", "device": str(model.device)}
        if model.quantized_activations:
            settings["activations"] = "8 bits"
    return settings
