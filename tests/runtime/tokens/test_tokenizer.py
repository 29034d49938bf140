"""A model's tokenizer is the one that transformers would take."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radixcache.errors import ContextExceeded, InvalidRequest
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.tokens.fast_tokenizer import FastTokenizer
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.helpers.models import tiny_model
from tests.runtime.tokens import tiny_tokenizers as tiny
from tests.runtime.tokens.tiny_tokenizers import CORPUS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CLASSES = "TokenizersBackend PreTrainedTokenizerFast Qwen2Tokenizer LlamaTokenizerFast".split()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny_model(family, root / family) for family in FAMILIES}


@pytest.mark.parametrize("named", [*CLASSES, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_class_and_tokens_are_those_of_auto_tokenizer(folders, family, named) -> None:
    folder = folders[family]
    file = folder / "tokenizer_config.json"
    declared = json.loads(file.read_text())
    declared.pop("tokenizer_class", None)
    file.write_text(json.dumps({**declared, "tokenizer_class": named} if named else declared))
    expected, found = AutoTokenizer.from_pretrained(folder), Tokenizer.load(str(folder))
    assert found is not None
    ours = named in CLASSES[:2] and family in ("llama", "qwen3")
    assert type(found._tokenizer) is (FastTokenizer if ours else type(expected))
    assert found.info["tokenizer_class"] == type(expected).__name__
    message = [{"role": "user", "content": "Grüße"}]
    assert found.render_chat(message) == expected.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    )
    for text in CORPUS:
        assert found.encode(text) == expected.encode(text)
        ids = expected.encode(text)
        assert found.decode(ids) == expected.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_the_bundled_models_tokenizer_is_that_of_auto_tokenizer() -> None:
    expected = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    found = Tokenizer.load(str(BUNDLED_MODEL))
    assert found is not None and type(found._tokenizer) is FastTokenizer
    assert found.info["tokenizer_class"] == type(expected).__name__
    assert found._tokenizer.get_vocab() == expected.get_vocab()
    assert found._tokenizer.chat_template == expected.chat_template


@pytest.mark.parametrize(
    ("change", "ours"),
    [
        ({}, True),
        ({"model_max_length": 9, "unk_token": None}, True),
        ({"add_bos_token": True, "bos_token": "<s>"}, False),
        ({"bos_token": "<new>"}, False),
        ({"split_special_tokens": True}, False),
        ({"extra_special_tokens": ["<new>"]}, False),
        ({"added_tokens_decoder": {"0": {"content": "<new>", "special": True}}}, False),
    ],
)
def test_settings_that_may_change_tokens_are_left_to_transformers(change, ours, tmp_path) -> None:
    folder = tiny_model("llama", tmp_path / "model")
    file = folder / "tokenizer_config.json"
    declared = {**json.loads(file.read_text()), "tokenizer_class": "TokenizersBackend", **change}
    file.write_text(json.dumps(declared))
    expected, found = AutoTokenizer.from_pretrained(folder), Tokenizer.load(str(folder))
    assert found is not None and isinstance(found._tokenizer, FastTokenizer) == ours
    for text in (*CORPUS[:5], "<s>a<new>b</s>"):
        assert found.encode(text) == expected.encode(text)
    assert found.added == {i: str(token) for i, token in expected.added_tokens_decoder.items()}


@pytest.mark.parametrize("special", [False, True])
def test_the_token_that_a_file_pads_with_is_the_models_as_in_transformers(special, tmp_path):
    folder = tiny_model("llama", tmp_path / "model")
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    declared = {**json.loads(config.read_text()), "tokenizer_class": "TokenizersBackend"}
    declared.pop("pad_token", None)
    config.write_text(json.dumps(declared))
    backend = LibraryTokenizer.from_file(str(file))
    backend.add_tokens([AddedToken("<fill>", special=special)])
    backend.enable_padding(pad_token="<fill>", pad_id=backend.token_to_id("<fill>"))
    backend.save(str(file))
    expected, found = AutoTokenizer.from_pretrained(folder), Tokenizer.load(str(folder))
    assert found is not None and found.info["pad_token"] == expected.pad_token == "<fill>"
    ids = expected.encode("a<fill>b")
    assert found.encode("a<fill>b") == ids
    assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def test_a_text_that_the_tokenizer_fails_on_is_refused_in_one_sentence(tmp_path) -> None:
    vocabulary, unknown = {"a": 0, "b": 1}, "<unk>"
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": unknown}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": model}))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer is not None and tokenizer.encode("ab", special=False) == [0, 1]
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(InvalidRequest, match="fails on the text: Unk token `<unk>` not found"):
            encode("ac")


def test_a_tokenizer_that_panics_on_a_text_refuses_it_and_no_more() -> None:
    backend = tiny.byte_level()
    backend.normalizer = normalizers.Replace("", "x")  # an index out of bounds in the library
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(InvalidRequest, match="fails on the text: index out of bounds"):
            encode("a")
    for error in (KeyboardInterrupt, MemoryError):
        tokenizer._tokenizer = Mock(encode=Mock(side_effect=error))
        with pytest.raises(error):
            tokenizer.encode("a")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch):
    fast = PreTrainedTokenizerFast(tokenizer_object=tiny.tabletalk())
    tokenizer = Tokenizer(fast, max_tokens=4096)
    count = Mock(return_value={"input_ids": [], "offset_mapping": []})
    monkeypatch.setattr(type(fast), "__call__", count)
    monkeypatch.setattr(fast, "encode", count)
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(ContextExceeded, match=r"is 4096 tokens.* of 10000000 chara"):
            encode("a" * 10_000_000)
    count.assert_not_called()
    tokenizer.encode("a" * 4096)
    count.assert_called_once()


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
