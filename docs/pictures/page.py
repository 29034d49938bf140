"""The page, with trees of 3 to 5,000 nodes: chats of the bundled model about made-up tables."""

from __future__ import annotations

import random
from pathlib import Path

from docs.pictures.camera import shoot_looks, window
from radixcache import LLM, SamplingParams
from radixcache.snapshot import EVERYTHING
from tests.runtime.server.live import live
from training.tables import STANDARD_COLUMNS, Style, Table, ask, draw_table

SIZES = (3, 60, 500, 5000)
"""Of trees, in nodes; the last chat may make a few more."""

AT_ONCE = 32
"""Chats that run at the same time."""


def take(folder: Path) -> None:
    """All pictures of the page."""
    for nodes in SIZES:
        with LLM(kv_memory="1GiB") as llm, live(llm) as server, window() as page:
            if nodes > 3:
                chat_until(llm, nodes, tables=max(2, nodes // 100))
            page.open(server.url)
            page.ask("What is the occupation of Nora Lund?")
            page.one("#new").click()
            page.ask("Which country is Felix Wolf from?")
            shoot_looks(page, folder, f"page-{nodes}")


def chat_until(llm: LLM, nodes: int, tables: int) -> None:
    """Let people chat about tables until so many nodes are cached."""
    rng = random.Random(0)
    greedy = SamplingParams(temperature=0, max_tokens=32)
    drawn = [draw_table(rng, list(STANDARD_COLUMNS), 12, Style()) for _ in range(tables)]
    chats: list[tuple[Table, list[dict[str, str]]]] = []
    while count_nodes(llm) < nodes:
        chats = [chat for chat in chats if rng.random() < 0.5]  # the others know enough
        while len(chats) < AT_ONCE:
            table = rng.choice(drawn)
            chats.append(
                (table, [message("system", f"Answer questions about this.\n{table.text}")])
            )
        for table, messages in chats:
            question = ask(rng, rng.choice(table.names), rng.choice(STANDARD_COLUMNS[2:]))
            messages.append(message("user", question))
        outputs = llm.chat([messages for _, messages in chats], greedy, use_tqdm=False)
        for (_, messages), output in zip(chats, outputs, strict=True):
            messages.append(message("assistant", output.outputs[0].text))


def count_nodes(llm: LLM) -> int:
    """Nodes of the tree, without its root."""
    picture = llm.call(lambda: llm.cache.outline().draw(EVERYTHING))
    return picture.num_nodes if picture else 0


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
