"""What grammars know of a tokenizer's tokens is what llguidance reads out of the tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from radixcache import InvalidRequest
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.helpers.schemas import random_schema
from tests.runtime.tokens import tiny_tokenizers as tiny

TEXTS = ["hello world", " a a", "  a\n\n b", "é中🙃", '{"a": [1, "<b>x</b>"]}', "", "The end"]
ADDED = ["<tag>", "<x y>", "[x]", "\u2581\u2581", "\u0120中", "   ", "<eos>"]


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


@pytest.mark.parametrize("kind", tiny.KINDS, ids=lambda kind: kind.__name__)
def test_tiny_vocabularies(kind) -> None:
    backend = kind()
    backend.add_tokens([AddedToken(x, normalized=False, special=x == "<eos>") for x in ADDED])
    size, tokenizer = backend.get_vocab_size(), tiny.wrap(backend)
    if kind in (tiny.unigram, tiny.word_piece):
        with pytest.raises(InvalidRequest, match="byte-level or has a byte fallback"):
            tokenizer.vocabulary(size)
    else:
        assert_as_llguidance_reads_it(tokenizer, size + 5, [size - 1])
        with pytest.raises(InvalidRequest, match=rf"token {size - 1:,}, and the model has"):
            tokenizer.vocabulary(size - 1)


def test_a_vocabulary_that_llguidance_panics_at_is_refused_in_a_sentence() -> None:
    backend = tiny.byte_level()
    backend.add_tokens(["x" * 5000])
    with pytest.raises(InvalidRequest, match="cannot read the tokenizer: assertion failed"):
        GrammarBackend(tiny.wrap(backend), 500, [1]).read_vocabulary()
