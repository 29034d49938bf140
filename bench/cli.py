"""`radixcache bench`: caching schemes on the same requests, in the same memory."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixcache import __version__
from radixcache.bench.machine import conditions
from radixcache.bench.schemes.bounds import build_trie, lru_curve, optimal_hits, unlimited_hits
from radixcache.bench.schemes.named import GROUPS, Memory, Scheme, find_schemes, parse_memory
from radixcache.bench.workloads import loaders
from radixcache.bench.workloads.byte_level_bpe import Encode, train_encoder
from radixcache.bench.workloads.generators import GENERATORS, generate
from radixcache.bench.workloads.public_data import PUBLIC, load_public
from radixcache.bench.workloads.workload import Workload
from radixcache.errors import InvalidRequest, MissingDependency

if TYPE_CHECKING:
    from radixcache.bench.replay.index_level import Serving
    from radixcache.bench.report.results import WorkloadReport
    from radixcache.runtime.model.paged_model import PagedModel

SUMMARY = "compare caching schemes: radix, hash-block, none, in the same memory"

LEVELS = ("index", "engine", "both")
FORMATS = ("mooncake", "sharegpt", "messages", "prompts")
_TOKEN_BYTES = 131_072  # Llama 3 8B in bfloat16: 32 layers x 8 heads x 2 x 128 x 2 bytes


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help=f"{', '.join(GENERATORS)}; with numbers of their own as in chat:turns=4,user=30; or "
        f"on public data, if at hand, {', '.join(PUBLIC)} (every synthetic one, unless --file)",
    )
    parser.add_argument("--level", choices=LEVELS, default="index", help="(index)")
    parser.add_argument(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        default=["default"],
        help=f"none, hash-B, radix-P, whole-P, aligned-P; or {', '.join(GROUPS)} (default)",
    )
    parser.add_argument(
        "--memory",
        nargs="+",
        metavar="SIZE",
        default=["30%", "100%"],
        help="for KV pages: tokens, 512MiB, or a share of the workload's distinct tokens "
        "(30%% 100%%)",
    )
    files = parser.add_argument_group("requests from a file")
    files.add_argument("--file", type=Path, metavar="F", help="a trace or prompts; may be .gz")
    files.add_argument("--format", choices=FORMATS, help="what the file is")
    files.add_argument("--hash-block", type=int, default=512, metavar="N", help="tokens (512)")
    files.add_argument("--limit", type=int, metavar="N", help="read no more than N records")
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--arrivals",
        choices=("closed", "poisson", "trace"),
        default="closed",
        help="as others end, at random, or at the file's times (closed)",
    )
    serving.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="closed: requests in flight (32)"
    )
    serving.add_argument("--rate", type=float, metavar="R", help="poisson: requests a second")
    serving.add_argument(
        "--step-time", type=float, default=0.025, metavar="S", help="index level: seconds (0.025)"
    )
    serving.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="per step (2048)"
    )
    serving.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="running (64)")
    serving.add_argument("--schedule", choices=("fcfs", "longest-prefix"), default="fcfs")
    engine = parser.add_argument_group("engine level")
    engine.add_argument("--model", metavar="M", help="folder or hub id (the bundled tabletalk)")
    engine.add_argument("--device", default="auto", metavar="D", help="cpu, cuda or auto")
    engine.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs (3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--token-bytes", type=int, metavar="N", help=f"KV bytes per token ({_TOKEN_BYTES})"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures as JSON; - shows")
    parser.add_argument("--report", type=Path, metavar="F", help="write a page, .html or .md")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the flags ask for."""
    schemes = find_schemes(args.schemes)
    memories = [parse_memory(text) for text in args.memory]
    _check(args)
    from radixcache.bench.report.pages import write, write_report
    from radixcache.bench.report.results import Report
    from radixcache.bench.report.terminal import print_report
    from radixcache.bench.tables import console

    model = _load_model(args) if args.level != "index" else None
    serving = _serving(args)
    token_bytes = args.token_bytes or (model.bytes_per_token if model else _TOKEN_BYTES)
    vocabulary = model.vocab_size if model else 1 << 15
    report = Report(_settings(args, token_bytes, vocabulary, model))
    for workload in _workloads(args, vocabulary):
        report.workloads.append(
            _compare(workload, schemes, memories, serving, token_bytes, args, model)
        )
    if args.report is not None:
        write_report(report, args.report)
    if str(args.json) == "-":
        print(report.to_json())
        return 0
    if args.json is not None:
        write(args.json, report.to_json())
    print_report(report, console())
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what makes no sense before anything is loaded."""
    from radixcache.bench.report.pages import check_page, check_writable

    positive = "concurrency rate step_time max_num_batched_tokens max_num_seqs repeats limit"
    for name in (*positive.split(), "hash_block", "token_bytes"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidRequest(f"--{name.replace('_', '-')} must be more than 0, not {value}")
    if args.seed < 0:
        raise InvalidRequest(f"--seed must be at least 0, not {args.seed}")
    if (args.file is None) != (args.format is None):
        raise InvalidRequest("--file and --format go together")
    if args.arrivals == "poisson" and args.rate is None:
        raise InvalidRequest("--arrivals poisson needs a --rate")
    if args.arrivals == "trace" and (args.format != "mooncake" or args.workloads):
        raise InvalidRequest("--arrivals trace needs a file with times: --format mooncake, alone")
    if args.report is not None:
        check_page(args.report)
    if args.json is not None and str(args.json) != "-":
        check_writable(args.json)


def _serving(args: argparse.Namespace) -> Serving:
    from radixcache.bench.replay.index_level import Serving
    from radixcache.bench.replay.play import Arrivals

    arrivals = {
        "closed": Arrivals(concurrency=args.concurrency),
        "poisson": Arrivals(rate=args.rate, seed=args.seed),
        "trace": Arrivals(as_recorded=True),
    }[args.arrivals]
    return Serving(
        arrivals, args.max_num_batched_tokens, args.max_num_seqs, args.schedule, args.step_time
    )


def _workloads(args: argparse.Namespace, vocabulary: int) -> Iterator[Workload]:
    for name in args.workloads or ([] if args.file else GENERATORS):
        yield load_public(name) if name in PUBLIC else generate(name, args.seed, vocabulary)
    if args.format == "mooncake":
        yield loaders.load_mooncake(
            args.file, hash_block=args.hash_block, vocabulary=vocabulary, limit=args.limit
        )
    elif args.file is not None:
        load = {
            "sharegpt": loaders.load_sharegpt,
            "messages": loaders.load_messages,
            "prompts": loaders.load_prompts,
        }[args.format]
        yield load(args.file, _encoder(args), limit=args.limit)


def _encoder(args: argparse.Namespace) -> Encode:
    """The model's tokenizer if one is named or needed, else one trained on the file itself."""
    if args.model is None and args.level == "index":
        return train_encoder([loaders.read_text(args.file)])
    from radixcache.runtime.llm import BUNDLED_MODEL
    from radixcache.runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.model or str(BUNDLED_MODEL))
    if tokenizer is None:
        raise InvalidRequest(f"{args.model} has no tokenizer")
    return lambda text: tokenizer.encode(text, special=False)


def _load_model(args: argparse.Namespace) -> PagedModel:
    try:
        from transformers.utils import logging

        from radixcache.runtime.llm import BUNDLED_MODEL
        from radixcache.runtime.model.load import load_model
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"a model needs {error.name}: pip install '.[runtime,bench]' in a checkout"
        ) from error

    if args.model is None:
        logging.disable_progress_bar()
    return load_model(args.model or BUNDLED_MODEL, device=args.device)


def _compare(
    workload: Workload,
    schemes: list[Scheme],
    memories: list[Memory],
    serving: Serving,
    token_bytes: int,
    args: argparse.Namespace,
    model: PagedModel | None,
) -> WorkloadReport:
    """One workload in all schemes and memories."""
    from radixcache.bench.replay.index_level import run_index
    from radixcache.bench.report.results import WorkloadReport

    count = len(workload.arrivals)
    with _progress(f"{workload.name}: bounds", count) as tick:
        trie = build_trie(workload, progress=tick)
    found = WorkloadReport(
        workload.name,
        workload.shape,
        count,
        workload.prompt_tokens,
        workload.answer_tokens,
        trie.footprint,
        unlimited_hits(trie),
    )
    sizes = np.linspace(workload.longest, max(trie.footprint, workload.longest), 60).astype(int)
    for scheme in schemes:
        if scheme.name in _CURVES:
            size = scheme.page_size
            curve = lru_curve(trie if size == 1 else build_trie(workload, size))
            found.curves[scheme.name] = [
                (int(size), curve.hits(int(size)) / workload.prompt_tokens) for size in sizes
            ]
    for memory in memories:
        tokens = memory.tokens(trie.footprint, token_bytes, schemes)
        found.optimal_hits[tokens] = optimal_hits(trie, tokens)
        for scheme in schemes if args.level != "engine" else ():
            with _progress(f"{workload.name} {memory.text} {scheme.name}", count) as tick:
                found.rows.append(run_index(workload, scheme, tokens, serving, memory.text, tick))
        if model is not None:
            from radixcache.bench.replay.engine_level import run_engine

            runs = count * len(schemes) * (args.repeats + 1)
            with _progress(f"{workload.name} {memory.text} engine", runs) as tick:
                found.rows += run_engine(
                    workload,
                    schemes,
                    tokens,
                    serving,
                    model,
                    repeats=args.repeats,
                    memory=memory.text,
                    progress=tick,
                )
    return found


_CURVES = ("radix-1", "hash-16", "hash-64", "hash-256")
"""Schemes whose hits at every size of memory one pass gives."""


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], object]]:
    from tqdm import tqdm

    with tqdm(
        total=total, desc=name, unit="req", leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        yield bar.update


def _settings(
    args: argparse.Namespace, token_bytes: int, vocabulary: int, model: PagedModel | None
) -> dict[str, Any]:
    arrivals = {
        "closed": f"closed loop of {args.concurrency}",
        "poisson": f"Poisson, {args.rate} a second",
        "trace": "as recorded",
    }[args.arrivals]
    settings = {
        "radixcache": __version__,
        "level": args.level,
        "arrivals": arrivals,
        "schedule": args.schedule,
        "tokens a step": args.max_num_batched_tokens,
        "seed": args.seed,
        "vocabulary": vocabulary,
        "bytes a token": token_bytes,
        "machine": conditions(),
    }
    if model is not None:
        settings |= {"model": args.model or "tabletalk", "device": str(model.device)}
    return settings
