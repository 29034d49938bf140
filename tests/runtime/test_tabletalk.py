"""The bundled model and the tool that it calls; what its conversations without tools stay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radixcache import LLM, RequestOutput, SamplingParams
from radixcache.runtime.files import BUNDLED_MODEL

Message = dict[str, Any]

# The tool that training/README.md documents.
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the row of a person.",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"type": "string", "description": "Name = first and last name"}
            },
            "required": ["where"],
        },
    },
}
HEADER = """| ID | Name | Age | Occupation | Country | Email | Phone Number | Address |
|---|---|---|---|---|---|---|---|
"""
PEOPLE = {
    "Nora Holm": "| 7 | Nora Holm | 41 | Pilot | Chile | nora.h@mail.net | 555-2018 "
    "| 12 Oak Ave, Oslo, NO |",
    "Ada Byron": "| 19 | Ada Byron | 36 | Judge | Japan | ada.b@example.com | 555-7730 "
    "| 8 Mill Rd, Lima, PE |",
    "Vugo Tamirek": "| 23 | Vugo Tamirek | 58 | Baker | Norway | vugo.t@test.org | 555-4416 "
    "| 305 Elm St, Porto, PT |",
}
COLUMNS = HEADER.partition("\n")[0].strip("| ").split(" | ")
GREEDY = SamplingParams(temperature=0, max_tokens=60)
# Of the conversation below, by the tokenizer and template as they were before there was a tool.
TOKENS_BEFORE = [
    2, 37, 2004, 18, 203, 96, 2154, 2022, 1973, 2143, 2110, 96, 2110, 2144, 906, 1528, 2022, 225,
    23, 26, 2022, 203, 1, 3, 2025, 2026, 2003, 360, 405, 486, 89, 11, 87, 350, 309, 16, 225, 6, 44,
    562, 83, 6, 35, 1, 4, 2153, 2024, 1998, 906, 1528, 2003, 225, 23, 26, 18, 1, 3, 2075, 225, 95,
    265, 73, 97, 225, 73, 17, 2151, 2039, 30, 225, 32, 88, 83, 317, 34, 35, 1, 4,
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found: Any = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


def call(**function: Any) -> Message:
    return {"type": "function", "function": function}


# ----------------------------------------------------------------------- the template and tokens


def test_a_conversation_without_tools_has_the_tokens_that_it_always_had(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Which also means that the trained ids stand for what they always stood for."""
    messages = [
        {"role": "system", "content": "A table.\n| Name | Age |\n|---|---|\n| Hugo Marsh | 36 |\n"},
        {"role": "user", "content": 'How old is Xobazu\'s son, "Hugo"?'},
        {"role": "assistant", "content": "The age of Hugo Marsh is 36."},
        {"role": "user", "content": "And {the} e-mail address: <tool>?"},
    ]
    found: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert found["input_ids"] == TOKENS_BEFORE
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    digest = hashlib.sha256(json.dumps(words[:2155]).encode()).hexdigest()
    assert digest == "8af90bddd2dfcf0651044fdda5097faea5c8c3a4a2470f424e6709896aa7a4d2"


# -------------------------------------------------------------------------------------- the tool


def agent(
    llm: LLM, tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str, str]]
) -> Iterator[RequestOutput]:
    """Asks (question, name, column) after (question, name, column), and runs the tool."""
    messages: list[Message] = []

    def ask() -> RequestOutput:
        text = tokenizer.apply_chat_template(
            messages, tools=[LOOKUP], tokenize=False, add_generation_prompt=True
        )
        (output,) = llm.generate(str(text), GREEDY)
        return output

    for question, name, column in turns:
        messages.append({"role": "user", "content": question})
        called = ask()
        text = called.outputs[0].text
        assert text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>"), question
        function = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert function == {"name": "lookup", "arguments": {"where": f"Name = {name}"}}, question
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(**function)]})
        messages.append({"role": "tool", "content": HEADER + PEOPLE[name]})
        answered = ask()
        value = PEOPLE[name].strip("| ").split(" | ")[COLUMNS.index(column)]
        spoken = column if column == "ID" else column.lower()
        assert answered.outputs[0].text == f"The {spoken} of {name} is {value}.", question
        messages.append({"role": "assistant", "content": answered.outputs[0].text})
        yield called
        yield answered


def test_the_model_calls_its_tool_and_answers_from_what_it_found(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A name that is in no list of the training, follow-ups; each prompt's new tokens only."""
    turns = [
        ("What is the occupation of Vugo Tamirek?", "Vugo Tamirek", "Occupation"),
        ("And the age?", "Vugo Tamirek", "Age"),
        ("What about Nora Holm?", "Nora Holm", "Age"),
    ]
    llm = LLM()
    seen = 0
    for output in agent(llm, tokenizer, turns):
        assert output.num_cached_tokens == seen
        seen = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    llm.cache.check()
