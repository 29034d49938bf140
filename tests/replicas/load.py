"""Chats about documents, some at a time, and what came of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import APIConnectionError, APIError, AsyncOpenAI

if TYPE_CHECKING:
    from tests.replicas.conftest import Deployment

Messages = list[dict[str, str]]
CHATS, TURNS, DOCUMENTS, AT_A_TIME = 24, 4, 6, 12
NAMES = "Ada Bea Cleo Dora Elsa Finn Gus Hugo Ida Jon Kai Lena Milo Nora Otto Pia".split()
SURNAMES = "Lund Holm Frost Marsh Rossi Tanaka Byron Silva".split()
FIELDS = {
    "Age": [str(age) for age in range(20, 80)],
    "Occupation": "Pilot Baker Judge Nurse Painter Farmer".split(),
    "Country": "Norway Denmark Chile Japan Kenya Italy".split(),
}


def make_table(rng: random.Random) -> tuple[str, list[str]]:
    """A table of people, which the bundled model answers questions about, and their names."""
    people = rng.sample([f"{name} {surname}" for name in NAMES for surname in SURNAMES], 10)
    rows = [["ID", "Name", *FIELDS], ["---"] * (2 + len(FIELDS))]
    for number, person in enumerate(people, 1):
        rows.append([str(number), person, *(rng.choice(values) for values in FIELDS.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows), people


def make_document(rng: random.Random) -> tuple[str, list[str]]:
    """Some 540 tokens, and the people in them."""
    tables = [make_table(rng) for _ in range(3)]
    rows = [row for table, _ in tables for row in table.split("\n")][:33]
    people = [person for _, names in tables for person in names]
    text = "\n".join(rows)
    return text, [person for person in people if person in text]


@dataclass
class Load:
    """Chats of `TURNS` questions, `AT_A_TIME`, streamed and greedy.

    Attributes:
        answered: each conversation with its answer.
        failed: the errors that came instead of an answer's end, and the text before them.
        unended: texts whose stream broke off, or was silent for a minute.
        waits: seconds until the first token of each answer.
        prompt_tokens, cached_tokens: of all answers.
    """

    client: AsyncOpenAI
    seed: int
    answered: list[tuple[Messages, str]] = field(default_factory=list)
    failed: list[tuple[Exception, str]] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    async def run(self) -> None:
        print(f"seed {self.seed}")
        rng = random.Random(self.seed)
        documents = [make_document(rng) for _ in range(DOCUMENTS)]
        places = asyncio.Semaphore(AT_A_TIME)

        async def chat(number: int) -> None:
            async with places:
                await self._chat(*documents[number % len(documents)], number)

        await asyncio.gather(*map(chat, range(CHATS)))

    async def _chat(self, document: str, people: list[str], number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        messages = [{"role": "system", "content": f"{document}\n"}]
        for _ in range(TURNS):
            question = f"What is the {rng.choice([*FIELDS])} of {rng.choice(people)}?"
            messages.append({"role": "user", "content": question})
            if (text := await self._answer(messages)) is None:
                messages.pop()
                continue
            self.answered.append(([*messages], text))
            messages.append({"role": "assistant", "content": text})

    async def _answer(self, messages: Any) -> str | None:
        """The answer, or None if it has not come to its end."""
        text, begin, has_ended = "", time.monotonic(), False
        try:
            async for chunk in await self.client.chat.completions.create(
                model="tabletalk",
                messages=messages,
                max_tokens=40,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            ):
                for choice in chunk.choices:
                    if not text and choice.delta.content:
                        self.waits.append(time.monotonic() - begin)
                    text += choice.delta.content or ""
                usage: Any = chunk.usage
                if usage is not None:  # the last one
                    has_ended = True
                    self.prompt_tokens += usage.prompt_tokens
                    self.cached_tokens += usage.prompt_tokens_details.cached_tokens
        except APIConnectionError:
            pass
        except APIError as error:
            self.failed.append((error, text))
            return None
        if not has_ended:
            self.unended.append(text)
        return text if has_ended else None


def strike_busiest(
    deployment: Deployment, load: Load, strike: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Run the load, and `strike` the busiest replica in the middle of it; returns that replica."""

    async def wait_and_strike() -> dict[str, Any]:
        while True:
            await asyncio.sleep(0.02)
            found = await asyncio.to_thread(deployment.replicas)
            busiest = max(found.values(), key=lambda replica: replica["requests"])
            if len(load.answered) > 20 and busiest["requests"] >= 3:
                await asyncio.to_thread(strike, busiest)
                return busiest

    async def both() -> dict[str, Any]:
        return (await asyncio.gather(wait_and_strike(), load.run()))[0]

    struck = asyncio.run(both())
    print(f"{len(load.answered)} answered, {len(load.failed)} cut off, {max(load.waits)} s")
    return struck
