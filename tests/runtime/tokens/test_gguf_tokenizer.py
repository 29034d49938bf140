"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was made of."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from radixcache import ModelError
from radixcache.runtime.gguf_file import GGUFFile
from radixcache.runtime.tokens.gguf_tokenizer import read_tokenizer
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.gguf_files import gguf_bytes, write_model
from tests.runtime.tokens.tiny_tokenizers import CORPUS, byte_level

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
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


def byte_level_metadata(backend: Backend, **more: Any) -> dict[str, Any]:
    """The metadata of a byte-level BPE, three tokens added that are no text and one that is."""
    model = json.loads(backend.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [NORMAL] * len(vocabulary)
    for token, kind in (
        *(("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<｜pad｜>", CONTROL)),
        ("<think>", USER_DEFINED),
    ):
        vocabulary.append(token)
        types.append(kind)
    size = len(vocabulary)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": size - 4,
        "tokenizer.ggml.eos_token_id": size - 3,
        "tokenizer.ggml.padding_token_id": size - 2,
        **more,
    }


@pytest.fixture(scope="module")
def original() -> Backend:
    backend = byte_level()
    backend.no_truncation()
    return Backend.from_str(json.dumps({**json.loads(backend.to_str()), "added_tokens": []}))


def opened(path: Path, metadata: dict[str, Any]) -> Any:
    file = path / "model.gguf"
    file.write_bytes(gguf_bytes({key: v for key, v in metadata.items() if v is not None}))
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
        assert found.decode(ids) == text
    shown = found.encode("<|im_start|>a<think>b<｜pad｜>")
    assert [token for token in shown if token >= size] == [size, size + 3, size + 2]
    assert found.decode(shown, skip_special_tokens=True) == "a<think>b"
    assert (found.bos_token, found.eos_token, found.pad_token, found.unk_token) == (
        *("<|im_start|>", "<|im_end|>", "<｜pad｜>"),
        None,
    )


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("gpt-2", "I'VE don't 12345  x", ["I", "'", "VE", " don", "'t", " 12345", " ", " x"]),
        ("default", "a1\n\nb", ["a", "1", "\n", "\n", "b"]),
        ("smollm", "a1 23", ["a", "1", " ", "2", "3"]),
        ("llama-bpe", "I'VE (x) 1234!\n\n y", "I|'VE| (|x|)| |123|4|!\n\n| y".split("|")),
        ("qwen2", "I'Ve 123\r\n  y", ["I", "'Ve", " ", "1", "2", "3", "\r\n", " ", " y"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
    ],
)  # fmt: skip
def test_text_is_cut_by_the_rule_that_the_file_names(tmp_path, original, rule, text, pieces):
    found = opened(tmp_path, byte_level_metadata(original, **{"tokenizer.ggml.pre": rule}))
    cut = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_only_qwen2_composes_text(tmp_path, original):
    for rule, ids_are_equal in (("qwen2", True), ("smollm", False), ("deepseek-r1-qwen", False)):
        found = opened(tmp_path, byte_level_metadata(original, **{"tokenizer.ggml.pre": rule}))
        assert (found.encode("cafe\u0301") == found.encode("caf\u00e9")) is ids_are_equal


def test_what_is_a_token_as_a_whole_is_not_merged_by_the_rule_of_llama_3(tmp_path, original):
    metadata = byte_level_metadata(original)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zqx"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], NORMAL]
    at = len(metadata["tokenizer.ggml.tokens"]) - 1
    for rule, whole in (("llama-bpe", True), ("gpt-2", False)):
        found = opened(tmp_path, {**metadata, "tokenizer.ggml.pre": rule})
        assert (found.encode("zqx", add_special_tokens=False) == [at]) is whole


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
    metadata = byte_level_metadata(original, **{f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    found = opened(tmp_path, metadata)
    ids, bare = found.encode("cats"), found.encode("cats", add_special_tokens=False)
    before, after = ([found.bos_token_id] * wanted[0], [found.eos_token_id] * wanted[1])
    assert ids == [*before, *bare, *after]


def test_chat_templates_are_those_of_the_file(tmp_path, original):
    metadata = byte_level_metadata(original)
    assert opened(tmp_path, metadata).chat_template is None
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    assert opened(tmp_path, metadata).chat_template == "{{ messages[0].content }}"
    metadata["tokenizer.chat_template.tool_use"] = "with tools"
    found = opened(tmp_path, metadata).chat_template
    assert found == {"default": "{{ messages[0].content }}", "tool_use": "with tools"}


# SentencePiece

LETTERS = "abcdehlorst\u2581T.12"
WORDS = "th he the _the er her other _other at cat _cat cats __ ___ ll ab ba aba".replace(
    "_", "\u2581"
)


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types, scores = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256], [0.0] * 259
    for rank, token in enumerate([*WORDS.split(" "), *LETTERS]):
        tokens.append(token)
        types.append(NORMAL)
        scores.append(-float(rank))
    tokens.append("[INST]")
    types.append(USER_DEFINED)
    scores.append(-1000.0)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


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
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix})
    found, begins = opened(tmp_path, metadata), prefix is not False
    rng = np.random.default_rng(1)
    parts = [*LETTERS.replace("\u2581", " "), "the", "other ", "cats", "ä", "🙂", "\n", "x", "  "]
    for _ in range(500):
        text = "".join(rng.choice(parts, rng.integers(0, 15)))
        ids = found.encode(text, add_special_tokens=False)
        assert ids == by_scores(text, metadata, begins), text
        assert found.decode(ids) == text
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
    assert found.decode([*cat, inst, 2], skip_special_tokens=True) == "cat[INST]"


# Refusals


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
    keys = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    metadata = {k: v for k, v in byte_level_metadata(original, **keys).items() if v is not None}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata))
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
