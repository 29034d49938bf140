"""How many tokens a text has at least: never more than it has, and little work where it is long."""

from __future__ import annotations

import random
from math import inf

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixcache.errors import ContextExceeded
from radixcache.runtime.text.bound import TextBound
from radixcache.runtime.text.tokenizer import Tokenizer
from tests.runtime.text import tiny_tokenizers as tiny

SEED = random.randrange(1 << 30)
PIECES = [
    *(
        "the",
        " ",
        "   ",
        "\n\n",
        "cat",
        "é",
        "e\u0301",
        "\u1f82",
        "α\u0313\u0300\u0345",
        "漢",
        "🙂",
    ),
    *("<|user|>", "<|strip|>", "<|mask|>", "zzz", "한", "\u1112\u1161\u11ab", "\t", "ﬁ", "-", "İ"),
]


def nfc():
    backend = tiny.byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    return backend


def shrinking():
    backend = tiny.byte_level()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace("the", "x"), normalizers.NFKC()]
    )
    return backend


def vanishing():
    backend = tiny.byte_level()
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    return backend


def splitting_away():
    backend = tiny.byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return backend


BOUNDED = [
    *tiny.LOSSLESS, tiny.byte_level_with_prefix_space, tiny.awkward_added_tokens,
    tiny.metaspace_first, tiny.metaspace_always, tiny.prepending, nfc, shrinking,
]  # fmt: skip
UNBOUNDED = [tiny.unigram, tiny.word_piece, vanishing, splitting_away]


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_has_fewer_tokens_than_are_told(kind):
    rng = random.Random(SEED)
    backend = kind()
    bound, vocabulary = TextBound(backend), [*backend.get_vocab()]
    assert bound.least_tokens("abcdefgh" * 10_000) > 100
    for _ in range(150):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(30)))
        text += rng.choice(["", " " * 300, "the" * 100, rng.choice(vocabulary) * 40])
        tokens = len(backend.encode(text, add_special_tokens=False).ids)
        assert bound.least_tokens(text) <= tokens, f"{text!r}, seed {SEED}"


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_text_may_vanish_nothing_is_told(kind):
    assert TextBound(kind()).least_tokens("abcdefgh" * 10_000) == 0


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch):
    fast = PreTrainedTokenizerFast(tokenizer_object=tiny.tabletalk())
    tokenizer = Tokenizer(fast, max_tokens=4096)
    texts: list[str] = []

    def count(text: str, *args: object, **options: object) -> dict[str, list[int]]:
        texts.append(text)
        return {"input_ids": [], "offset_mapping": []}

    monkeypatch.setattr(type(fast), "__call__", count)
    monkeypatch.setattr(fast, "encode", count)
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(ContextExceeded, match=r"of 1000000 characters .* context of 4096$"):
            encode("a" * 1_000_000)
    assert not texts
    tokenizer.encode("a" * 4096)
    assert texts


def test_tokenizers_have_no_limit_if_none_is_given():
    assert len(tiny.wrap(tiny.byte_level()).encode("z" * 5000)) > 1000
    assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tiny.unigram()), inf).encode("the")


def test_padding_and_truncation_of_a_file_are_off_before_threads_come():
    """Each is one setting of the backend, which nobody may change while another tokenises."""
    backend = tiny.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.add_tokens([AddedToken("<x>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    Tokenizer(fast)
    assert fast.backend_tokenizer.truncation is None and fast.backend_tokenizer.padding is None
