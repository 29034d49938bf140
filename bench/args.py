"""The settings of `radixcache bench`. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from radixcache.bench.report.files import check_page, check_writable
from radixcache.bench.schemes.named import GROUPS
from radixcache.bench.schemes.windows import MODELS as WINDOWED
from radixcache.bench.workloads.generators import GENERATORS
from radixcache.bench.workloads.public_data import PUBLIC
from radixcache.bench.workloads.rendered import TEXTS
from radixcache.errors import InvalidRequest
from radixcache.runtime.config.flags import Rule, at_least, check, setting, settings_of

DEFAULT = ("chat", "few-shot", "best-of-n", "documents")
"""One for each reason: turns whose ends fill no block, questions after the same examples, samples
of one short prompt, and texts so long that only eviction counts."""

TRACES = ("mooncake", "sessions")

WORKLOADS = (
    f"{', '.join(GENERATORS)}; with numbers of their own as in chat:turns=4,user=30; or on public "
    f"data, if at hand, {', '.join(PUBLIC)} ({' '.join(DEFAULT)}, unless --file)"
)
DEFAULT_PAGE = Path("bench-report.html")
TOKEN_BYTES = 131_072  # Llama 3 8B in bfloat16: 32 layers x 8 heads x 2 x 128 x 2 bytes


def _between(low: float, high: float) -> Rule:
    return Rule(lambda value: low <= value <= high, f"must be from {low} to {high}")


def _one_of(names: Iterable[str]) -> Rule:
    return Rule(lambda value: value in names, f"must be one of {', '.join(names)}")


# Beyond, times and rates are no numbers any more.
_COUNT, _NUMBER = _between(1, 10**12), _between(1e-9, 1e12)


@dataclass(frozen=True)
class BenchArgs:
    """What is compared, on which requests, and how these come and are served.

    Raises:
        InvalidRequest: a value makes no sense, or has no effect.
    """

    workloads: Sequence[str] = field(default=())
    level: Literal["index", "engine", "both"] = setting("index", "(index)")
    schemes: Sequence[str] = setting(
        ("default",),
        "none, hash-B, radix-P, radix-P+Nx (over a tier N times its size), whole-P, aligned-P, "
        f"cow-B, prefix-B, template-B; or {', '.join(GROUPS)} (default)",
        metavar="SCHEME",
    )
    memory: Sequence[str] = setting(
        ("30%", "100%"),
        "for KV pages: tokens, 512MiB, or a share of the workload's distinct tokens (30%% 100%%)",
        metavar="SIZE",
    )
    states: int | None = setting(
        None,
        "a model with recurrent layers, where a hit needs a state besides KV (index level): "
        "compare rules which states to keep, each with N slots for them, one of which every "
        "running request takes: ours, Marconi's, SGLang's and vLLM's",
        metavar="N",
        rule=_between(2, 1 << 20),
    )
    windows: str | None = setting(
        None,
        "a model with sliding windows (index level): compare keeping all of its KV, and rules "
        f"which windows to keep, at equal bytes: ours, vLLM's and SGLang's ({', '.join(WINDOWED)})",
        metavar="MODEL",
        rule=_one_of(WINDOWED),
    )
    file: Path | None = setting(None, "trace, log or prompts; may be .gz", metavar="F")
    format: str | None = setting(
        None,
        f"what the file is ({', '.join((*TRACES, *TEXTS))})",
        metavar="FORMAT",
        rule=_one_of((*TRACES, *TEXTS)),
    )
    hash_block: int | None = setting(
        None, "tokens of an id of a trace (its own, or 512)", metavar="N", rule=_COUNT
    )
    limit: int | None = setting(
        None, "read no more than N records of the file", metavar="N", rule=_COUNT
    )
    arrivals: Literal["closed", "poisson", "trace"] = setting(
        "closed", "requests come as others end, at random, or at the file's times (closed)"
    )
    concurrency: int = setting(8, "closed: requests in flight", metavar="N", rule=_COUNT)
    rate: float | None = setting(None, "poisson: requests a second", metavar="R", rule=_NUMBER)
    speed: float = setting(1.0, "trace: times as fast as recorded", metavar="X", rule=_NUMBER)
    step_time: float = setting(0.025, "index level: seconds", metavar="S", rule=_NUMBER)
    max_num_batched_tokens: int = setting(2048, "per step", metavar="N", rule=_COUNT)
    max_num_seqs: int = setting(64, "running", metavar="N", rule=_COUNT)
    schedule_policy: Literal["fcfs", "lpm"] = setting("fcfs", "order of admission")
    model: str | None = setting(
        None, "engine level: folder, .gguf file or hub id (the bundled model)", metavar="M"
    )
    kv_cache_dtype: Literal["auto", "float16", "bfloat16", "int8", "fp8"] = setting(
        "auto", "engine level: number format of KV pages (auto: the model's)"
    )
    quantized_activations: Literal["auto", "on", "off"] = setting(
        "auto", "engine level: round activations to 8 bits before quantized weights"
    )
    device: str = setting("auto", "engine level: cpu, cuda or auto", metavar="D")
    speculate: Literal["off", "auto"] = setting("off", "engine level: draft from earlier texts")
    repeats: int = setting(3, "engine level: timed runs", metavar="N", rule=_COUNT)
    seed: int = setting(0, "of what is random", metavar="N", rule=at_least(0))
    token_bytes: int | None = setting(
        None, f"KV bytes per token ({TOKEN_BYTES})", metavar="N", rule=_COUNT
    )
    json: Path | None = setting(None, "write the figures as JSON; - shows", metavar="F")
    report: Path | None = setting(
        None, f"write a page ({DEFAULT_PAGE}, unless --json)", metavar="F"
    )

    @classmethod
    def of(cls, flags: argparse.Namespace) -> BenchArgs:
        """The settings that flags give; the others have their defaults."""
        names = ["workloads", *(one.name for one in settings_of(cls))]
        return cls(**{n: value for n in names if (value := getattr(flags, n)) is not None})

    @property
    def page(self) -> Path | None:
        """The page's file: as requested, or a default if it can be drawn and no JSON is wanted."""
        if self.report is not None or self.json is not None:
            return self.report
        return DEFAULT_PAGE if find_spec("vl_convert") else None

    def __post_init__(self) -> None:
        for flag in ("schemes", "memory"):  # which may have swallowed a workload
            for value in getattr(self, flag):
                if value.partition(":")[0] in {*GENERATORS, *PUBLIC}:
                    why = f"{value} is a workload: name it before --{flag}, not after"
                    raise InvalidRequest(why)
        check(self)
        is_index, with_times = self.level == "index", self.format in TRACES and not self.workloads
        with_schemes = [*self.schemes] != ["default"]
        for is_wrong, why in (
            (self.states and not is_index, "--states are simulated: --level index alone"),
            (self.windows and not is_index, "--windows are simulated: --level index alone"),
            (self.windows and self.states, "--windows and --states are of different models"),
            (self.windows and self.token_bytes, "--windows has its model's own --token-bytes"),
            (self.states and with_schemes, "--schemes goes without --states only"),
            (self.windows and with_schemes, "--schemes goes without --windows only"),
            (self.speculate != "off" and is_index,
             "--speculate needs a model: --level engine or both"),
            (self.kv_cache_dtype != "auto" and is_index,
             "--kv-cache-dtype is a model's: at --level index say --token-bytes"),
            ((self.file is None) != (self.format is None), "--file and --format go together"),
            (self.hash_block and self.format not in TRACES, "--hash-block goes with a trace only"),
            (self.limit and self.file is None, "--limit goes with a --file only"),
            (self.rate and self.arrivals != "poisson", "--rate goes with --arrivals poisson only"),
            (self.speed != 1 and self.arrivals != "trace",
             "--speed goes with --arrivals trace only"),
            (self.arrivals == "poisson" and not self.rate, "--arrivals poisson needs a --rate"),
            (self.arrivals == "trace" and not with_times,
             f"--arrivals trace needs a file with times, alone: --format {' or '.join(TRACES)}"),
        ):  # fmt: skip
            if is_wrong:
                raise InvalidRequest(why)
        json = None if str(self.json) == "-" else self.json
        if self.page is not None:
            check_page(self.page)
        if json is not None:
            check_writable(json)
        taken: dict[Path, str] = {}
        for flag, place in (("--file", self.file), ("--json", json), ("--report", self.page)):
            other = flag if place is None else taken.setdefault(place.resolve(), flag)
            if other != flag and place is not None and (place.is_file() or not place.exists()):
                raise InvalidRequest(f"{other} and {flag} are one file: {place}")
