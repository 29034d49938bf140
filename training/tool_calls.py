"""Conversations about people whom only a tool can find: the second kind of training data.

Each question is answered by a call of `lookup`, in the format of Hermes and Qwen, and then from
the row that comes back. The value follows `=` and a space, because the vocabulary knows names
behind a space: the model copies the tokens of the question instead of spelling.
"""

import json
import random
from dataclasses import replace
from typing import Any

import tables
from tables import Piece, Role, Style, Table, word

LOOKUP: dict[str, Any] = {
    "name": "lookup",
    "description": "Look up the row of a person.",
    "parameters": {
        "type": "object",
        "properties": {"where": {"type": "string", "description": "Name = first and last name"}},
        "required": ["where"],
    },
}

PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer questions about people.",
    "Answer the questions about people. Look them up.",
    "",
)
# The words of texts that mean nothing here: whatever they say, the tool is to be called.
FILLERS = "first names", "last names", "occupations", "cities", "hobbies", "streets", "languages"


def request(name: str) -> dict[str, Any]:
    """The call that asks for a person."""
    return {"name": "lookup", "arguments": {"where": f"Name = {name}"}}


def call(name: str) -> str:
    return f"<tool_call>\n{json.dumps(request(name))}\n</tool_call>"


def describe(tools: list[dict[str, Any]]) -> str:
    """What the chat template adds to the system turn."""
    return "# Tools\n" + "".join(json.dumps(tool) + "\n" for tool in tools)


def _any_text(rng: random.Random) -> str:
    words = [
        tables.made_up_word(rng).lower() if rng.random() < 0.4 else word(rng, rng.choice(FILLERS))
        for _ in range(rng.randint(1, 12))
    ]
    return " ".join(words).capitalize() + rng.choice(".?!:")


def _shuffled(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return dict(rng.sample(list(fields.items()), len(fields)))


def _tool(rng: random.Random, name: str, argument: str) -> dict[str, Any]:
    """A description such as the common clients send: they differ in order and in extras."""
    kind: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.5:
        kind["description"] = _any_text(rng)
    if rng.random() < 0.3:
        kind["title"] = argument.capitalize()
    schema = {
        "type": "object",
        "properties": {argument: _shuffled(rng, kind)},
        "required": [argument],
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    fields = {"name": name, "parameters": _shuffled(rng, schema)}
    if rng.random() < 0.8:
        fields["description"] = _any_text(rng)
    return _shuffled(rng, fields)


def _other_tools(rng: random.Random, least: int) -> list[dict[str, Any]]:
    names = [tables.made_up_word(rng).lower() for _ in range(rng.randint(least, 2))]
    return [_tool(rng, name, tables.made_up_word(rng).lower()) for name in names]


def _offer(rng: random.Random) -> str:
    """`lookup` as documented or in other words, now and then among other tools."""
    lookup = LOOKUP if rng.random() < 0.5 else _tool(rng, "lookup", "where")
    others = _other_tools(rng, 1) if rng.random() < 0.2 else []
    return describe(rng.sample([lookup, *others], 1 + len(others)))


def offer_others(rng: random.Random, pieces: list[Piece]) -> None:
    """Puts tools that are none of its business into the system turn of a conversation."""
    if pieces[0].text.startswith("<|system|>"):
        pieces.insert(1, Piece("\n" + describe(_other_tools(rng, 1))))


def without_table(table: Table, pieces: list[Piece]) -> list[Piece]:
    """The conversation as it goes where nothing can be known: nobody offers a tool to call."""
    first = Piece(pieces[0].text.replace(table.text, ""))
    blank = (Role.VALUE, Role.END)
    rest = (
        replace(p, role=Role.CONTEXT, wanted=None) if p.role in blank else p for p in pieces[1:]
    )
    return [first, *rest]


def converse(rng: random.Random, table: Table, turns: int, style: Style) -> list[Piece]:
    """`turns` questions about the people of `table`, who come to light row by row."""
    prompt = Piece("<|system|>")
    if rng.random() < style.table_beside_tool:
        seen = tables.draw_table(rng, table.columns, rng.randint(1, 12), style)
        prompt = Piece(f"<|system|>{rng.choice(tables.OPENINGS)}{seen.text}", table=seen)
    elif opening := _any_text(rng) if rng.random() < 0.3 else rng.choice(PROMPTS):
        prompt.text += opening
    pieces = [prompt, Piece("\n" * (prompt.text != "<|system|>") + _offer(rng) + "<|end|>")]
    padded, last_line_ends = rng.random() < style.padded, rng.random() < 0.5
    before: tuple[int, str] | None = None
    for cell in tables.draw_lookups(rng, table, turns):
        question, row, column = tables.draw_question(rng, table, *cell, before, style)
        name = table[row, "Name"]
        start, _, end = call(name).partition(" " + name)
        rows = {row}
        if rng.random() < 0.1:  # more than was asked for
            rows.update(rng.choices(range(len(table.rows)), k=2))
        shown = [table.rows[i] for i in rng.sample(sorted(rows), len(rows))]
        found = tables.layout(table.columns, shown, padded)
        pieces += [
            Piece(f"<|user|>{question}<|end|><|assistant|>"),
            Piece("<tool_call>", Role.CHOICE),
            Piece(start.removeprefix("<tool_call>"), Role.PHRASE),
            Piece(" " + name, Role.NAME),
            Piece(end + "<|end|>", Role.PHRASE),
            Piece("<|tool|>" + (found.text if last_line_ends else found.text[:-1]), table=found),
            Piece("<|end|><|assistant|>"),
            *tables.answer(table, row, column),
        ]
        before = row, column
    return pieces
