"""The demo: three users chat about two documents, with the prefix cache on and off.

Every answer is a look-up in a table, so a wrong KV page shows as a wrong answer, which anybody can
check. What a turn should compute is worked out here from the token ids alone, by comparing them
with everything computed before; the cache has to agree to the token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from radixcache import LLM, Chat, RequestOutput, SamplingParams
from radixcache.runtime.demo.script import DOCUMENTS, SCRIPT, Question, read_table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_GREEDY = SamplingParams(temperature=0, max_tokens=64)
_KV_MEMORY = "1GiB"  # two models are loaded, so neither may take most of the machine


@dataclass(frozen=True)
class Turn:
    """A line of the script as it was played, with the cache and without.

    Attributes:
        turn_of_user: 1 for a user's first question.
        page_offset: how far into a KV page the hit ends; 0 is a page boundary.
        new_tokens: prompt tokens after the longest prefix that any earlier turn has computed;
            what a perfect cache prefills.
        same_tokens: the prompt and the answer without the cache are the same, token by token.
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
    """Plays the script on one LLM, and works out what each turn has to compute."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._chats = {user: Chat(llm, path.read_text()) for user, path in DOCUMENTS.items()}
        self._before: dict[str, Chat] = {}
        self._computed: list[list[int]] = []
        self._chats["Ana"].fork().ask(SCRIPT[0].text, _GREEDY)  # so that no turn pays for a start
        llm.reset_prefix_cache()

    def ask(self, question: Question) -> tuple[RequestOutput, int]:
        """Play one line; returns what came back and how many prompt tokens were new."""
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
    engine = {**engine, "kv_memory": engine.get("kv_memory") or _KV_MEMORY}
    cached, uncached = Player(LLM(**engine, cache="radix")), Player(LLM(**engine, cache="none"))
    cells = {user: read_table(path) for user, path in DOCUMENTS.items()}
    asked = dict.fromkeys(DOCUMENTS, 0)
    for number, question in enumerate(SCRIPT, 1):
        asked[question.user] += 1
        output, new_tokens = cached.ask(question)
        twin, _ = uncached.ask(question)
        expected = cells[question.user][question.name][question.column]
        answer = output.outputs[0].text
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
    """Play and show the demo; returns the exit code: 0 if everything was as it should be."""
    turns = play(engine)
    if as_json:
        totals = _show_json(turns)
    elif sys.stdout.isatty():
        totals = _show_rich(turns)
    else:
        totals = _show_plain(turns)
    return 0 if totals.ok else 1


def summarise(turns: list[Turn], totals: Totals) -> list[str]:
    """The closing lines; the last one is there to be quoted."""
    counts = "; ".join(
        f"{user} {', '.join(str(t.prefilled_tokens) for t in turns if _is_later(t, user))}"
        for user in DOCUMENTS
    )
    what = "only their new tokens" if totals.only_new else "MORE THAN their new tokens"
    same = "identical tokens" if totals.same_tokens else "DIFFERENT TOKENS"
    speedup = totals.median_uncached_ttft_ms / totals.median_ttft_ms
    return [
        f"Each user's turns after the first prefilled {what}: {counts}.",
        *(_describe_edit(turn) for turn in turns if turn.edited),
        f"Cache on and off gave {same}.",
        "TTFT is the time to the first token, after one warm-up request whose KV was dropped.",
        f"{totals.right} of {totals.turns} answers right; the cache served "
        f"{totals.cached_tokens:,} of {totals.prompt_tokens:,} prompt tokens "
        f"({totals.cached_tokens / totals.prompt_tokens:.1%}): {totals.prefilled_tokens:,} "
        f"prefilled instead of {totals.uncached_prefilled_tokens:,}; median TTFT from turn 2 on "
        f"{totals.median_ttft_ms:.0f} ms instead of {totals.median_uncached_ttft_ms:.0f} ms "
        f"({speedup:.0f}x)",
    ]


def _describe_edit(turn: Turn) -> str:
    offset = turn.page_offset
    return (
        f"Turn {turn.number} edits the question before: its hit of {turn.cached_tokens:,} tokens "
        f"ends in mid-sentence, {f'{offset} tokens into a KV page' if offset else 'at a page end'}."
    )


def _show_json(turns: Iterable[Turn]) -> Totals:
    played = list(turns)
    totals = Totals.of(played)
    report = {
        "turns": [asdict(turn) for turn in played],
        "totals": {**asdict(totals), "ok": totals.ok},
    }
    print(json.dumps(report, indent=2))
    return totals


def _show_plain(turns: Iterable[Turn]) -> Totals:
    played: list[Turn] = []
    for turn in turns:
        if not played:
            print(_PLAIN_ROW.format(*_HEADER), flush=True)
        played.append(turn)
        mark = "right" if turn.right else f"WRONG, it is {turn.expected}"
        print(_PLAIN_ROW.format(*_numbers(turn), _asked(turn)), flush=True)
        print(_PLAIN_ROW.format(*[""] * 7, f"{turn.answer} [{mark}]").rstrip(), flush=True)
    totals = Totals.of(played)
    print("", *(fill(line, 80) for line in summarise(played, totals)), sep="\n")
    return totals


def _show_rich(turns: Iterable[Turn]) -> Totals:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    played: list[Turn] = []
    with console.status("loading the model") as status:
        for turn in turns:
            if not played:
                *names, said = _HEADER
                console.print(_rich_row(names, said), style="bold")
            played.append(turn)
            mark = Text("✓ ", "green") if turn.right else Text("✗ ", "bold red")
            wrong = "" if turn.right else f" (it is {turn.expected})"
            answer = Text.assemble(mark, (turn.answer + wrong, "cyan"))
            console.print(_rich_row(_numbers(turn), Text.assemble(_asked(turn), "\n", answer)))
            status.update(f"{len(played)} of {len(SCRIPT)} turns played")
    totals = Totals.of(played)
    *notes, quote = summarise(played, totals)
    console.print("", *notes, sep="\n", style="dim", highlight=False)
    console.print(quote, style="bold green" if totals.ok else "bold red", highlight=False)
    return totals


def _rich_row(numbers: list[str], said: str | Text) -> Table:
    """A row of the table. It is a grid of its own, so that it can scroll by when it is known."""
    from rich.table import Table

    row = Table.grid(padding=(0, 1), expand=True)
    for width in _WIDTHS:
        row.add_column(justify="right", width=width)
    row.add_column(ratio=1)
    row.add_row(*numbers, said)
    return row


_HEADER = ("#", "user", "prompt", "cached", "prefilled", "TTFT", "cache off", "question, answer")
_WIDTHS = (2, 4, 6, 6, 9, 8, 9)
_PLAIN_ROW = "".join(f"{{:>{width}}}  " for width in _WIDTHS) + "{}"


def _numbers(turn: Turn) -> list[str]:
    """The cells of `_HEADER` but for the last."""
    return [
        str(turn.number),
        turn.user,
        f"{turn.prompt_tokens:,}",
        f"{turn.cached_tokens:,}",
        f"{turn.prefilled_tokens:,}",
        f"{turn.ttft_ms:,.0f} ms",
        f"{turn.uncached_ttft_ms:,.0f} ms",
    ]


def _asked(turn: Turn) -> str:
    return turn.question + (" (edited)" if turn.edited else "")


def _is_later(turn: Turn, user: str) -> bool:
    return turn.user == user and turn.turn_of_user > 1


def _common_prefix(one: list[int], other: list[int]) -> int:
    for length, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return length
    return min(len(one), len(other))


def _all_tokens(output: RequestOutput) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def _ms(output: RequestOutput) -> float:
    return round(1000 * (output.metrics.ttft or 0.0), 3)
