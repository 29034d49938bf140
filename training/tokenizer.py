"""The tokenizer: byte-level, lossless, with every known word as one token.

A small byte-pair vocabulary learnt on made-up syllables spells unknown words in 2-3 pieces.
The words of the tables and the questions are then added whole; `ignore_merges` finds them
before any merge runs. Digits stay single, so numbers are copied digit by digit; the space before
a digit is a token of its own, so a prompt that ends in a space works; " |\n|", the end of a row
and the start of the next, is one token.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import tables
from tables import WORDS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
SYLLABLE_VOCABULARY = 720
PIECES = r" ?\|\n\|| ?\p{L}+|\p{N}|-{2,}| ?[^\s\p{L}\p{N}]|\n|[^\S\n]+(?!\S)|\s"
CHAT_TEMPLATE = (
    "{% set told = messages and messages[0]['role'] == 'system' %}"
    "{% if tools %}<|system|>"
    "{% if told and messages[0]['content'] %}{{ messages[0]['content'] }}\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}<|end|>"
    "{% endif %}"
    "{% for m in messages %}{% if not (tools and told and loop.first) %}"
    "<|{{ m['role'] }}|>{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '\\n' if m['content'] or not loop.first }}"
    "<tool_call>\n{\"name\": {{ call['function']['name'] | tojson }}, "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}\n</tool_call>"
    "{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# What calls and descriptions of tools are made of. They came last: no id before them may change.
TOOL_WORDS = (
    "lookup", "where", "Name", "\u0120=", "description", "parameters", "properties", "type",
    "object", "string", "required",
)  # fmt: skip
TOOL_TOKENS = (
    "<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}',
)  # fmt: skip
MAX_LENGTH = 4096


def _whole_texts() -> Iterator[str]:
    """Texts whose every piece becomes a token."""
    for name in WORDS["first names"] + WORDS["last names"]:
        yield f" {name} {name.lower()}.{name.lower()}"  # in cells, and inside email addresses
    for title in (
        "occupations", "countries", "cities", "streets", "street types", "regions",
        "departments", "colors", "hobbies", "languages",
    ):  # fmt: skip
        yield from (f" {word}" for word in WORDS[title])
    for column in tables.COLUMNS:
        yield f" {column} {column.lower()}"
    for opening in tables.OPENINGS:
        yield opening + opening.lower()
    wordings = [tables.QUESTIONS, tables.LATER_QUESTIONS, tables.SAME_PERSON, tables.SAME_COLUMN]
    for questions in (*wordings, *tables.COLUMN_QUESTIONS.values()):
        for question in questions:
            yield question.format(name="|", column="|")
            yield " " + question.format(name="|", column="|")
    yield "Question: Your answer: The age of | is"
    yield "The"
    yield from (f" |{domain}@{domain}" for domain in sorted(set(WORDS["mail domains"])))
    yield "| |\n| |\n|\n| |"
    yield from ("x" + " " * width + "|" for width in range(3, 26))  # padding
    yield from ("|" + "-" * width + "|" for width in range(2, 36))  # the line under the header


def _made_up_texts() -> Iterator[str]:
    rng = random.Random(1)
    for _ in range(20_000):
        word = tables.made_up_word(rng)
        yield f" {word}"
        yield f".{word.lower()} {word.lower()}"


def build() -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    syllables = Tokenizer(models.BPE())
    syllables.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=SYLLABLE_VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    syllables.train_from_iterator(_made_up_texts(), trainer)
    description = json.loads(syllables.to_str())
    vocabulary = description["model"]["vocab"]
    for text in _whole_texts():
        for piece, _ in split.pre_tokenize_str(text):
            vocabulary.setdefault(piece, len(vocabulary))
    description["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(_with_tools(tokenizer))


def _with_tools(tokenizer: Tokenizer) -> Tokenizer:
    """The same with the tokens of tool calls behind all others, where they are missing."""
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    for piece in TOOL_WORDS:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.add_special_tokens(["<|tool|>"])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    return tokenizer


def load(folder: Path) -> PreTrainedTokenizerFast:
    return wrap(_with_tools(Tokenizer.from_file(str(folder / "tokenizer.json"))))


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
