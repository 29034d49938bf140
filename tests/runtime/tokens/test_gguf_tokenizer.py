"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from radixcache import ModelError
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.tokens import gguf_tokenizer
from radixcache.runtime.tokens.gguf_tokenizer import _CUTS, read_tokenizer
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.helpers.gguf.files import gguf_bytes, write_model
from tests.helpers.gguf.tokenizers import (
    LETTERS,
    NORMAL,
    byte_level_metadata,
    sentencepiece_metadata,
)
from tests.runtime.tokens.tiny_tokenizers import CORPUS, byte_level

PARTS = [
    *"a b e o T 1 23 4567 3.14 é e\u0301 ß 漢字 と Привет 🙂 👨‍👩‍👧 ﬁ １２３ ¼ ’s".split(" "),
    *("\u00a0", "\u200b", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "'s", "'S", "'LL"),
    *("<|im_start|>", "<|im_end|>", "<think>", "<s>", "the other", "def main(args):\n    ", "!!!"),
]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    made = ["".join(rng.choice(PARTS, rng.integers(1, 20))) for _ in range(count)]
    whole = "".join(CORPUS) * 3
    starts = rng.integers(0, len(whole), count)
    return ["", *CORPUS, *made, *(whole[at : at + 40] for at in starts)]


@pytest.fixture(scope="module")
def original() -> Backend:
    backend = byte_level()
    backend.no_truncation()
    return Backend.from_str(json.dumps({**json.loads(backend.to_str()), "added_tokens": []}))


def opened(path: Path, metadata: dict[str, Any]) -> Any:
    file = path / "model.gguf"
    file.write_bytes(gguf_bytes(metadata))
    return read_tokenizer(GGUFFile(file))


def test_a_byte_level_vocabulary_gives_the_ids_of_its_tokenizer(tmp_path, original):
    metadata = byte_level_metadata(original)
    found = opened(tmp_path, metadata)
    size = original.get_vocab_size()
    original.add_special_tokens(["<|im_start|>", "<|im_end|>", "<｜pad｜>"])
    original.add_tokens(["<think>"])
    assert len(found) == size + 4
    for text in texts(500):
        ids = found.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids
        assert found.backend_tokenizer.decode(ids, skip_special_tokens=False) == text
    shown = found.encode("<|im_start|>a<think>b<｜pad｜>")
    assert [token for token in shown if token >= size] == [size, size + 3, size + 2]
    assert found.backend_tokenizer.decode(shown) == "a<think>b"
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (found.pad_token, found.unk_token) == ("<｜pad｜>", None)


@pytest.mark.parametrize(
    ("rule", "text", "pieces", "keeps_whole"),
    [
        ("gpt-2", "I'VE don't 12345  x", "I|'|VE| don|'t| 12345| | x".split("|"), False),
        ("default", "a1\n\nb", ["a", "1", "\n", "\n", "b"], False),
        ("smollm", "a1 23", ["a", "1", " ", "2", "3"], False),
        ("llama-bpe", "I'VE (x) 1234!\n\n y", "I|'VE| (|x|)| |123|4|!\n\n| y".split("|"), True),
        ("qwen2", "I'Ve 123\r\n  y", ["I", "'Ve", " ", "1", "2", "3", "\r\n", " ", " y"], False),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"], True),
        ("deepseek-r1-qwen", "I'Ve 1", ["I", "'Ve", " ", "1"], False),
        ("glm4", "I'VE 1234", ["I", "'VE", " ", "123", "4"], True),
        ("chatglm-bpe", "I'VE 1234", ["I", "'VE", " ", "123", "4"], False),
        ("lfm2", "x 1234!", ["x", " ", "123", "4", "!"], True),
        ("command-r", "I'VE 12", ["I", "'", "VE", " ", "1", "2"], False),
        ("qwen35", "e\u0301a 12", ["e\u0301a", " ", "1", "2"], False),
        ("seed-coder", "a!!\n b 12", ["a", "!!", "\n", " b", " ", "1", "2"], False),
        ("gpt-4o", "HelloWORLDs's 1234/\n", "Hello|WORLDs's| |123|4|/\n".split("|"), False),
        ("minimax-m2", "aB'LL", ["a", "B'LL"], False),
        ("a.x-4.0", "a 12\n\nb", ["a", " 12", "\n", "\n", "b"], False),
        ("mellum2", "a 12", ["a", " ", "1", "2"], False),
        ("solar-open", "I'Ve 12!\n\nb", ["I", "'Ve", " ", "1", "2", "!\n\n", "b"], False),
        ("tiny_aya", "aB 1234567", ["a", "B", " ", "1", "234", "567"], False),
        ("exaone-moe", "(we are 12!\n\nb", "(we are| |1|2|!\n|\n|b".split("|"), False),
        ("bailingmoe2", "I'm\n\na!\n\n", ["I", "'m", "\n\n", "a", "!\n\n"], False),
        ("laguna", "a \n\n b", ["a", " ", "\n\n", " b"], False),
        ("minicpm5", "a  1234", ["a", "  ", "123", "4"], True),
        ("deepseek-v3", "f(x) 漢字と1234.go", "f|(x|)| |漢字と|123|4|.go".split("|"), False),
        ("deepseek-llm", "Fé (x) 漢字 123", "F|é| (|x|)| |漢字| |123".split("|"), False),
        ("deepseek-llm", "aՀա\n\n。! ", "a|Հ|ա|\n|\n|。|!| ".split("|"), False),
        ("kimi-k2", "we'LL3 漢字と1234 Ab漢", "we'LL|3| |漢字|と|123|4| Ab|漢".split("|"), False),
        ("deepseek-coder", "f(x) 漢 12 +=", "f|(|x|)| |漢| |1|2| +=".split("|"), False),
    ],
)  # fmt: skip
def test_text_is_cut_by_the_rule_that_the_file_names(
    tmp_path, original, rule, text, pieces, keeps_whole
):
    """Some compose text; by some, what is a token as a whole is not merged."""
    found = opened(tmp_path, byte_level_metadata(original, "zqx", pre=rule))
    cut = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces
    composes = rule in ("qwen2", "qwen35", "command-r", "olmo", "exaone-moe")
    assert (found.encode("cafe\u0301") == found.encode("caf\u00e9")) is composes
    whole = [found.backend_tokenizer.token_to_id("zqx")]
    assert (found.encode("zqx", add_special_tokens=False) == whole) is keeps_whole


@pytest.mark.parametrize("rule", sorted(_CUTS))
def test_another_engine_of_patterns_cuts_alike(tmp_path, original, rule):
    engine = pytest.importorskip("regex")
    found, cut = opened(tmp_path, byte_level_metadata(original, pre=rule)), _CUTS[rule]
    for text in texts(100):
        text = text.replace("¼", "")  # which only one of them takes for a letter
        pieces = [text]
        for pattern in (*cut.before, cut.pattern):
            pieces = [part for piece in pieces for part in cut_by(engine, pattern, piece)]
        got = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in got] == pieces


def cut_by(engine: Any, pattern: str, text: str) -> Iterator[str]:
    """What a pattern matches, and what is between."""
    at = 0
    for match in engine.finditer(pattern, text):
        yield from filter(None, (text[at : match.start()], match[0]))
        at = match.end()
    yield from filter(None, [text[at:]])


@pytest.mark.parametrize(
    ("rule", "bos", "eos", "wanted"),
    [
        ("gpt-2", None, None, (False, False)),
        ("gpt-2", True, True, (True, True)),
        ("gpt-2", False, True, (False, True)),
        ("llama-bpe", None, None, (True, False)),
        ("llama-bpe", False, None, (False, False)),
    ],
)
def test_what_stands_around_a_text_is_that_of_the_file(tmp_path, original, rule, bos, eos, wanted):
    keys = {"pre": rule, "add_bos_token": bos, "add_eos_token": eos}
    found = opened(tmp_path, byte_level_metadata(original, **keys))
    ids, bare = found.encode("cats"), found.encode("cats", add_special_tokens=False)
    before, after = (
        [found.backend_tokenizer.token_to_id(found.bos_token)] * wanted[0],
        [found.eos_token_id] * wanted[1],
    )
    assert ids == [*before, *bare, *after]


def test_chat_templates_are_those_of_the_file(tmp_path, original):
    metadata = byte_level_metadata(original)
    assert opened(tmp_path, metadata).chat_template is None
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    assert opened(tmp_path, metadata).chat_template == "{{ messages[0].content }}"
    metadata["tokenizer.chat_template.tool_use"] = "with tools"
    found = opened(tmp_path, metadata).chat_template
    assert found == {"default": "{{ messages[0].content }}", "tool_use": "with tools"}


def by_scores(text: str, metadata: dict[str, Any], prefix: bool) -> list[int]:
    """What SentencePiece does: join the neighbours that make the best token, the first first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens) if index > 258 and token != "[INST]"}
    parts = list((" " * (prefix and text != "") + text).replace(" ", "\u2581"))
    while True:
        joined = [
            (-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not joined:
            break
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False, None])
def test_sentencepiece_joins_by_scores_and_falls_back_to_bytes(tmp_path, prefix):
    metadata = sentencepiece_metadata(add_space_prefix=prefix)
    found, begins = opened(tmp_path, metadata), prefix is not False
    rng = np.random.default_rng(1)
    parts = [*LETTERS.replace("\u2581", " "), "the", "other ", "cats", "ä", "🙂", "\n", "x", "  "]
    for _ in range(500):
        text = "".join(rng.choice(parts, rng.integers(0, 15)))
        ids = found.encode(text, add_special_tokens=False)
        assert ids == by_scores(text, metadata, begins), text
        assert found.backend_tokenizer.decode(ids, skip_special_tokens=False) == text
        assert found.encode(text) == [1, *ids]  # where the file says nothing, there is a BOS


def test_a_token_as_long_as_a_file_is_refused_quickly(tmp_path):
    """A token of n characters has n - 1 cuts, and each takes as long as it is."""
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = "a" * 5_000_000
    metadata["tokenizer.ggml.token_type"][-1] = NORMAL
    with pytest.raises(ModelError, match="token of over 256"):
        opened(tmp_path, metadata)


def test_added_tokens_of_sentencepiece_cut_the_text(tmp_path):
    metadata = sentencepiece_metadata()
    found = opened(tmp_path, metadata)
    inst = metadata["tokenizer.ggml.tokens"].index("[INST]")
    cat = by_scores("cat", metadata, True)
    assert found.encode("cat[INST]cat</s>", add_special_tokens=False) == [*cat, inst, *cat, 2]
    assert found.backend_tokenizer.decode([*cat, inst, 2]) == "cat[INST]"


def test_merges_are_the_same_with_and_without_kernels(tmp_path, monkeypatch):
    metadata = sentencepiece_metadata()
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes(metadata))
    tokens = metadata["tokenizer.ggml.tokens"] + ["\u6f22", "\u6f22\u5b57", "\u5b57", "\u6f22a"]
    ids = {token: number for number, token in enumerate(tokens)}
    rng = np.random.default_rng(0)
    pieces = {token: float(rng.integers(-9, 0)) for token in tokens if rng.random() < 0.9}
    found = gguf_tokenizer._merges(pieces, ids)
    monkeypatch.setattr("radixcache.kernels.native.library.problem", lambda: "no compiler")
    assert found == gguf_tokenizer._merges(pieces, ids)
    assert len(found) > 20


def test_gemma_4s_merges_are_those_of_the_file(tmp_path):
    metadata = sentencepiece_metadata(model="gemma4", scores=None, merges=["t h", "th e"])
    found = opened(tmp_path, metadata)
    pieces = found.backend_tokenizer.encode("the cat", add_special_tokens=False).tokens
    assert pieces == ["the", "\u2581", "c", "a", "t"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pre": "nobody-knows"}, "by the rule 'nobody-knows'"),
        ({"pre": None}, "by the rule ''"),
        ({"pre": 3}, "pre is not of type str"),
        ({"model": "bert"}, "model 'bert'"),
        ({"tokens": None}, "types of tokens"),
        ({"token_type": [1, 2]}, "2 types of tokens"),
        ({"merges": ["abc"]}, "no pairs"),
        ({"merges": None}, "or none"),
        ({"merges": ["Q\u0120 zzz"]}, "does not load"),
        ({"add_bos_token": 1, "bos_token_id": 1}, "add_bos_token is not of type bool"),
        ({"model": "llama"}, "0 scores"),
    ],
)
def test_what_would_give_other_ids_is_refused_in_one_sentence(tmp_path, original, change, said):
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(byte_level_metadata(original, **change)))
    with pytest.raises(ModelError, match=said) as error:
        Tokenizer.load(str(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    write_model(tmp_path / "model.gguf")
    assert Tokenizer.load(str(tmp_path / "model.gguf")) is None
    assert Tokenizer.load(str(tmp_path)) is None


def test_our_tokenizer_finds_the_delimiters_of_a_file(tmp_path, original):
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(byte_level_metadata(original)))
    found = Tokenizer.load(str(tmp_path))
    assert found is not None
    assert set(found.delimiters.values()) == {"<|im_start|>", "<|im_end|>", "<｜pad｜>", "<think>"}
    ids, offsets = found.encode_with_offsets("cats <|im_end|> at")
    assert offsets[-1][1] == len("cats <|im_end|> at")
    assert found.decode(ids, special=True) == "cats <|im_end|> at"
