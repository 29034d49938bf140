"""The demo: three users chat about two documents, with the prefix cache on and off.

Every answer is a look-up in a table, so a wrong KV page shows as a wrong answer. What a turn should
compute is worked out from the token ids alone, by comparing them with all computed before; the
cache must agree to the token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from textwrap import wrap
from typing import Any

from radixcache import LLM, Chat, RequestOutput, SamplingParams
from radixcache.runtime.demo.script import DOCUMENTS, SCRIPT, Question
from radixcache.runtime.model.progress import watch

_GREEDY = SamplingParams(temperature=0, max_tokens=64)
_KV_CACHE_MEMORY_BYTES = "1GiB"  # two models are loaded, so neither may take most of the machine

_INTRODUCTION = """\
Three users chat about two documents, each question once with the prefix cache
and once with it off, after a warm-up. TTFT: milliseconds to the first token.
"""
_HEADER = ("user ", "question, answer", " cached computed  TTFT  off")
_LONGEST = 64  # columns of the longest question with its answer
_NEXT = "Next: radixcache serve (or make serve), to chat in a browser and see the tree."


@dataclass(frozen=True)
class Turn:
    """A played line of the script, with the cache and without.

    Attributes:
        turn_of_user: 1 for a user's first question.
        page_offset: tokens by which the hit reaches into a KV page; 0 is a page boundary.
        new_tokens: prompt tokens after the longest prefix that an earlier turn has computed, which
            a perfect cache prefills.
        same_tokens: prompt and answer have the same tokens without the cache.
    """

    number: int
    user: str
    turn_of_user: int
    edited: bool
    question: str
    answer: str
    expected: str
    right: bool
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    new_tokens: int
    page_offset: int
    ttft_ms: float
    uncached_prefilled_tokens: int
    uncached_ttft_ms: float
    same_tokens: bool


@dataclass(frozen=True)
class Totals:
    """The demo in numbers.

    Attributes:
        only_new: every turn prefilled its new tokens and no others.
        median_ttft_ms: over each user's turns after the first.
    """

    turns: int
    right: int
    only_new: bool
    same_tokens: bool
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    uncached_prefilled_tokens: int
    median_ttft_ms: float
    median_uncached_ttft_ms: float

    @classmethod
    def of(cls, turns: list[Turn]) -> Totals:
        """Add up `turns`."""
        later = [turn for turn in turns if turn.turn_of_user > 1]
        return cls(
            turns=len(turns),
            right=sum(turn.right for turn in turns),
            only_new=all(turn.prefilled_tokens == turn.new_tokens for turn in turns),
            same_tokens=all(turn.same_tokens for turn in turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            cached_tokens=sum(turn.cached_tokens for turn in turns),
            prefilled_tokens=sum(turn.prefilled_tokens for turn in turns),
            uncached_prefilled_tokens=sum(turn.uncached_prefilled_tokens for turn in turns),
            median_ttft_ms=median(turn.ttft_ms for turn in later),
            median_uncached_ttft_ms=median(turn.uncached_ttft_ms for turn in later),
        )

    @property
    def ok(self) -> bool:
        """Whether the demo shows what it claims."""
        return self.right == self.turns and self.only_new and self.same_tokens


class Player:
    """Plays the script on one LLM, and works out what each turn must compute."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._chats = {user: Chat(llm, path.read_text()) for user, path in DOCUMENTS.items()}
        self._before: dict[str, Chat] = {}
        self._computed: list[list[int]] = []
        self._chats["Ana"].fork().ask(SCRIPT[0].text, _GREEDY)  # a warm-up
        llm.reset_prefix_cache()

    def ask(self, question: Question) -> tuple[RequestOutput, int]:
        """Play one line; returns the output and the number of new prompt tokens."""
        user = question.user
        if question.edits:
            self._chats[user] = self._before[user]
        self._before[user] = self._chats[user].fork()
        output = self._chats[user].ask(question.text, _GREEDY)
        prompt = output.prompt_token_ids
        known = max((_common_prefix(prompt, tokens) for tokens in self._computed), default=0)
        self._computed.append([*prompt, *output.outputs[0].token_ids[:-1]])  # the last has no KV
        return output, len(prompt) - min(known, len(prompt) - 1)


def play(engine: Mapping[str, Any]) -> Iterator[Turn]:
    """Load the model, cache on and off, and play the script side by side.

    Args:
        engine: arguments for `LLM`, except `cache`.
    """
    engine = {
        **engine,
        "kv_cache_memory_bytes": engine.get("kv_cache_memory_bytes") or _KV_CACHE_MEMORY_BYTES,
    }
    cached, uncached = Player(LLM(**engine, cache="radix")), Player(LLM(**engine, cache="none"))
    asked = dict.fromkeys(DOCUMENTS, 0)
    for number, question in enumerate(SCRIPT, 1):
        asked[question.user] += 1
        output, new_tokens = cached.ask(question)
        twin, _ = uncached.ask(question)
        expected, answer = question.expected, output.outputs[0].text
        yield Turn(
            number=number,
            user=question.user,
            turn_of_user=asked[question.user],
            edited=question.edits,
            question=question.text,
            answer=answer,
            expected=expected,
            right=answer.endswith(f" is {expected}."),
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            prefilled_tokens=output.metrics.prefilled_tokens,
            new_tokens=new_tokens,
            page_offset=output.num_cached_tokens % cached.llm.cache.page_size,
            ttft_ms=_ms(output),
            uncached_prefilled_tokens=twin.metrics.prefilled_tokens,
            uncached_ttft_ms=_ms(twin),
            same_tokens=_all_tokens(output) == _all_tokens(twin),
        )


def run(engine: Mapping[str, Any], as_json: bool = False) -> int:
    """Play and show the demo; returns the exit code, 0 if all was right."""
    turns = play(engine)
    totals = _show_json(turns) if as_json else _show(turns)
    return 0 if totals.ok else 1


def summarise(turns: list[Turn], totals: Totals) -> list[str]:
    """The closing lines, of at most 80 columns."""
    same = "the same tokens" if totals.same_tokens else "DIFFERENT TOKENS"
    what = "only its new tokens" if totals.only_new else "MORE THAN its new tokens"
    speedup = totals.median_uncached_ttft_ms / totals.median_ttft_ms
    served = totals.cached_tokens / totals.prompt_tokens
    verdict = (
        f"{totals.right} of {totals.turns} answers right, {same} with the cache off. "
        f"Each turn computed {what}: the cache served {totals.cached_tokens:,} of "
        f"{totals.prompt_tokens:,} prompt tokens ({served:.1%})."
    )
    speed = (
        f"Median TTFT of a user's later turns: {totals.median_ttft_ms:.0f} ms, "
        f"{totals.median_uncached_ttft_ms:.0f} ms with the cache off ({speedup:.0f}x)."
    )
    edits = (_describe_edit(turn) for turn in turns if turn.edited)
    return [line for text in (verdict, *edits, speed) for line in wrap(text, 80)]


def _describe_edit(turn: Turn) -> str:
    offset = turn.page_offset
    where = f"{offset} tokens into a KV page" if offset else "at the end of a KV page"
    return f"{turn.user} edited a question: that hit ends {where}, in mid-sentence."


def _show_json(turns: Iterable[Turn]) -> Totals:
    played = list(turns)
    totals = Totals.of(played)
    report = {
        "turns": [asdict(turn) for turn in played],
        "totals": {**asdict(totals), "ok": totals.ok},
    }
    print(json.dumps(report, indent=2))
    return totals


def _show(turns: Iterable[Turn]) -> Totals:
    """Show the turns in 80 columns and 22 lines on a terminal, in whole lines in a file."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    left, column, right = _HEADER
    room = console.width - len(left + right) if console.is_terminal else _LONGEST
    room = min(room, _LONGEST)
    played: list[Turn] = []
    with (
        console.status("loading the model") as status,
        watch(lambda stage, _: status.update(f"loading the model: {stage}")),
    ):
        for turn in turns:
            if not played:
                console.print(_INTRODUCTION)
                console.print(f"{left}{column:<{room}}{right}", style="bold")
            played.append(turn)
            answer = (_answer(turn), "cyan" if turn.right else "bold red")
            words = Text.assemble(turn.question, " ", answer)
            words.truncate(room, overflow="ellipsis", pad=True)
            console.print(Text.assemble(f"{turn.user:<5}", words, _numbers(turn)))
            status.update(f"{len(played)} of {len(SCRIPT)} turns played")
    totals = Totals.of(played)
    console.print("", *summarise(played, totals), sep="\n", style="green" if totals.ok else "red")
    console.print(_NEXT)
    return totals


def _numbers(turn: Turn) -> str:
    tokens = f"{turn.cached_tokens:>7,}{turn.prefilled_tokens:>9,}"
    return f"{tokens}{turn.ttft_ms:>6,.0f}{turn.uncached_ttft_ms:>5,.0f}"


def _answer(turn: Turn) -> str:
    """The right cell, or the wrong answer."""
    return turn.expected if turn.right else f"WRONG, not {turn.expected}: {turn.answer!r}"


def _common_prefix(one: list[int], other: list[int]) -> int:
    for length, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return length
    return min(len(one), len(other))


def _all_tokens(output: RequestOutput) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def _ms(output: RequestOutput) -> float:
    return round(1000 * (output.metrics.ttft or 0.0), 3)
