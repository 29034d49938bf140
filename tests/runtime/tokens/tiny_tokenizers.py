"""Small tokenizers of every kind, trained on a page of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.tokens.tokenizer import Tokenizer

CORPUS = [
    "The cats sat on the mat, and the other cats didn't; they're at 1234 Kettle Street.",
    "  def main(args):\n\n        return [len(x) for x in args]  # two  spaces\n\n\n",
    "Ärger über Öl, naïve café, 漢字と仮名, Привет мир 🙂🙂 the end. The ending ended.",
]
LETTERS = sorted(set("".join(CORPUS)) - {" ", "\n"})
VOCAB_SIZE = 420
DELIMITERS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL = [AddedToken(text, normalized=False) for text in DELIMITERS]


def byte_level(add_prefix_space: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    train_on_bytes(backend, CORPUS)
    return backend


def train_on_bytes(backend: Backend, texts: Sequence[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)


def byte_level_with_prefix_space() -> Backend:
    return byte_level(add_prefix_space=True)


def awkward_added_tokens() -> Backend:
    """Added tokens of all kinds, some of which run into each other."""
    backend = byte_level()
    backend.add_special_tokens(
        [
            AddedToken("<|strip|>", normalized=False, rstrip=True),
            AddedToken("<|mask|>", normalized=False, lstrip=True),
            AddedToken("<<|over", normalized=False),
            AddedToken("er<|user|>", normalized=False),
        ]
    )
    backend.add_tokens(["<think>", "  ", "   ", AddedToken("\n\n", normalized=False)])
    return backend


def digits_from_the_right() -> Backend:
    """A pattern that looks ahead without bound."""
    return cut_by(r" ?\p{L}+|\d{1,3}(?=(?:\d{3})*(?!\d))|\s*[\r\n]+|\s+(?!\S)|\s+|.")


def cut_by(pattern: str) -> Backend:
    backend, plain = byte_level(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, plain])
    return backend


def metaspace_first() -> Backend:
    return _sentencepiece(pre_tokenizers.Metaspace(prepend_scheme="first"), None)


def metaspace_always() -> Backend:
    return _sentencepiece(pre_tokenizers.Metaspace(prepend_scheme="always"), None)


def prepending() -> Backend:
    """Like Llama 2's: every piece between special tokens gets a space and is one long word."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend = _sentencepiece(None, normalizer)
    backend.add_special_tokens([AddedToken("<|user|>", normalized=False, rstrip=True)])
    return backend


def unigram() -> Backend:
    """Changes characters to compatible ones and does not know all of them."""
    pieces = [("<unk>", 0.0), *((letter, -6.0) for letter in LETTERS)]
    pieces += [(piece, -3.0) for piece in "▁ ▁the ▁cat ▁T he at ▁end s ed ing ▁sat end".split()]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([*SPECIAL, "<unk>"])
    return backend


def word_piece() -> Backend:
    """Loses case and spaces."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    letters = [letter for letter in LETTERS if normalizer.normalize_str(letter) == letter]
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    pieces += "the cat sat end ##s ##ed ##ing ##at ##he".split()
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([*SPECIAL, "[UNK]"])
    return backend


def tabletalk() -> Backend:
    return Backend.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


LOSSLESS: Sequence[Callable[[], Backend]] = [byte_level, digits_from_the_right, tabletalk]
"""Those whose tokens decode to the very text that they are from."""
KINDS = [
    *LOSSLESS,
    byte_level_with_prefix_space,
    awkward_added_tokens,
    metaspace_first,
    metaspace_always,
    prepending,
    unigram,
    word_piece,
]


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def _sentencepiece(pre_tokenizer: Any, normalizer: Any) -> Backend:
    """BPE over characters, with bytes for unknown ones, decoded as Llama's."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.Metaspace(split=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    parts = json.loads(backend.to_str())
    vocab = parts["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    return Backend.from_str(json.dumps(parts))
