"""What grammars know of a tokenizer's tokens is what llguidance reads out of the tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixcache import InvalidRequest, StructuredOutputsParams
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.tokens import tokenizer as tokenizers_module
from tests.helpers.schemas import random_schema

TEXTS = ["hello world", " a a", "  a\n\n b", "é中🙃", '{"a": [1, "<b>x</b>"]}', "", "\x00"]
ADDED = ["<eos>", "<tag>", "<x y>", "[x]", "\u2581\u2581", "\u0120中", "  "]


def byte_level() -> Tokenizer:
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def of_characters(prefix: bool) -> Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "a", "\u2581a", "中", '"', "{"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def with_added(backend: Tokenizer) -> tokenizers_module.Tokenizer:
    backend.add_tokens(
        [AddedToken(text, normalized=False, special=text == "<eos>") for text in ADDED]
    )
    return tokenizers_module.Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def assert_as_llguidance_reads_it(
    tokenizer: tokenizers_module.Tokenizer, size: int, ends: Sequence[int], answers: int = 10
) -> None:
    """The bytes of all tokens, how text becomes tokens, and masks along random answers."""
    backend = GrammarBackend(tokenizer, size, ends)
    _, ours, _ = backend.read_vocabulary()
    assert tokenizer.serialised is not None
    theirs = LLTokenizer(tokenizer.serialised, size, [*ends])
    assert ours.eos_tokens == theirs.eos_tokens
    for token in range(size):
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token])
        assert ours.is_special_token(token) == theirs.is_special_token(token)
        if token % 97 == 0 or token in tokenizer.added:
            assert tokenizer.token_bytes(token) == ours.decode_bytes([token])
    assert [*map(ours.tokenize_str, TEXTS)] == [*map(theirs.tokenize_str, TEXTS)]
    rng = random.Random(size)
    for _ in range(answers):
        schema = json.dumps(random_schema(rng))
        matchers = [
            LLMatcher(tokens, LLMatcher.grammar_from_json_schema(schema), log_level=0)
            for tokens in (ours, theirs)
        ]
        for _ in range(40):
            (forced, expected) = (matcher.compute_ff_tokens() for matcher in matchers)
            (mask, same) = (matcher.compute_bitmask() for matcher in matchers)
            assert forced == expected and mask == same
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            accepted = [matcher.consume_token(token) for matcher in matchers]
            assert all(accepted)
            if matchers[0].is_stopped():
                break


@pytest.mark.parametrize("kind", ["byte-level", "of characters", "with a space before"])
def test_small_vocabularies(kind: str) -> None:
    backend = byte_level() if kind == "byte-level" else of_characters(kind != "of characters")
    tokenizer = with_added(backend)
    size = backend.get_vocab_size()
    assert_as_llguidance_reads_it(tokenizer, size + 5, [size - len(ADDED)])


def test_the_bundled_models() -> None:
    tokenizer = tokenizers_module.Tokenizer.load(str(BUNDLED_MODEL))
    assert tokenizer is not None
    assert_as_llguidance_reads_it(tokenizer, 2176, [1])


@pytest.mark.parametrize(
    ("size", "decoder", "reason"),
    [(262, None, "268, and the model has 262 logits"), (300, decoders.WordPiece(), "byte-level")],
)
def test_what_cannot_be_read_is_one_sentence(size, decoder, reason) -> None:
    backend = of_characters(False)
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(InvalidRequest, match=reason):
        GrammarBackend(with_added(backend), size, [1]).compile(StructuredOutputsParams.regex("a"))
