"""Measure an exported model: python training/evaluate.py FOLDER

Every answer is generated greedily by plain transformers, in bfloat16, from a table that training
never saw, and counts only if it equals the expected sentence to its end. Prints the share of
exact answers by form of the prompt, rows of the table and column, as markdown; then the share of
exact tool calls, and of exact answers from what they found.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tables
import tool_calls
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SEED = 20_000_000  # far from the seeds of training
SYSTEM = tables.OPENINGS[0]
PLAIN_OPENING = tables.OPENINGS[1]
FORMS = (
    "chat",  # "What is the age of X?"
    "chat, other wording",
    "chat, follow-up",  # "And the age?" or "What about X?" after another answer
    "plain",  # "Question: what is the age of X? Your answer: The age of X is"
    "plain, space",  # the same with a space at the end
)
CALLS = 20  # in a conversation that calls the tool: they fit into 4,096 tokens
ASKED = [column for column in tables.STANDARD_COLUMNS if column != "Name"]


@dataclass
class Lookup:
    column: str
    prompt: str
    answer: str  # everything up to the end of the turn


def chat_lookup(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, form: str, table: tables.Table,
    row: int, column: str,
) -> Lookup:  # fmt: skip
    def answer(row: int, column: str) -> str:
        return f"{tables.answer_phrase(table[row, 'Name'], column)} {table[row, column]}."

    def say(role: str, content: str) -> None:
        messages.append({"role": role, "content": content})

    name = table[row, "Name"]
    question = f"What is the {tables.spoken(column)} of {name}?"
    messages: list[dict[str, str]] = []
    say("system", SYSTEM + table.text)
    if form == "chat, other wording":
        question = tables.ask(rng, name, column)
    if form == "chat, follow-up":
        before, asked = row, column
        if rng.random() < 0.5:
            asked = rng.choice([c for c in ASKED if c != column])
            question = rng.choice(tables.SAME_PERSON).format(column=tables.spoken(column))
        else:
            before = rng.choice([i for i in range(len(table.rows)) if i != row])
            question = rng.choice(tables.SAME_COLUMN).format(name=name)
        say("user", tables.ask(rng, table[before, "Name"], asked))
        say("assistant", answer(before, asked))
    say("user", question)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Lookup(column, str(prompt), answer(row, column))


def plain_lookup(table: tables.Table, row: int, column: str, end: str) -> Lookup:
    name = table[row, "Name"]
    question = f"what is the {tables.spoken(column)} of {name}?"
    phrase = tables.answer_phrase(name, column)
    prompt = f"{PLAIN_OPENING}{table.text}Question: {question} Your answer: {phrase}{end}"
    return Lookup(column, prompt, table[row, column] + ".")


def lookups(
    tokenizer: PreTrainedTokenizerFast, form: str, rows: int, count: int
) -> Iterator[list[Lookup]]:
    """`count` tables, two look-ups of every column in each."""
    rng = random.Random(f"{SEED} {form} {rows}")
    for _ in range(count):
        table = tables.draw_table(rng, list(tables.STANDARD_COLUMNS), rows, tables.Style())
        cells = [(rng.randrange(rows), column) for column in ASKED for _ in range(2)]
        if form.startswith("plain"):
            end = " " if form == "plain, space" else ""
            yield [plain_lookup(table, row, column, end) for row, column in cells]
        else:
            yield [chat_lookup(rng, tokenizer, form, table, *cell) for cell in cells]


@torch.inference_mode()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> list[str]:
    """The greedy answers, up to the first end of turn or line.

    The prompts share a table: it is computed once, and the padding stands behind it.
    """
    encoded = tokenizer(prompts)["input_ids"]
    shared = next(i for i, ids in enumerate(zip(*encoded, strict=False)) if len(set(ids)) > 1)
    prefix = torch.tensor([encoded[0][:shared]], device=model.device)
    rests = [{"input_ids": ids[shared:]} for ids in encoded]
    rest = tokenizer.pad(rests, padding_side="left", return_tensors="pt").to(model.device)
    cache = model(prefix, use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(prompts))
    output = model.generate(
        torch.cat((prefix.expand(len(prompts), -1), rest["input_ids"]), 1),
        attention_mask=F.pad(rest["attention_mask"], (shared, 0), value=1),
        past_key_values=cache,
        max_new_tokens=48,
        do_sample=False,
    )
    texts = tokenizer.batch_decode(output[:, shared + rest["input_ids"].shape[1] :])
    return [text.split("<|end|>")[0].split("\n")[0].strip() for text in texts]


def conversation(rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """The messages of `turns` questions, calls of the tool, rows that it found, and answers."""
    table = tables.draw_table(rng, list(tables.STANDARD_COLUMNS), 30, tables.Style())
    messages: list[dict[str, Any]] = []
    before = None
    for cell in tables.draw_lookups(rng, table, turns):
        question, row, column = tables.draw_question(rng, table, *cell, before, tables.Style())
        call = {"type": "function", "function": tool_calls.request(table[row, "Name"])}
        found = tables.layout(table.columns, [table.rows[row]], padded=False).text
        answer = "".join(piece.text for piece in tables.answer(table, row, column))
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": found},
            {"role": "assistant", "content": answer.removesuffix("<|end|>")},
        ]
        before = row, column
    return messages


@torch.inference_mode()
def turns_right(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]
) -> list[bool]:
    """Whether greedy generation writes each turn of the assistant to its end, those before given:
    whether each of its tokens is the likeliest after the ones before it."""
    tool = {"type": "function", "function": tool_calls.LOOKUP}
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    ids = tokenizer(str(text), return_tensors="pt")["input_ids"].to(model.device)
    likeliest = model(ids).logits[0, :-1].argmax(-1).tolist()
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    tokens = ids[0].tolist()
    starts = [at for at, token in enumerate(tokens) if token == begin]
    ends = [tokens.index(end, at) for at in starts]
    return [likeliest[a:b] == tokens[a + 1 : b + 1] for a, b in zip(starts, ends, strict=True)]


def measure_calls(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, count: int, wrong: bool
) -> None:
    """Prints how many of the turns of `count` conversations are right."""
    rng = random.Random(f"{SEED} calls")
    right: Counter[str] = Counter()
    for _ in range(count):
        messages = conversation(rng, CALLS)
        turns = turns_right(model, tokenizer, messages)
        right.update(calls=sum(turns[::2]), answers=sum(turns[1::2]))
        if wrong:
            answers = [message for message in messages if message["role"] == "assistant"]
            print(
                *(f"wrong: {m}" for m, ok in zip(answers, turns, strict=True) if not ok), sep="\n"
            )
    asked = count * CALLS
    print("| conversations | questions | exact calls | exact answers |\n|---|---|---|---|")
    shares = (f"{right[k]}/{asked} ({right[k] / asked:.1%})" for k in ("calls", "answers"))
    print(f"| {count} | {CALLS} each | " + " | ".join(shares) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--tables", type=int, default=20, help="per line; 14 look-ups in each")
    parser.add_argument("--rows", type=int, nargs="+", default=[10, 30])
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--calls", type=int, default=20, help="conversations of 20 tool calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers as well")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every shape of a batch
    tokenizer = AutoTokenizer.from_pretrained(options.folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.bfloat16, trust_remote_code=False
    )
    model = model.to(options.device).eval()
    if options.forms:
        print("| form | rows | all columns | without ID | " + " | ".join(ASKED) + " |")
        print("|---" * (4 + len(ASKED)) + "|")
    for form in options.forms:
        for rows in options.rows:
            right: Counter[str] = Counter()
            asked: Counter[str] = Counter()
            for group in lookups(tokenizer, form, rows, options.tables):
                answers = generate(model, tokenizer, [lookup.prompt for lookup in group])
                for lookup, answer in zip(group, answers, strict=True):
                    asked[lookup.column] += 1
                    right[lookup.column] += answer == lookup.answer
                    if options.wrong and answer != lookup.answer:
                        print(f"wrong: {answer!r}, right: {lookup.answer!r}")
            cells = [f"{right.total()}/{asked.total()} ({right.total() / asked.total():.1%})"]
            share = (right.total() - right["ID"]) / (asked.total() - asked["ID"])
            cells.append(f"{share:.1%}")
            cells += [f"{right[column]}/{asked[column]}" for column in ASKED]
            print(f"| {form} | {rows} | " + " | ".join(cells) + " |", flush=True)
    if options.calls:
        measure_calls(model, tokenizer, options.calls, options.wrong)


if __name__ == "__main__":
    main()
