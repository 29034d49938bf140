"""A byte-level BPE tokenizer like GPT-2's, trained on a workload's texts, without a download."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from radixcache.errors import MissingDependency

Encode = Callable[[str], list[int]]


def train_encoder(texts: Iterable[str], vocabulary: int = 32_768) -> Encode:
    """Text to tokens, by a tokenizer of at most `vocabulary` tokens.

    Raises:
        MissingDependency: tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "tokenising needs tokenizers: pip install '.[bench]' in a checkout"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return lambda text: tokenizer.encode(text).ids
