"""Which workloads a benchmark runs: generated, on public data, or from a file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from radixcache.bench.args import DEFAULT, TRACES, BenchArgs
from radixcache.bench.workloads.block_traces import load_trace
from radixcache.bench.workloads.byte_level_bpe import train_encoder
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.public_data import PUBLIC, load_public
from radixcache.bench.workloads.records import read_text
from radixcache.bench.workloads.rendered import Joined, Templated, load_texts
from radixcache.bench.workloads.texts import holds_requests
from radixcache.bench.workloads.workload import Workload
from radixcache.errors import InvalidRequest

if TYPE_CHECKING:
    from radixcache.runtime.tokens.tokenizer import Tokenizer

_TRAINED_ON = 1 << 23
"""Characters of a file from which a tokenizer is trained, in pieces: a word without end is slow."""


def choose(args: BenchArgs, vocabulary: int) -> list[Workload]:
    """The workloads that the settings name."""
    names = args.workloads or ([] if args.file else DEFAULT)
    chosen = [
        load_public(name) if name in PUBLIC else generate(name, args.seed, vocabulary)
        for name in names
    ]
    if args.file is None or args.format is None:
        return chosen
    if args.format != "requests" and holds_requests(args.file):
        raise InvalidRequest(
            f"{args.file}: each line is a request with its whole history, as a gateway logs it: "
            f"say --format requests"
        )
    if args.format in TRACES:
        trace = load_trace(
            args.file, hash_block=args.hash_block, vocabulary=vocabulary, limit=args.limit
        )
        return [*chosen, trace]
    if (tokenizer := _tokenizer(args)) is None:
        text = read_text(args.file)[:_TRAINED_ON]
        encode = train_encoder(text[at : at + 4096] for at in range(0, len(text), 4096))
    else:
        encode = partial(tokenizer.encode, special=False)
    as_sent = tokenizer if args.format == "requests" else None
    renderer = Templated(as_sent) if as_sent is not None else Joined(encode)
    return [*chosen, load_texts(args.file, args.format, renderer, limit=args.limit)]


def _tokenizer(args: BenchArgs) -> Tokenizer | None:
    """The model's, if one is named or needed; else one is trained on the file itself."""
    if args.model is None and args.level == "index":
        return None
    from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
    from radixcache.runtime.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.model or str(BUNDLED_MODEL))
    if tokenizer is None:
        raise InvalidRequest(f"{args.model} has no tokenizer")
    return tokenizer
