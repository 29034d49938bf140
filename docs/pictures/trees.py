"""Trees of any size, for pictures: prompts that branch as conversations do."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.runtime.server import http

DESKS = {  # and what their customers ask about
    "a bike shop": "the red city bike|a child seat|new brake pads|the front light|a used helmet",
    "a library": "a lost card|the reading room|an overdue novel|inter-library loans|old maps",
    "a railway station": "the night train|a missed connection|a folding bike|the lost luggage",
    "a garden centre": "yellow rose leaves|a dry lawn|winter heather|the compost bin|tomato seeds",
    "a music school": "a cello lesson|sheet music|the spring concert|a borrowed flute",
    "a bakery": "rye bread|a wedding cake|gluten-free rolls|the morning order|yesterday's pretzels",
    "a ferry line": "the last boat|a cabin for four|a dog on board|rough weather|the car deck",
    "a museum": "the school visit|a broken audio guide|free Sundays|the cloakroom|a private tour",
}
RULES = (
    "Be brief and polite. Say what you do not know. Never promise a refund. Opening hours are from "
    "nine to six, on Saturdays from ten to four. Prices are in the list below, taxes included."
)
ASKED = "How much is|Can I get help with|Is there any news of|Where do I ask about|I called about"
MORE = "Thanks. And tomorrow?|Who can I call?|Is that certain?|What does it cost?|Since when?"
ANSWERS = "Yes, it is ready.|That takes two days.|Please ask at the counter.|I am not sure."


def prompts(seed: int) -> Iterator[str]:
    """Conversations of the customers of some desks, many of them longer ones than were before."""
    draw = random.Random(seed)
    told: list[str] = []
    for number in range(1 << 30):
        if told and draw.random() < 0.4:
            said = draw.choice(told)
            prompt = (
                f"{said}{draw.choice(ANSWERS.split('|'))}<|user|>{draw.choice(MORE.split('|'))}"
            )
        else:
            desk = min(int(draw.expovariate(0.5)), len(DESKS) - 1) if number > 1 else 0
            name, things = [*DESKS.items()][desk]
            question = f"{draw.choice(ASKED.split('|'))} {draw.choice(things.split('|'))}"
            ticket = f", ticket {draw.randrange(10_000)}?" if draw.random() < 0.7 else "?"
            system = f"<|system|>You answer the customers of {name}. {RULES}"
            prompt = f"{system}<|user|>{question}{ticket}"
        told.append(f"{prompt}<|assistant|>")
        yield told[-1]


def fill(url: str, nodes: int, seed: int = 0) -> int:
    """Send prompts to the server at `url` until that many nodes are cached, or more; how many."""
    ahead = prompts(seed)
    while (cached := http.get(f"{url}/v1/cache?rows=1").json()["stats"]["cached_nodes"]) < nodes:
        batch = [next(ahead) for _ in range(min(256, max(1, (nodes - cached) // 2)))]
        body = {"prompt": batch, "max_tokens": 1}
        http.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    count: int = cached
    return count
