"""What grammars know of a tokenizer's tokens is what llguidance reads out of the tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from radixcache import InvalidRequest
from radixcache.runtime.sampling.grammar import GrammarBackend
from tests.runtime.engine.grammars import assert_as_llguidance_reads_it
from tests.runtime.tokens import tiny_tokenizers as tiny

ADDED = ["<tag>", "<x y>", "[x]", "\u2581\u2581", "\u0120中", "   ", "<eos>"]


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
