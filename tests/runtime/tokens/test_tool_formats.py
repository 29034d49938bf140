"""Grammars of calls let through what each family of models writes, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from radixcache.errors import InvalidRequest
from radixcache.runtime.sampling.grammar import Grammar
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice
from radixcache.runtime.tokens.tool_formats import as_rule
from radixcache.runtime.tokens.tool_parser import MessageParser
from tests.helpers.scripted import make_tokenizer
from tests.runtime.tokens.tool_texts import (
    ALL,
    CODER,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_11,
    each,
    fmt,
    written,
)

F = Tool(
    "f",
    {
        "properties": {"a": {"$ref": "#/$defs/short"}, "n": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"short": {"type": "string", "enum": ["x", "y"]}},
    },
    strict=True,
)
G = Tool("g", {"properties": {}, "additionalProperties": False})
THOUGHTS = "<think>\nWell.\n</think>\n\n"


class Grammars:
    """What a grammar lets a tokenizer's tokens say."""

    def __init__(self) -> None:
        self._tokenizer = make_tokenizer()
        self._tokenizer.add_tokens(
            ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"], special_tokens=True
        )
        self.spell = Tokenizer(self._tokenizer).spell
        self._llguidance = LLTokenizer(
            self._tokenizer.backend_tokenizer.to_str(),
            n_vocab=len(self._tokenizer),
            eos_token=[self._tokenizer.eos_token_id],
        )

    def say(self, grammar: str, text: str, plain: bool) -> str:
        """`text` up to where it is complete."""
        compiled = LLMatcher(self._llguidance, LLMatcher.grammar_from_lark(grammar), log_level=0)
        decode = partial(Tokenizer(self._tokenizer).decode, special=True)
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        ids = [token for piece in ([*text] if plain else [text]) for token in encode(piece)]
        follower = Grammar(compiled, None, decode)
        ends = (n for n in range(1, len(ids)) if follower.is_complete(np.array(ids[:n])))
        return decode(ids[: next(ends)])

    def takes(self, grammar: str, text: str, *, plain: bool = False) -> bool:
        """Whether `text` may be said; `plain` is a token for each character."""
        matcher = LLMatcher(self._llguidance, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert matcher.get_error() == ""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        ids = [token for piece in (text if plain else [text]) for token in encode(piece)]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


def grammar(grammars: Grammars, template: str, choice: ToolChoice, **more: Any) -> str:
    tools = [tool for tool in (F, G) if not choice.names or tool.name in choice.names]
    return fmt(template).grammar(tools, choice, grammars.spell, **more)


@ALL
def test_required_calls_follow_their_schemas(grammars: Grammars, template: str):
    lark = grammar(grammars, template, ToolChoice("required"), thinks=True)
    for name, arguments, valid in (
        ("f", {"a": "x"}, True),
        ("f", {"a": "y", "n": 12}, True),
        ("g", {}, True),
        ("f", {"a": "z"}, False),
        ("f", {"n": 12}, False),
        ("f", {"a": "x", "n": "twelve"}, False),
        ("h", {}, False),
    ):
        call = written(template, name, arguments)
        assert grammars.takes(lark, call) == valid, (name, arguments)
        assert grammars.takes(lark, THOUGHTS + call) == valid, (name, arguments)
    for text in ("No.", "", THOUGHTS):
        assert not grammars.takes(lark, text)
    only_f = grammar(grammars, template, ToolChoice("required", ("f",)))
    one = grammar(grammars, template, ToolChoice("required", parallel=False))
    call = written(template, "g", {})
    two = call + "\n" * (template != MISTRAL_11) + call
    for lark, text, valid in ((only_f, call, False), (one, call, True), (one, two, False)):
        assert grammars.takes(lark, text) == valid
    many = grammars.takes(grammar(grammars, template, ToolChoice("required")), two)
    assert many == (template in (HERMES, CODER, MISTRAL_11))
    any_g = fmt(template).grammar((F, G), ToolChoice("required"), grammars.spell, loose=("g",))
    for name, arguments in (("g", {"b": "any"}), ("g", {}), ("f", {"a": "any"})):
        assert grammars.takes(any_g, written(template, name, arguments)) == (name == "g")


@each(HERMES, CODER, MISTRAL_11, MISTRAL)
@pytest.mark.parametrize("calls", ["ff", "gg", "fgg", "gff"])
def test_a_call_that_repeats_the_one_before_is_the_end(
    grammars: Grammars, template: str, calls: str
):
    """However its tokens are cut, and even where all of it is forced."""
    known, tools = fmt(template), [tool for tool in (F, G) if tool.name in calls]
    spelt = {"f": written(template, "f", {"a": "x"}), "g": written(template, "g", {})}
    bare = [spelt[name].removeprefix(known.open).removesuffix(known.close) for name in calls]
    text = known.open + known.between.join(bare)
    for plain in (False, True):
        spell = partial(json.dumps, ensure_ascii=False) if plain else grammars.spell
        said = grammars.say(known.grammar(tools, ToolChoice("required"), spell), text * 2, plain)
        parser = MessageParser(known, repeats=False)
        pieces = [piece for character in said for piece in parser.feed(character)]
        pieces += parser.feed("", ended=True)
        assert [one.text for one in pieces if one.kind != "arguments"] == [*calls[:-1]]


@ALL
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("plain", [False, True])
def test_calls_that_are_free_to_come_are_as_strict(
    grammars: Grammars, template: str, parallel: bool, plain: bool
):
    """`plain`: where the tokenizer has no token for how they begin."""
    tool_format = fmt(template)
    spell = partial(json.dumps, ensure_ascii=False) if plain else grammars.spell
    lark = tool_format.grammar((F, G), ToolChoice("auto", parallel=parallel), spell)
    takes = partial(grammars.takes, lark, plain=plain)
    begun = tool_format.opener[:-1] if plain else ""
    assert takes("") and takes("No call.\n") and takes(f"No {begun}-call.")
    for before in ("", "Well.\n", begun) if template != LLAMA else ("",):
        assert takes(before + written(template, "f", {"a": "x"}))
        assert takes(before + written(template, "g", {}))
        assert not takes(before + written(template, "f", {"a": "z"}))
        assert not takes(before + written(template, "h", {}))
    if template in (HERMES, CODER, MISTRAL_11):
        between = "" if template == MISTRAL_11 else "\n"
        assert takes(between.join([written(template, "f", {"a": "x"})] * 2)) == parallel


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("json", '{"type": "object", "properties": {"b": {"type": "null"}}}', '{"b": null}'),
        ("json_object", "", '{"b": [1]}'),
        ("regex", "a/b+", "a/bb"),
        ("regex", r"a\/b\\/(\n)", "a/b\\/\n"),
        ("choice", '["one \\"two\\"", "é"]', 'one "two"'),
    ],
)
def test_an_answer_without_calls_may_have_a_form(
    grammars: Grammars, kind: str, value: str, said: str
):
    lark = grammar(grammars, HERMES, ToolChoice("auto"), answer=as_rule(kind, value))
    assert grammars.takes(lark, said)
    assert grammars.takes(lark, written(HERMES, "g", {}))
    assert not grammars.takes(lark, "said")


@pytest.mark.parametrize("value", ["{", "[" * 100_000])
def test_a_form_that_is_no_json_is_refused(value: str):
    with pytest.raises(InvalidRequest, match="the schema is no JSON"):
        as_rule("json", value)


@ALL
@pytest.mark.parametrize("kind", ["string", ["array", "null"], 5])
def test_parameters_that_are_no_object_are_refused(grammars: Grammars, template: str, kind: Any):
    with pytest.raises(InvalidRequest, match="the parameters of f must be of type object"):
        fmt(template).grammar([Tool("f", {"type": kind})], ToolChoice("required"), grammars.spell)


ALL_OF = {
    "allOf": [
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {"type": "object", "properties": {"y": {"type": "boolean"}}},
    ]
}


@pytest.mark.parametrize(
    ("told", "text", "valid"),
    [
        ({"type": "string", "enum": ["x", None, 1]}, "x", True),
        ({"type": "string", "enum": ["x", None, 1]}, "1", False),
        ({"type": "string", "enum": None}, "z", True),
        ({"type": "string"}, "a\n</parameterb>\n", True),
        ({"type": "string"}, "a</parameter>b", False),  # it would be read as its end
        ({"type": ["string", "null"]}, "12", True),
        ({"anyOf": [{"enum": ["x", "</parameterb>"]}, {"type": "integer"}]}, "x", True),
        ({"anyOf": [{"enum": ["x"]}, {"type": "integer"}]}, "12", True),
        ({"anyOf": [{"enum": ["x"]}, {"type": "integer"}]}, "z", False),
        ({"$ref": "#/properties/b"}, "3", True),
        ({"$ref": "#/properties/b"}, "z", False),
        ({}, "any", True),
        (ALL_OF, '{"x":1,"y":true}', True),
        (ALL_OF, '{"x":"","y":true}', False),
        (ALL_OF, '{"y":true}', False),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, "2", False),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, "4", True),
        ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "text", True),
    ],
)
def test_tagged_arguments_are_what_will_be_read(
    grammars: Grammars, told: dict[str, Any], text: str, valid: bool
):
    tool = Tool("f", {"properties": {"a": told, "b": {"type": "integer"}}, "required": 5})
    lark = fmt(CODER).grammar([tool], ToolChoice("required"), grammars.spell)
    assert grammars.takes(lark, written(CODER, "f", {"a": text})) == valid
    assert grammars.takes(lark, written(CODER, "f", {}))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"a>b": {}}, "cannot write an argument of the name 'a>b'"),
        ({"": {}}, "cannot write an argument of the name ''"),
        ({"a": {"type": "string", "const": 5}}, "no text can be the argument 'a'"),
        ({"a": {"type": "string", "enum": ["</parameter>"]}}, "no text can be"),
    ],
)
def test_tags_that_could_not_be_read_are_refused(
    grammars: Grammars, parameters: dict[str, Any], reason: str
):
    tool = Tool("f", {"properties": parameters}, strict=True)
    with pytest.raises(InvalidRequest, match=f"the tool 'f': .*{reason}"):
        fmt(CODER).grammar([tool], ToolChoice("required"), grammars.spell)
    free = replace(tool, strict=False)
    lark = fmt(CODER).grammar([free], ToolChoice("required"), grammars.spell)
    assert grammars.takes(lark, written(CODER, "f", {"c": "any", "d": 1}))


SAID_AS_FAR_AS_CAN_BE = [
    ({"type": "string", "not": {"const": "x"}}, "x", 5),
    ({"type": "object", "dependentRequired": {"b": ["c"]}}, {"b": 1}, "x"),
    ({"type": "array", "contains": {"const": 5}}, [1, 1], "x"),
    ({"type": "integer", "if": {"minimum": 3}, "then": {"const": 5}}, 4, "x"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 4, "x"),
]


@pytest.mark.parametrize("template", [HERMES, MISTRAL_11, LLAMA])
@pytest.mark.parametrize(("schema", "taken", "refused"), SAID_AS_FAR_AS_CAN_BE)
def test_a_tool_that_is_not_strict_is_given_what_a_grammar_can_say(
    grammars: Grammars, template: str, schema: dict[str, Any], taken: Any, refused: Any
):
    tool = Tool("f", {"properties": {"a": schema}, "required": ["a"]})
    lark = fmt(template).grammar([tool, G], ToolChoice("required"), grammars.spell)
    assert grammars.takes(lark, written(template, "f", {"a": taken}))
    assert not grammars.takes(lark, written(template, "f", {"a": refused}))
    strict = fmt(template).grammar([replace(tool, strict=True)], ToolChoice("auto"), grammars.spell)
    with pytest.raises(AssertionError, match="value_0: %json"):
        grammars.takes(strict, "")
