"""Byte-level BPE tokenizers like GPT-2's, trained on the texts at hand: none comes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from radixcache.errors import MissingDependency

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Encode = Callable[[str], list[int]]

DELIMITERS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _train(
    texts: Iterable[str], vocabulary: int, delimiters: Sequence[str], add_prefix_space: bool
) -> Tokenizer:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "tokenising needs tokenizers: pip install '.[bench]' in a checkout"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, normalized=False) for text in delimiters],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_encoder(texts: Iterable[str], vocabulary: int = 32_768) -> Encode:
    """Text to tokens, by a tokenizer of at most `vocabulary` tokens.

    Raises:
        MissingDependency: tokenizers is not installed.
    """
    tokenizer = _train(texts, vocabulary, (), add_prefix_space=False)
    return lambda text: tokenizer.encode(text).ids


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, *, add_prefix_space: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template whose turns end with <|end|>, its end-of-text token."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train(texts, vocab_size, DELIMITERS, add_prefix_space),
        eos_token=DELIMITERS[0],
        chat_template=CHAT_TEMPLATE,
    )
