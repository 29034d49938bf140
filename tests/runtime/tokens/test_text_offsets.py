"""Where tokens begin in a text, and their bytes, against decoding everything at once."""

from __future__ import annotations

import random

import pytest

from radixcache.runtime.tokens.detokenizer import TextOffsets
from tests.runtime.tokens import tiny_tokenizers as tiny

SEED = 20_261_127
PIECES = [" ", "The", "cats", " end", "é", "漢字", "🙂", "\n", "12", "Ж", "<|end|>", "\ufffd", "  "]


@pytest.mark.parametrize("kind", tiny.KINDS, ids=lambda kind: kind.__name__)
def test_offsets_are_those_of_the_whole_text_and_bytes_of_tokens_make_it(kind) -> None:
    tokenizer, rng = tiny.wrap(kind()), random.Random(SEED)
    for _ in range(100):
        text, shown = "".join(rng.choices(PIECES, k=rng.randint(1, 12))), rng.random() < 0.5
        ids = tokenizer.encode(text, special=False)
        if kind in tiny.LOSSLESS:
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        whole, start = tokenizer.decode(ids, special=shown), rng.choice([0, 7])
        places = TextOffsets(tokenizer, start, shown)
        offsets = [places.add(token) - start for token in ids]
        assert offsets == sorted(offsets), f"{text!r}, seed {SEED}"
        for place, at in enumerate(offsets):
            before = tokenizer.decode(ids[:place], special=shown)
            if not before.endswith("\ufffd"):
                assert at == len(before) and whole.startswith(before), f"{text!r}, seed {SEED}"


def test_bytes_of_sentencepieces_are_told_apart_from_characters() -> None:
    tokenizer = tiny.wrap(tiny.metaspace_first())
    ids = tokenizer.encode("cats 🙃", special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).strip() == "cats 🙃".encode()
    assert [*map(tokenizer.token_bytes, ids[-4:])] == [b"\xf0", b"\x9f", b"\x99", b"\x83"]
