"""What a model wrote is taken apart alike however it comes, in each format."""

from __future__ import annotations

import json
import random

import pytest

from radixcache.runtime.tokens.mended_json import MendedJson
from radixcache.runtime.tokens.tool_calls import MAX_DEPTH, ParsedMessage, read_object
from radixcache.runtime.tokens.tool_formats import find_format
from radixcache.runtime.tokens.tool_parser import MessageParser
from tests.runtime.tokens.tool_texts import (
    ALL,
    CODER,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_11,
    WITH_MANY,
    each,
    fmt,
    written,
)

SCHEMAS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "object"}}}}
TRICKY = {"a": 'He said: "</tool_call>}" \\', "b": {"c": [1, {"d": "\n"}]}}


def parse(
    text: str, template: str, rng: random.Random | None = None, cut: bool = False, **more: bool
) -> MessageParser:
    """All at once, or in pieces of up to five characters; `cut` by a limit."""
    parser = MessageParser(fmt(template), schemas=SCHEMAS, **more)
    while rng and text:
        size = rng.randint(1, 5)
        parser.feed(text[:size])
        text = text[size:]
    parser.feed(text, ended=True, cut=cut)
    return parser


def meaning(said: ParsedMessage) -> tuple[object, ...]:
    calls = [(call.name, read_object(call.arguments)) for call in said.calls]
    return said.content, said.reasoning, calls


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_a_call_is_found_however_it_comes(template: str, seed: int):
    arguments = {**TRICKY, "a": "tricky enough"} if template == CODER else TRICKY
    for given in (arguments, {}, {"a": "x"}):
        said = parse(written(template, "f", given), template, random.Random(seed)).message()
        assert meaning(said) == ("", "", [("f", given)])
        assert said == parse(written(template, "f", given), template).message()._replace(
            calls=said.calls  # but for the ids
        )


@WITH_MANY
def test_content_calls_and_thoughts_are_told_apart(template: str):
    calls = "\n".join(written(template, name, {"a": name}) for name in "fg")
    text = f"<think>\nLet me see: 1 < 2.\n</think>\n\nI look it up.\n{calls}"
    expected = ("I look it up.", "Let me see: 1 < 2.", [("f", {"a": "f"}), ("g", {"a": "g"})])
    for seed in range(3):
        parser = parse(text, template, random.Random(seed), reasons=True)
        assert meaning(parser.message()) == expected
        within = text.removeprefix("<think>\n")
        assert meaning(parse(within, template, thinking=True).message()) == expected
    ids = [call.id for call in parser.message().calls]
    assert len({*ids}) == 2
    assert all(len(i) == (9 if template == MISTRAL_11 else 29) for i in ids)


@ALL
def test_what_is_no_call_is_content(template: str):
    call = written(template, "f", {"a": "x"})
    for text in (
        "plain",
        ' {"name": "Ada"} and so on\n',
        "a < b, [TOOL_C and <tool_",
        call[: call.index("f") - 2],
        call.replace("f", "", 1) if template != CODER else call.replace("f>", ">", 1),
    ):
        for rng in (None, random.Random(0)):
            parser = parse(text, template, rng)
            assert (parser.message().content, parser.message().calls) == (text, ())


@ALL
def test_a_call_that_is_cut_short_is_a_call(template: str):
    """As it was streamed; what cut it off says that it is not whole."""
    whole = written(template, "f", {"a": "x", "b": {}})
    first = written(template, "g", {}) + "\n"
    if template in (MISTRAL, LLAMA):
        first = ""
    cut = "Well. " * (template != LLAMA) + first + whole[: whole.rindex("x") + 1]
    for rng in (None, random.Random(0)):
        parser = parse(cut, template, rng, cut=True)
        *_, call = parser.message().calls
        assert call.arguments == '{"a": "x'
        assert call.as_template()["function"]["arguments"] == {"INVALID_JSON": call.arguments}
        assert parser.message().content == "Well." * (template != LLAMA)


@each(HERMES, MISTRAL_11, MISTRAL, LLAMA)
def test_what_a_limit_has_cut_off_is_not_completed(template: str):
    cut = written(template, "f", {"a": "x"}).partition("x")[0] + 'x"'
    (call,) = parse(cut, template, cut=True).message().calls
    assert call.arguments == '{"a": "x"'
    (call,) = parse(cut, template).message().calls
    assert read_object(call.arguments) == {"a": "x"}


@pytest.mark.parametrize(
    "value", ["NaN", "1e999", '"\\ud800"', "[" * 100 + "]" * 100, "[" * 5000 + "]" * 5000, "{]"]
)
def test_arguments_that_no_client_could_read_stay_as_they_are(value: str):
    """Python reads most as JSON, and fails when it answers with them, or gives up at once."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>'
    (call,) = parse(text, HERMES).message().calls
    assert call.as_template()["function"]["arguments"] == {"INVALID_JSON": call.arguments}
    assert call.arguments.startswith(f'{{"a": {value}}}')


@each(HERMES, CODER)
def test_what_is_nested_too_deeply_is_no_json(template: str):
    deep = "[" * 100_000 + "]" * 100_000
    (call,) = parse(written(template, "f", {"c": 1}).replace("1", deep), template).message().calls
    assert read_object(call.arguments) == (None if template == HERMES else {"c": deep})


CALLED = ("", "", [("f", {"a": "x"})])
NEARLY_RIGHT = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x\n\ty\\"}}\n</tool_call>'.replace("\\", ""),
     ("", "", [("f", {"a": "x\n\ty"})])),
    ('<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>', CALLED),
    ('<tool_call>{"arguments": {"a": "</tool_call>\n"}, "name": "f"}</tool_call>',
     ("", "", [("f", {"a": "</tool_call>\n"})])),
    ('<tool_call>{"name": "f", "parameters": {"a": "x"}}</tool_call>', CALLED),
    ('<tool_call>{"id": 1, "name": "f", "arguments": {"a": "x"}}</tool_call>', CALLED),
    ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}', CALLED),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}</tool_call>', CALLED),
    ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", {})])),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", {})])),
    ('<tool_call>{"name": "f", "arguments": ""}', ("", "", [("f", {})])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"}}', CALLED),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"}', CALLED),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"', CALLED),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"}\n</tool_call>', CALLED),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"\n</tool_call>', CALLED),
    ('<tool_call>{"arguments": {"a": "x"}, "name": "f"\n</tool_call>', CALLED),
    ('<tool_call>{"name": "f", "arguments": {"b": [1, {"c": 2}}}</tool_call>',
     ("", "", [("f", {"b": [1, {"c": 2}]})])),
    ('<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>\nDone.',
     ("Done.", "", CALLED[2])),
    ('<tool_call>{"name": "f", "arguments": {"a": "x"}}\nDone.', ("Done.", "", CALLED[2])),
    ('<tool_call>{"name": "f", "arguments": {"a": "x"}}}\n</tool_call>?',
     ("}\n</tool_call>?", "", CALLED[2])),
    ('<tool_call>{"name": "f", "arguments": {"a": "x"}\n<tool_call>{"name": "g"}',
     ("", "", [*CALLED[2], ("g", {})])),
]  # fmt: skip


OF_OTHERS = [
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"a": "x"}}'),
    (LLAMA, '{"parameters": {"a": "x"}, "name": "f"}'),
    (LLAMA, '{"name": "f", "parameters": {"a": "x"}'),
    (LLAMA, '<|python_tag|>{"name": "f", "arguments": {"a": "x"}}'),
    (MISTRAL, '[TOOL_CALLS] [{"arguments": {"a": "x"}, "name": "f"}]'),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}}'),
    (MISTRAL_11, '[TOOL_CALLS]f[ARGS]{"a": "x"'),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>"),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>"),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx"),
]
NO_CALLS = [
    (HERMES, '<tool_call>{"arguments": {"a": "x"}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f g", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 5}</tool_call>'),
    (HERMES, '<tool_call>{"names": "f", "and": "other keys than those of a call"}'),
    (HERMES, "<tool_call>f(x)</tool_call>"),
    (HERMES, "A mark: <tool_call> \n<tool_call>, two of them"),
    (LLAMA, '{"name": "Ada", "parameters": 5}'),
    (LLAMA, '{"name": "Ada"}'),
    (HERMES, 'Hi <tool_call>{"na": "f", "arguments": {"a": 1}, "name": "f"}'),
    (HERMES, "Hi <tool_call>{" + " " * 40 + '"arguments": {"a": 1}, "name": "f"}'),
    (HERMES, 'Hi <tool_call>{"name": 1, "arguments": {"aaaaaaaaaa": 1}, "name": "f"}'),
]
TWO = [
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a":1}}]'),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}'),
]
SEVERAL = ("", "", [("f", {}), ("g", {"a": 1})])


@pytest.mark.parametrize(
    ("template", "text", "wanted"),
    [
        *((HERMES, *row) for row in NEARLY_RIGHT),
        *((*row, CALLED) for row in OF_OTHERS),
        *((*row, SEVERAL) for row in TWO),
        *((template, text, (text, "", [])) for template, text in NO_CALLS),
    ],
)
def test_a_call_that_is_nearly_right_is_one_however_it_comes(
    template: str, text: str, wanted: tuple[object, ...]
):
    for rng in (None, *map(random.Random, range(3))):
        assert meaning(parse(text, template, rng).message()) == wanted


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFS = {"name": {"type": "string"}, "maybe": OPTIONAL, "id": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # Text, whatever it looks like.
        ({"type": ["string", "null"]}, "12345", "12345"),
        (OPTIONAL, "12345", "12345"),
        ({"type": "string", "nullable": True}, "[1]", "[1]"),
        ({"type": "string"}, '{"name": "package"}', '{"name": "package"}'),
        (OPTIONAL, '{"name": "package"}', '{"name": "package"}'),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "12", "12"),
        ({"$ref": "#/$defs/name"}, "true", "true"),
        ({"$ref": "#/$defs/maybe"}, "1e3", "1e3"),
        ({"allOf": [{"$ref": "#/$defs/name"}], "description": "d"}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "true"}, "true", "true"),
        ({"enum": ["1", "2", None]}, "3", "3"),
        ({"description": "no type"}, "12345", "12345"),
        ({}, "true", "true"),
        ({"$ref": "#/$defs/nowhere"}, "1", "1"),
        # Nothing else than what was asked for.
        ({"type": ["string", "null"]}, "null", None),
        (OPTIONAL, "null", None),
        ({"$ref": "#/$defs/maybe"}, "null", None),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": ["a", 1]}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": ["boolean", "null"]}, "False", False),
        ({"enum": [True, None]}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer"}, "True", "True"),
        ({"$ref": "#/$defs/id"}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/id"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"enum": ["a"]}, {"type": "integer"}]}, "5", 5),
        ({"items": {}}, "[1]", [1]),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"type": "number"}, "many", "many"),
        ({"$ref": "#/properties/a"}, "1", "1"),  # itself
        ({"anyOf": [{"$ref": "#/properties/a"}] * 20 + [{"type": "integer"}]}, "1", 1),
    ],
)
def test_a_tagged_argument_has_the_type_that_its_schema_tells(schema, text, value):
    called = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    parser = MessageParser(fmt(CODER), schemas={"f": {"properties": {"a": schema}, "$defs": DEFS}})
    parser.feed(called + "\n</tool_call>", ended=True)
    (call,) = parser.message().calls
    assert json.dumps(read_object(call.arguments)) == json.dumps({"a": value})


@pytest.mark.parametrize("begun", ['<tool_call>{"name": "' + "a" * 300, "<tool_call>" + " " * 300])
def test_nobody_waits_for_ever_for_a_name(begun: str):
    """What is held back is read again with each token."""
    parser = MessageParser(fmt(HERMES))
    parser.feed(begun)
    assert parser.feed("b")[-1].text.endswith("b")
    assert parser.message().content == begun + "b"


BEGUN = '<tool_call>{"arguments": '


@pytest.mark.parametrize("text", [BEGUN * 8_000, (BEGUN + "[") * 8_000])
def test_what_is_no_call_is_not_read_again_for_ever(text: str, monkeypatch: pytest.MonkeyPatch):
    fed: list[int] = []
    feed = MendedJson.feed

    def counted(mended: MendedJson, text: str, ended: bool) -> tuple[str, int]:
        fed.append(len(text))
        return feed(mended, text, ended)

    monkeypatch.setattr(MendedJson, "feed", counted)
    assert meaning(parse(text, HERMES).message()) == (text, "", [])
    assert sum(fed) < 10 * len(text)


def test_a_bracket_is_not_compared_with_all_that_are_open():
    """Only with as many as JSON is read with: others would be many times as many."""
    mended = MendedJson()
    assert mended.feed("[" + "{" * MAX_DEPTH + "]", ended=False)[0].endswith("{]")
    assert not mended.done
    mended = MendedJson()
    assert mended.feed("[" + "{" * (MAX_DEPTH - 1) + "]", ended=False)[0].endswith("}]")
    assert mended.done


def test_arguments_stream_as_they_come():
    parser = MessageParser(fmt(HERMES))
    parser.feed('<tool_call>\n{"name": "f", "argu')
    head = parser.feed('ments": {"a": "lo')
    assert [(p.kind, p.text) for p in head] == [("call", "f"), ("arguments", '{"a": "lo')]
    assert [p.text for p in parser.feed("ng\\")] == ["ng\\"]
    assert [p.text for p in parser.feed('""}}\n</tool')] == ['""}']
    assert parser.feed("_call>", ended=True) == []


def test_text_streams_as_it_comes_but_for_what_may_be_a_mark():
    parser = MessageParser(fmt(HERMES))
    assert [p.text for p in parser.feed("One ")] == ["One"]
    assert [p.text for p in parser.feed("two <tool")] == [" two"]
    assert [p.text for p in parser.feed("s> three")] == [" <tools> three"]
    assert [p.text for p in parser.feed("\n", ended=True)] == ["\n"]


def test_without_tools_and_thoughts_text_passes_untouched():
    parser = MessageParser(None)
    for text in (" \n", "<tool_call>", "<think>", " "):
        assert [p.text for p in parser.feed(text)] == [text]


def test_thoughts_without_an_end_are_thoughts():
    parser = MessageParser(None, thinking=True)
    parser.feed("\nI wonder ")
    parser.feed("why", ended=True)
    assert parser.message() == ParsedMessage("", "I wonder why")


def test_templates_of_unknown_formats_are_not_mistaken():
    assert find_format("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>") is None  # GLM
    assert find_format("<|tool▁calls▁begin|>") is None
    assert find_format("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]") is None
    assert find_format("{{ tools }}") is None
