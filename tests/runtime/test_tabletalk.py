"""The bundled model calls its tool, which training/README.md documents, and reads what it found."""

from __future__ import annotations

from radixcache import LLM, Chat, SamplingParams

WHERE = {"type": "string", "description": "Name = first and last name"}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the row of a person.",
        "parameters": {"type": "object", "properties": {"where": WHERE}, "required": ["where"]},
    },
}
HEADER = """| ID | Name | Age | Occupation | Country | Email | Phone Number | Address |
|---|---|---|---|---|---|---|---|
"""
NORA = "| 7 | Nora Holm | 41 | Pilot | Chile | nora.h@mail.net | 555-2018 | 12 Oak Ave, Oslo, NO |"
VUGO = (
    "| 23 | Vugo Tamirek | 58 | Baker | Norway | vugo.t@test.org | 555-4416 "
    "| 305 Elm St, Porto, PT |"
)


def test_the_model_calls_its_tool_and_answers_from_what_it_found() -> None:
    """A name that is in no list of the training, follow-ups; each prompt's new tokens only."""
    params = SamplingParams(temperature=0, max_tokens=60)
    with LLM() as llm:
        chat, seen = Chat(llm, tools=[LOOKUP]), 0
        for question, row, answer in (
            ("What is the occupation of Vugo Tamirek?", VUGO, "The occupation of {} is Baker."),
            ("And the age?", VUGO, "The age of {} is 58."),
            ("What about Nora Holm?", NORA, "The age of {} is 41."),
        ):
            name = row.split(" | ")[1]
            called = chat.ask(question, params)
            (call,) = chat.messages[-1]["tool_calls"]
            arguments = {"where": f"Name = {name}"}
            assert call["function"] == {"name": "lookup", "arguments": arguments}
            found = {"role": "tool", "tool_call_id": call["id"], "content": HEADER + row}
            answered = chat.ask([found], params)
            assert answered.outputs[0].text == answer.format(name)
            for output in (called, answered):
                assert output.num_cached_tokens == seen
                seen = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        llm.call(llm.cache.check)
