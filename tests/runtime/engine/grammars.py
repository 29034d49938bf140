"""A small vocabulary, structures that engines over it are held to, and llguidance's own reading."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from radixcache import SamplingParams, StructuredOutputsParams
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.helpers.hash_model import HashModel, force_no_tokens, hash_engine
from tests.helpers.schemas import random_schema

SEED = 20_261_122
VOCAB, EOS = 2176, 1  # of the bundled model

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "department": {"enum": ["sales", "law"]},
    },
    "required": ["name", "department"],
    "additionalProperties": False,
}

ADDRESS = 'root ::= street " " [0-9]+ "!"\nstreet ::= ("High" | "Low") " Street"'

STRUCTURES = {
    "json": StructuredOutputsParams.json(PERSON),
    "regex": StructuredOutputsParams.regex("(ab|b+)c{2,3}[0-9]{3} (the end|an end)"),
    "choice": StructuredOutputsParams.choice(["yes, of course", "no", 'ein "é" 😀\n']),
    "grammar": StructuredOutputsParams.grammar(ADDRESS),
    "json_object": StructuredOutputsParams.json_object(),
}


@cache
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(str(BUNDLED_MODEL))
    assert loaded is not None
    return loaded


@cache
def grammar_backend() -> GrammarBackend:
    return GrammarBackend(tokenizer(), VOCAB, [EOS])


def make_engine(*, forces: bool = True, num_pages: int = 1000, tokens: int = 200) -> Engine:
    """Over a model whose every token depends on all tokens before it."""
    text = tokenizer()
    engine = hash_engine(
        num_pages=num_pages, max_num_batched_tokens=tokens, max_num_seqs=32,
        model=HashModel(VOCAB, EOS), decode=text.decode,
        encode=lambda word: text.encode(word, special=False), grammar_backend=grammar_backend(),
    )  # fmt: skip
    if not forces:
        force_no_tokens(engine)
    return engine


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(str(BUNDLED_MODEL / "tokenizer.json"), VOCAB, [EOS])


TEXTS = ["hello world", " a a", "  a\n\n b", "é中🙃", '{"a": [1, "<b>x</b>"]}', "", "The end"]


def assert_as_llguidance_reads_it(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
    """The bytes of all tokens, how text becomes tokens, and masks along random answers."""
    _, ours, _ = GrammarBackend(tokenizer, size, ends).read_vocabulary()
    theirs = LLTokenizer(str(tokenizer.serialised), size, [*ends])
    assert ours.eos_tokens == theirs.eos_tokens
    for token in range(size):
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token])
        assert ours.is_special_token(token) == theirs.is_special_token(token)
    for token in [*range(0, tokenizer.info["vocab_size"], 97), *tokenizer.added]:
        assert tokenizer.token_bytes(token) == ours.decode_bytes([token])
    assert [ours.decode_bytes(ours.tokenize_str(text)) for text in TEXTS] == [
        *map(str.encode, TEXTS)
    ]
    if (shown := theirs.decode_bytes(theirs.tokenize_str("a"))) != b"a":
        assert shown == b" a"  # for what is forced, theirs looks for tokens of another text
        return
    assert [*map(ours.tokenize_str, TEXTS)] == [*map(theirs.tokenize_str, TEXTS)]
    rng = random.Random(size)
    for _ in range(10):
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(random_schema(rng)))
        matchers = [LLMatcher(tokens, grammar, log_level=0) for tokens in (ours, theirs)]
        while not matchers[0].is_stopped() and rng.random() < 0.98:
            mask, same_mask = (matcher.compute_bitmask() for matcher in matchers)
            assert mask == same_mask
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            assert [matcher.consume_token(token) for matcher in matchers] == [True, True]


def ask(engine: Engine, structured: StructuredOutputsParams, *prompt: int, **how: Any) -> Request:
    """Queue a request for such an answer, greedy if nothing else is said."""
    params = SamplingParams(**{"temperature": 0, **how}, structured_outputs=structured)
    return engine.add_request([*prompt], params)
