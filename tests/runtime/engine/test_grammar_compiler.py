"""Grammars are compiled within limits of time and memory, or refused with the reason."""

from __future__ import annotations

import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Timer
from time import sleep
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from
from pydantic import BaseModel

from radixcache import Busy, InvalidRequest, SamplingParams, StructuredOutputsParams
from radixcache.runtime.model.host.system_memory import resident_bytes
from radixcache.runtime.sampling import grammar as guides_module
from radixcache.runtime.sampling import grammar_compiler
from radixcache.runtime.sampling.forced_length import MAX_FORCED_BYTES, forced_length
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.tokens.schema_defaults import SPACES
from radixcache.runtime.tokens.tool_calls import Tool, ToolChoice
from radixcache.runtime.tokens.tool_formats import find_format
from tests.helpers.engines import finish
from tests.helpers.schemas import random_schema
from tests.runtime.engine.grammars import (
    EOS,
    SEED,
    STRUCTURES,
    VOCAB,
    ask,
    grammar_backend,
    make_engine,
    tokenizer,
    vocabulary,
)

REGEX, JSON = StructuredOutputsParams.regex, StructuredOutputsParams.json


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (JSON({"not": {}}), 'Unimplemented keys: ["not"]'),
        (JSON("{"), "EOF while parsing"),
        (JSON({"type": "text"}), "Invalid type: text"),
        (JSON({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
        (StructuredOutputsParams("choice", "5"), "not iterable"),
        (REGEX("(a"), "invalid regex"),
        (REGEX("(?=a)b"), "look-around"),
        (REGEX("\ud800"), "surrogates not allowed"),
        (StructuredOutputsParams.grammar("start: x"), 'unknown name: "x"'),
        (StructuredOutputsParams.grammar("root ::= ("), "Failed to convert"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(
    structured: StructuredOutputsParams, reason: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as refused:
        ask(engine, structured, 5)
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: JSON(False), "no JSON is of the schema false"),
        (lambda: JSON({"x": {1, 2}}), "the schema is no JSON"),
        (lambda: StructuredOutputsParams.choice([]), "a choice is a list of strings"),
        (lambda: StructuredOutputsParams.choice("yes"), "a choice is a list of strings"),
        (lambda: StructuredOutputsParams("xml", ""), "kind of a structure"),  # type: ignore[arg-type]
        (lambda: REGEX(7), "text is wanted, not int"),  # type: ignore[arg-type]
        (lambda: REGEX("a", after=""), "None is at once"),
        (lambda: REGEX("a" * (1 << 17)), "65536 at most"),
        (lambda: SamplingParams(structured_outputs={"json": {}}), "StructuredOutputsParams"),  # type: ignore[arg-type]
        (lambda: GrammarBackend(None, VOCAB, [EOS]).compile(REGEX("a")), "this model has none"),
    ],
)
def test_what_is_no_structure_is_refused_in_a_sentence(make: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        make()


def test_rules_that_lead_through_thousands_of_others_compile() -> None:
    """On a stack of 8 MiB, as other threads have, the library ends the process."""
    rules = {f"r{i}": {"items": {"$ref": f"#/$defs/r{i + 1}"}} for i in range(1500)}
    schema = {"$ref": "#/$defs/r0", "$defs": {**rules, "r1500": {"type": "null"}}}
    grammar_backend().compile(
        StructuredOutputsParams.json(json.dumps(schema, separators=(",", ":")))
    )


PATTERNS = [
    {"type": "string", "pattern": f".*{letter}.{{10}}"} for letter in "abcdefghijklmnopqrst"
]
ENDLESS = {
    "memory": StructuredOutputsParams.json({"allOf": PATTERNS}),
    "time": StructuredOutputsParams.json({"type": "integer", "multipleOf": 99_999_999}),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_grammar_that_compiles_for_ever_is_refused_and_leaves_nothing(monkeypatch, kind) -> None:
    own = GrammarBackend(tokenizer(), VOCAB, [EOS])
    own.compile(StructuredOutputsParams.regex("first"))
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", 1)
    before = resident_bytes()
    with pytest.raises(InvalidRequest, match="too complex: it takes more than 1 seconds or 128"):
        own.compile(ENDLESS[kind])
    assert resident_bytes() < before + (20 << 20)
    monkeypatch.undo()
    assert own.compile(StructuredOutputsParams.regex("second")).num_bytes < 20 << 20
    monkeypatch.setattr(guides_module, "try_compile", None)  # it is not tried again
    with pytest.raises(InvalidRequest, match="too complex"):
        own.compile(ENDLESS[kind])


def test_the_time_to_read_a_vocabulary_is_not_the_grammars(monkeypatch) -> None:
    monkeypatch.setattr(grammar_compiler, "WALL_SECONDS", 2)
    monkeypatch.setattr(grammar_compiler, "_idle", [])
    begin = grammar_compiler._Process

    def begin_slowly() -> grammar_compiler._Process:
        process = begin()
        process._process.send_signal(signal.SIGSTOP)
        Timer(3, process._process.send_signal, (signal.SIGCONT,)).start()
        return process

    monkeypatch.setattr(grammar_compiler, "_Process", begin_slowly)
    GrammarBackend(tokenizer(), VOCAB, [EOS]).compile(StructuredOutputsParams.regex("slow"))
    for process in grammar_compiler._idle:
        process.end()


def test_a_process_that_compiles_may_end_and_is_begun_anew() -> None:
    own = GrammarBackend(tokenizer(), VOCAB, [EOS])
    own.compile(StructuredOutputsParams.regex("one"))
    for process in grammar_compiler._idle:
        process._process.kill()
        process._process.wait()
    assert own.compile(StructuredOutputsParams.regex("two")).matcher.get_error() == ""


def test_who_finds_all_compilers_busy_is_told_to_try_again(monkeypatch) -> None:
    own, go_on = GrammarBackend(tokenizer(), VOCAB, [EOS]), Event()
    done = own.compile(STRUCTURES["json"])

    def take_long(*_: object) -> int:
        assert go_on.wait(30)
        return 0

    monkeypatch.setattr(guides_module, "try_compile", take_long)
    monkeypatch.setattr(guides_module, "PATIENCE", 0.05)
    with ThreadPoolExecutor(2) as pool:
        slow = [
            pool.submit(own.compile, StructuredOutputsParams.regex(f"slow{i}")) for i in range(2)
        ]
        while own._compilers._value:
            sleep(0.01)
        with pytest.raises(Busy, match="try again"):
            own.compile(StructuredOutputsParams.regex("another"))
        assert own.compile(STRUCTURES["json"]) is done
        go_on.set()
        assert all(one.result().matcher.get_error() == "" for one in slow)


LONG = {
    "items": JSON({"type": "array", "minItems": 2000, "items": {"const": "x" * 1000}}),
    "regex": REGEX("(a{1000}){1000}"),
    "rules": StructuredOutputsParams.grammar(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(20)) + '\nr20: "x"'
    ),
    "a constant with any key": JSON({"const": {"title": "x" * 9000}}),
    "a length": JSON({"type": "string", "pattern": "^a*$", "minLength": 9000}),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_grammar_that_forces_a_long_text_gives_a_few_tokens_at_a_time(kind: str) -> None:
    grammar = grammar_backend().grammar(LONG[kind])
    assert not grammar.forced(np.empty(0, np.int32))
    engine = make_engine()
    request = ask(engine, LONG[kind], 5, max_tokens=4)
    finish(engine)
    assert len(request.output().outputs[0].token_ids) == 4 and request.error is None


def bounded_text(structured: StructuredOutputsParams, seed: int) -> None:
    """Along a random answer, the library forces no more than `forced_length` says."""
    bound = forced_length(structured.kind, structured.value)
    text = structured.value or '{"type": "object"}'
    if structured.kind in ("json", "json_object"):
        source = LLMatcher.grammar_from_json_schema(text, SPACES)
    else:
        source = grammar_from(structured.kind, text)  # type: ignore[arg-type]
    matcher, choose = LLMatcher(vocabulary(), source, log_level=0), random.Random(seed)
    for _ in range(60):
        if matcher.is_error() or matcher.is_stopped():
            return
        assert len(matcher.compute_ff_bytes().decode(errors="replace")) <= bound
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not len(allowed) or not matcher.consume_token(int(choose.choice(allowed))):
            return


def test_forced_texts_are_no_longer_than_their_bound() -> None:
    choose, finite = random.Random(SEED), 0
    structures = [*STRUCTURES.values()] + [
        StructuredOutputsParams.json(random_schema(choose)) for _ in range(60)
    ]
    for seed, structured in enumerate(structures):
        finite += forced_length(structured.kind, structured.value) <= MAX_FORCED_BYTES
        bounded_text(structured, seed)
    assert finite > len(structures) / 2


def test_threads_share_what_is_compiled_and_the_least_used_is_dropped(monkeypatch) -> None:
    own = GrammarBackend(tokenizer(), VOCAB, [EOS])
    many = [StructuredOutputsParams.regex(f"a{{{i}}}") for i in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(own.compile, many * 4))
    assert all(own.compile(one) is matcher for one, matcher in zip(many, found[-8:], strict=True))
    monkeypatch.setattr(guides_module, "MAX_GRAMMARS", 4)
    own.compile(many[0])
    own.compile(StructuredOutputsParams.regex("z"))
    assert own.compile(many[0]) is found[-8]
    assert ("regex", "a{2}") not in own._compiled and len(own._compiled) == 4
    assert own.compile(many[1]) is found[-7]  # which is in use, in this test


def test_a_pydantic_model_is_its_schema():
    class Person(BaseModel):
        name: str
        age: int

    assert StructuredOutputsParams.json(Person) == StructuredOutputsParams.json(
        Person.model_json_schema()
    )


@pytest.mark.parametrize("said", ["description", "enum"])
def test_118_kilobytes_of_tools_compile(said: str) -> None:
    """Of words about them, or of what they take."""
    tools = []
    for i in range(112):
        more: Any = [f"{i} is choice {j} of many" for j in range(36)]
        more = "A word. " * 120 if said == "description" else more
        schema = {"properties": {"a": {"type": "string", said: more}}, "required": ["a"]}
        tools.append(Tool(f"tool_{i}", schema))
    assert sum(len(json.dumps(tool.as_template())) for tool in tools) > 118_000
    hermes = find_format("{{ messages }}")
    assert hermes is not None
    lark = hermes.grammar(tools, ToolChoice("required"), tokenizer().spell)
    assert len(lark) < 40_000 or said == "enum"
    assert grammar_backend().compile(StructuredOutputsParams.grammar(lark)).num_bytes < 64 << 20
