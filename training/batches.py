"""Tokenised training batches: what to predict, how much it counts, and what a token should know.

Besides the answers, some tokens carry `facts` for the auxiliary loss (see model.Probe): a token
of a table row should know whose row it is in and which column, the token that ends a question
should know whom and what it asks for, and the bar after a name should know the row's ID, since
the ID stands before the name and is read from there.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import tables
import tool_calls
import torch
from tables import COLUMNS, Piece, Style, Table
from transformers import PreTrainedTokenizerFast

UNKNOWN = -1  # a fact that the token cannot know; ignored by the loss
ID_DIGITS = 3
NO_DIGIT = 10
NAME_FACTS = 4  # the first and the last token of the first and of the last name
FACTS = NAME_FACTS + 1 + ID_DIGITS  # then the column and the digits of the ID
TOKENS_PER_FACT = 6


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: the size of its tables, and when it starts at the latest."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    lookups: int
    style: Style
    latest_start: float  # as a share of the whole run
    batch_share: float = 1.0  # small tables are learnt in many small steps
    calls: float = 0.0  # share of batches in which a tool is called


EASY = Style(statements=0.8, padded=0, plain=0, shuffled_columns=0, follow_ups=0)
STAGES = (
    Stage((2, 5), (2, 2), 10, replace(EASY, made_up_words=0), 0.0, 0.25),
    Stage((2, 5), (2, 3), 12, replace(EASY, statements=0.7), 0.04, 0.25),
    Stage((3, 6), (3, 5), 16, Style(statements=0.6, follow_ups=0), 0.08, 0.4),
    Stage((4, 8), (5, 8), 24, Style(statements=0.5), 0.15, 0.6),
    Stage((5, 20), (7, 8), 40, Style(), 0.25, calls=0.3),
    Stage((10, 36), (8, 8), 50, Style(), 0.4, calls=0.6),
)
MOST_CALLS = 22  # in a conversation: they fit into 4,096 tokens
NAMES_IN_CALLS = {"made_up_words": 0.4, "vowel_first": 0.3}  # any name is to be copied
REVISION = 0.6  # share of batches drawn from one of the stages before


@dataclass
class Batch:
    tokens: torch.Tensor  # (batch, length), padded with 0 on the right
    roles: torch.Tensor  # (batch, length)
    fact_at: torch.Tensor  # (facts,) flat positions in the batch
    facts: torch.Tensor  # (facts, FACTS)

    def to(self, device: torch.device) -> "Batch":
        fields = (self.tokens, self.roles, self.fact_at, self.facts)
        return Batch(*(x.to(device, non_blocking=True) for x in fields))


class Example(NamedTuple):
    """A tokenised conversation."""

    tokens: np.ndarray
    roles: np.ndarray
    fact_at: np.ndarray  # positions
    facts: np.ndarray  # (facts, FACTS)
    vital: np.ndarray  # (facts,): not one of the many alike, but a question or a name's bar


class Encoder:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer.backend_tokenizer
        self.ends: dict[str, list[int]] = {}

    def _name_facts(self, name: str) -> list[int]:
        """One token would not do: many made-up names start alike, others end alike."""
        parts = name.split(" ")
        for part in parts:
            if part not in self.ends:
                tokens = self.tokenizer.encode(" " + part).ids
                self.ends[part] = [tokens[0], tokens[-1]]
        return [token for part in parts for token in self.ends[part]]

    def _table_facts(self, table: Table, token_ends: np.ndarray) -> np.ndarray:
        """Facts of the tokens that end at `token_ends` in the text of the table."""
        columns = np.array([COLUMNS.index(column) for column in table.columns])
        name_column = table.columns.index("Name")
        names = np.array([self._name_facts(name) for name in table.names])
        body = table.cell_ends[0] - len(table.rows[0][0]) - 3
        inside = (token_ends > body) & (token_ends <= table.cell_ends[-1])
        cell = np.where(inside, np.searchsorted(table.cell_ends, token_ends), 0)
        row, column = np.divmod(cell, len(columns))
        bar = inside & (column == name_column) & np.isin(token_ends, table.cell_ends)
        known = bar | inside & (column > name_column)

        facts = np.full((len(token_ends), FACTS), UNKNOWN)
        facts[known, :NAME_FACTS] = names[row[known]]
        facts[known, NAME_FACTS] = columns[column[known]]
        facts[bar, NAME_FACTS] = UNKNOWN
        if "ID" in table.columns:  # a look-up of the ID should read it off the name's bar
            ids = [table[i, "ID"] for i in range(len(table.rows))]
            digits = [[*map(int, i)] + [NO_DIGIT] * (ID_DIGITS - len(i)) for i in ids]
            facts[bar, NAME_FACTS] = COLUMNS.index("ID")
            facts[bar, NAME_FACTS + 1 :] = np.array(digits)[row[bar]]
        return facts

    def __call__(self, pieces: list[Piece]) -> Example:
        encoded = self.tokenizer.encode_batch([piece.text for piece in pieces])
        lengths = [len(e.ids) for e in encoded]
        tokens = np.concatenate([e.ids for e in encoded])
        roles = np.repeat([piece.role for piece in pieces], lengths)
        facts = np.full((len(tokens), FACTS), UNKNOWN)
        ends = np.cumsum(lengths)
        for piece, encoding, end in zip(pieces, encoded, ends, strict=True):
            if piece.table:
                token_ends = np.array([token_end for _, token_end in encoding.offsets])
                token_ends -= piece.text.rindex(piece.table.text.rstrip("\n"))
                facts[end - len(token_ends) : end] = self._table_facts(piece.table, token_ends)
        vital = facts[:, -1] != UNKNOWN
        for piece, end in zip(pieces, ends, strict=True):
            if piece.wanted:
                name, column = piece.wanted
                facts[end - 1, : NAME_FACTS + 1] = [*self._name_facts(name), COLUMNS.index(column)]
                vital[end - 1] = True
        at = np.nonzero(facts[:, 0] != UNKNOWN)[0]
        return Example(tokens, roles, at, facts[at], vital[at])


def collate(examples: list[Example], rng: np.random.Generator) -> Batch:
    """Pad and stack; keep all vital facts and a share of the others."""
    length = -(-max(len(example.tokens) for example in examples) // 16) * 16
    tokens, roles = np.zeros((2, len(examples), length), dtype=np.int64)
    for index, example in enumerate(examples):
        tokens[index, : len(example.tokens)] = example.tokens
        roles[index, : len(example.tokens)] = example.roles
    fact_at = np.concatenate([k * length + e.fact_at for k, e in enumerate(examples)])
    vital = np.concatenate([e.vital for e in examples])
    kept = max(tokens.size // TOKENS_PER_FACT, vital.sum())
    order = np.argsort(rng.random(len(vital)) - vital)[:kept]
    facts = np.concatenate([e.facts for e in examples])[order]
    return Batch(*map(torch.from_numpy, (tokens, roles, fact_at[order], facts)))


def batches(
    tokenizer: PreTrainedTokenizerFast,
    stage: torch.Tensor,
    batch_tokens: int,
    shape_seed: int,
    data_seed: int,
) -> Iterator[Batch]:
    """Endless batches of the stage that the (shared) tensor `stage` names at the time.

    All tables of a batch have the same size, so little is padding; replicas with the same
    `shape_seed` draw the same sizes, so none waits for another.
    """
    encode = Encoder(tokenizer)
    shape_rng, rng = random.Random(shape_seed), random.Random(data_seed)
    fact_rng = np.random.default_rng(data_seed)
    while True:
        revise = stage > 0 and shape_rng.random() < REVISION
        now = STAGES[shape_rng.randrange(int(stage)) if revise else int(stage)]
        rows, width = shape_rng.randint(*now.rows), shape_rng.randint(*now.columns)
        if revise and stage == len(STAGES) - 1:  # any small table, lest one is taken for a call
            rows, width = shape_rng.randint(1, now.rows[1]), shape_rng.randint(2, 8)
        calls = 0
        if shape_rng.random() < now.calls:
            calls = 1 + int(MOST_CALLS * shape_rng.random() ** 2)  # mostly few
        style = replace(now.style, **NAMES_IN_CALLS) if calls else now.style
        room = batch_tokens * now.batch_share
        examples: list[Example] = []
        longest = 0
        while (len(examples) + 1) * longest <= room:
            columns = tables.draw_columns(rng, width, style.shuffled_columns)
            table = tables.draw_table(rng, columns, rows, style)
            if calls:
                pieces = tool_calls.converse(rng, table, calls, style)
            else:
                pieces = tables.converse(rng, table, now.lookups, style)
                if examples and rng.random() < style.without_table:
                    pieces = tool_calls.without_table(table, pieces)
                if rng.random() < style.other_tools:
                    tool_calls.offer_others(rng, pieces)
            examples.append(encode(pieces))
            longest = max(longest, len(examples[-1].tokens))
        yield collate(examples, fact_rng)
