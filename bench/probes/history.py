"""What token-stable history is worth: hits where answers drift, and time to tokenise turn 20.

Conversations of random words from this repository's pages. A model does not always spell a text as
its tokenizer would: here, each word of an answer is generated letter by letter with the chance
`--drift`. Both parts compare with tokenising each prompt as a whole, in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixcache import PagePool, RadixCache
from radixcache.base import CacheStats
from radixcache.bench.workloads.byte_level_bpe import train_byte_level_bpe
from radixcache.runtime.files import BUNDLED_MODEL
from radixcache.runtime.text.history import TokenHistory
from radixcache.runtime.text.tokenizer import Tokenizer

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
WORDS = " ".join(page.read_text() for page in PAGES).split()


def say(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def spell(tokenizer: Tokenizer, rng: random.Random, text: str, drift: float) -> list[int]:
    """The tokens of an answer as a model may generate it, its end token included."""
    ids: list[int] = []
    for at, word in enumerate(text.split(" ")):
        word = f" {word}" if at else word
        for piece in word if rng.random() < drift else [word]:
            ids += tokenizer.encode(piece, special=False)
    return ids + tokenizer.encode("<|end|>", special=False)


class Conversation:
    """The messages so far."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, words: int) -> None:
        self.tokenizer = tokenizer
        self.rng = rng
        self.words = words
        self.messages = [{"role": "system", "content": say(rng, words)}]

    def ask(self) -> str:
        """A short question; returns the prompt."""
        self.messages.append({"role": "user", "content": say(self.rng, self.words // 10)})
        return self.tokenizer.render_chat(self.messages)

    def answer(self, drift: float) -> list[int]:
        """A longer answer; returns its tokens."""
        text = say(self.rng, self.words)
        self.messages.append({"role": "assistant", "content": text})
        return spell(self.tokenizer, self.rng, text, drift)


def replay(
    args: argparse.Namespace, tokenizer: Tokenizer, drift: float, stable: bool
) -> CacheStats:
    """Play conversations against a radix cache that holds them all."""
    cache = RadixCache(PagePool(200_000, 16))
    history = TokenHistory(tokenizer)
    for number in range(args.conversations):
        rng = random.Random(args.seed + number)
        talk = Conversation(tokenizer, rng, args.words)
        for _ in range(args.turns):
            prompt = history.encode(talk.ask())
            tokens = prompt.tokens.tolist()
            if not stable:
                tokens = tokenizer.encode(prompt.text, special=False)
            generated = talk.answer(drift)
            history.remember(prompt, generated)
            lease = cache.acquire(tokens)
            tokens += generated[:-1]  # the last one gets no KV
            cache.reserve(lease, len(tokens))
            cache.publish(lease, tokens[lease.num_tokens :])
            cache.commit()
            cache.release(lease)
    cache.check()
    return cache.stats


def time_last_turn(args: argparse.Namespace, tokenizer: Tokenizer) -> list[float]:
    """Median ms to tokenise the last prompt whole, through the history, and to remember it."""
    history = TokenHistory(tokenizer)
    times = []
    for number in range(args.conversations):
        talk = Conversation(tokenizer, random.Random(args.seed + number), args.words)
        for _ in range(args.turns - 1):
            history.remember(history.encode(talk.ask()), talk.answer(args.drift[-1]))
        text = talk.ask()
        whole, _ = timed(tokenizer.encode, text, special=False)
        spliced, prompt = timed(history.encode, text)
        remembering, _ = timed(history.remember, prompt, talk.answer(args.drift[-1]))
        times.append((whole, spliced, remembering))
    return [statistics.median(column) for column in zip(*times, strict=True)]


def timed(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, Any]:
    """Milliseconds of a call, and what it returned."""
    start = time.perf_counter()
    result = call(*args, **options)
    return (time.perf_counter() - start) * 1000, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=200, help="of an answer (200)")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--drift", type=float, nargs="+", default=[0, 0.002, 0.02])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    bpe = Tokenizer(train_byte_level_bpe([page.read_text() for page in PAGES], 2000))
    tabletalk = Tokenizer.load(str(BUNDLED_MODEL))
    assert tabletalk is not None
    print(
        f"{args.conversations} conversations of {args.turns} turns, answers of {args.words} words, "
        f"questions of {args.words // 10}, seed {args.seed}"
    )
    for drift in args.drift:
        plain, stable = (replay(args, bpe, drift, stable) for stable in (False, True))
        computed = [stats.query_tokens - stats.hit_tokens for stats in (plain, stable)]
        print(
            f"byte-level BPE, {drift:.1%} of words drift: hit rate {plain.hit_rate:.1%} tokenised "
            f"whole, {stable.hit_rate:.1%} token-stable; prefilled {computed[0]:,} and "
            f"{computed[1]:,}, 1/{computed[0] / computed[1]:.1f}"
        )
    for name, tokenizer in (("byte-level BPE", bpe), ("tabletalk", tabletalk)):
        whole, spliced, remembering = time_last_turn(args, tokenizer)
        print(
            f"{name}, turn {args.turns}: {whole:.2f} ms tokenised whole, {spliced:.2f} ms "
            f"token-stable, 1/{whole / spliced:.0f}; {remembering:.2f} ms to remember the answer"
        )


if __name__ == "__main__":
    main()
