"""Which workloads a benchmark runs: generated, on public data, or from a file."""

from __future__ import annotations

import argparse

from radixcache.bench.workloads import block_traces, loaders
from radixcache.bench.workloads.byte_level_bpe import Encode, train_encoder
from radixcache.bench.workloads.generators import generate
from radixcache.bench.workloads.public_data import PUBLIC, load_public
from radixcache.bench.workloads.records import read_text
from radixcache.bench.workloads.workload import Workload
from radixcache.errors import InvalidRequest

DEFAULT = ("chat", "few-shot", "best-of-n", "documents")
"""One for each reason: turns whose ends fill no block, questions after the same examples, samples
of one short prompt, and texts so long that only eviction counts."""

TRACES = {"mooncake": block_traces.load_mooncake, "sessions": block_traces.load_sessions}
TEXTS = {
    "sharegpt": loaders.load_sharegpt,
    "messages": loaders.load_messages,
    "prompts": loaders.load_prompts,
}
FORMATS = (*TRACES, *TEXTS)

_TRAINED_ON = 1 << 23
"""Characters of a file from which a tokenizer is trained, in pieces: a word without end is slow."""


def choose(args: argparse.Namespace, vocabulary: int) -> list[Workload]:
    """The workloads that the flags of the command name.

    Raises:
        InvalidRequest: there is no such workload, or the file is not what it is said to be.
    """
    names = args.workloads or ([] if args.file else DEFAULT)
    chosen = [
        load_public(name) if name in PUBLIC else generate(name, args.seed, vocabulary)
        for name in names
    ]
    if args.format in TRACES:
        load = TRACES[args.format]
        chosen.append(
            load(args.file, hash_block=args.hash_block, vocabulary=vocabulary, limit=args.limit)
        )
    elif args.file is not None:
        chosen.append(TEXTS[args.format](args.file, _encoder(args), limit=args.limit))
    return chosen


def _encoder(args: argparse.Namespace) -> Encode:
    """The model's tokenizer if one is named or needed, else one trained on the file itself."""
    if args.model is None and args.level == "index":
        text = read_text(args.file)[:_TRAINED_ON]
        return train_encoder(text[at : at + 4096] for at in range(0, len(text), 4096))
    from radixcache.runtime.files import BUNDLED_MODEL
    from radixcache.runtime.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.model or str(BUNDLED_MODEL))
    if tokenizer is None:
        raise InvalidRequest(f"{args.model} has no tokenizer")
    return lambda text: tokenizer.encode(text, special=False)
