"""Guided answers against a plain loop over the grammar's matcher, and against `jsonschema`."""

from __future__ import annotations

import itertools
import json
import random
import re
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, grammar_from

from radixcache import StructuredOutputsParams
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.grammar import GrammarBackend
from tests.helpers.engines import assert_no_page_is_lost, finish
from tests.helpers.hash_model import logits_after
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


def plain(prompt: list[int], structured: StructuredOutputsParams, max_tokens: int) -> list[int]:
    """The likeliest token of those that the matcher takes, tried one by one; then the next."""
    if is_json := structured.kind in ("json", "json_object"):
        schema = structured.value or '{"type": "object"}'
        grammar = LLMatcher.grammar_from_json_schema(
            schema, {"whitespace_pattern": "[ ]|\n[ \t]{0,16}"}
        )
    else:
        grammar = grammar_from(structured.kind, structured.value)  # type: ignore[arg-type]
    matcher, said = LLMatcher(vocabulary(), grammar, log_level=0), list[int]()
    while len(said) < max_tokens and not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()[:1]  # of all ways to write it the tokenizer's own
        last = tokenizer().decode(said[-1:])
        allowed = forced or [
            token
            for token in range(VOCAB)
            if matcher.validate_tokens([token])
            and not (is_json and re.search("[,:]\n", last + tokenizer().decode([token])))
        ]
        logits = logits_after(np.array(prompt + said), VOCAB)
        said.append(max(allowed, key=lambda token: logits[token]))
        assert matcher.consume_token(said[-1])
        if said[-1] == EOS:
            break
    return said


@pytest.mark.parametrize("kind", STRUCTURES)
def test_greedy_tokens_are_the_likeliest_that_the_grammar_takes(kind: str) -> None:
    prompt, structured = [5, 6, 7], STRUCTURES[kind]
    wanted = plain(prompt, structured, 24)
    steps = []
    for forces in (False, True):
        engine = make_engine(forces=forces)
        engine.overlap = forces  # a row behind which tokens were forced is not drawn again
        request = ask(engine, structured, *prompt, max_tokens=24)
        steps.append(finish(engine))
        (sequence,) = request.sequences
        assert sequence.generated.tolist() == wanted
        assert sequence.finish_reason == ("length" if len(wanted) == 24 else "stop")
        assert sequence.output().text == tokenizer().decode(wanted)
        assert_no_page_is_lost(engine)
    assert steps[0] == len(wanted)
    if kind in ("json", "regex", "grammar"):
        assert steps[1] < steps[0]


def told(request: Request) -> list[Any]:
    return [
        (s.generated.tolist(), s.finish_reason, s.stop_reason, s.output().text, len(s.logprobs))
        for s in request.sequences
    ]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_tokenizer_that_is_cut_off_within_the_grammar_undoes_the_step(error, monkeypatch) -> None:
    text = tokenizer()
    encode, calls, fails_at = text.encode_within, itertools.count(), set[int]()

    def within(part: str) -> list[int]:
        if next(calls) in fails_at:
            raise error
        return encode(part)

    monkeypatch.setattr(text, "encode_within", within)
    backend = GrammarBackend(text, VOCAB, [EOS])
    structure = StructuredOutputsParams.choice(["a choice of words", "a chance", "bees"])
    answers, num_cut_off = set[tuple[int, ...]](), 0
    for failing in range(6):
        engine, calls, fails_at = make_engine(), itertools.count(), {failing} if failing else set()
        engine._grammar_backend = backend
        request = ask(engine, structure, 5, 6, max_tokens=20)
        while engine.has_work:
            with suppress(error):
                engine.step()
                continue
            num_cut_off += 1
        assert request.error is None
        answers.add(tuple(request.sequences[0].generated.tolist()))
    assert len(answers) == 1 and num_cut_off


def test_forced_tokens_are_no_prompt_and_are_cached_like_others() -> None:
    engine = make_engine()
    request = ask(engine, STRUCTURES["json"], 5, 6, 7, 8, max_tokens=40)
    (sequence,) = request.sequences
    lengths = [4]
    while engine.has_work:
        engine.step()
        lengths.append(len(sequence))
    assert max(np.diff(lengths)) > 4 and len(lengths) < len(sequence.generated)
    assert request.prefilled_tokens == 4
    assert engine.match(sequence.tokens) == lengths[-2]  # what the last step gave has no KV


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutputsParams.json({"enum": ["<|end|>"]}),
        StructuredOutputsParams.choice(["<|end|>x"]),
        StructuredOutputsParams.regex(r"a<\|end\|>[bc]"),
        StructuredOutputsParams.grammar('root ::= "<|end|>" [a-c]'),
        StructuredOutputsParams.grammar('start: "a\\u003c|end|>" /[a-c]/'),
    ],
)
def test_the_text_of_a_special_token_is_text(structured: StructuredOutputsParams) -> None:
    for options in ({}, {"logprobs": 0}, {"seed": 3, "temperature": 1}):
        engine = make_engine()
        (answer,) = ask(engine, structured, 5, max_tokens=20, **options).sequences
        finish(engine)
        assert answer.finish_reason == "stop" and "<|end|>" in answer.output().text
        assert EOS not in answer.generated


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_an_end_within_forced_tokens_is_the_end(max_tokens: int) -> None:
    structured = StructuredOutputsParams.regex("[ab] quite a long way to the end")
    engine = make_engine()
    cut = ask(engine, structured, 9, max_tokens=max_tokens)
    stopped = ask(engine, structured, 9, max_tokens=40, stop="way")
    finish(engine)
    assert told(cut)[0][:2] == (plain([9], structured, max_tokens), "length")
    assert told(stopped)[0][1:3] == ("stop", "way")
    assert stopped.output().outputs[0].text[1:] == " quite a long "


@pytest.mark.parametrize(
    ("count", "seed"), [(300, SEED), pytest.param(1000, SEED + 1, marks=pytest.mark.exhaustive)]
)
def test_answers_to_random_schemas_are_valid(count: int, seed: int) -> None:
    rng, engine = random.Random(seed), make_engine(num_pages=60_000, tokens=500)
    asked = []
    for index in range(count):
        schema = random_schema(rng)
        how = {"temperature": index % 2, "seed": index, "max_tokens": 300}
        structured = StructuredOutputsParams.json(schema)
        asked.append((schema, ask(engine, structured, 10 + index, **how)))
    finish(engine)
    for schema, request in asked:
        (answer,) = request.output().outputs
        assert request.error is None, (schema, request.error)
        assert answer.finish_reason == "stop", (schema, answer.text)
        try:
            jsonschema.validate(json.loads(answer.text), schema)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {schema} gave {answer.text!r}: {error}") from error


LINES = """{
  "a": [
    1, {"b" : "x,"
    }
  ]
\t, "c": []}"""


@pytest.mark.parametrize("structure", ["json", "json_object"])
@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a":[1,{"b":"x,"}],"c":[]}', True),
        ('{ "a" : [ 1 , { "b" : "x," } ] , "c" : [ ] }', True),
        (LINES, True),
        (LINES.replace("\n", "\n            "), True),
        (LINES.replace("1, ", "1,  "), False),
        (LINES.replace("1, ", "1,\n"), False),
        (LINES.replace(": ", ":\n"), False),
        (LINES.replace("[\n", "[\n\n"), False),
        (LINES.replace("[\n", "[ \n"), False),
        (LINES.replace("\n", "\n" + 17 * " "), False),
        (LINES.replace("\n", "\r\n"), False),
        (LINES.replace("x,", "x,\n"), False),
        (" " + LINES, False),
        (LINES + "\n", False),
    ],
)
def test_white_space_is_bounded(structure: str, text: str, valid: bool) -> None:
    """By a token for each character, as drafts and one by one."""
    items = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/b"}]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": items}, "c": {"type": "array"}},
        "$defs": {"b": {"type": "object", "properties": {"b": {"type": "string"}}}},
    }
    asked = StructuredOutputsParams.json(schema)
    if structure == "json_object":
        asked = StructuredOutputsParams.json_object()
    for tokens in (tokenizer().encode(text), [t for c in text for t in tokenizer().encode(c)]):
        said, grammar = np.array(tokens), grammar_backend().grammar(asked)
        bits, none = np.zeros((1, VOCAB // 32), np.int32), said[:0]
        place = 0
        while place < len(said) and not grammar.is_complete(said[:place]):
            grammar.fill_masks(said[:place], none, bits)
            if not bits[0, said[place] // 32] >> said[place] % 32 & 1:
                break
            place += 1
        assert (place == len(said) and grammar.may_end(said)) == valid
        fresh = grammar_backend().grammar(asked)
        assert fresh.count_allowed(none, said) == place
        rows = np.zeros((1 + place, VOCAB // 32), np.int32)
        fresh.fill_masks(none, said[:place], rows)
        assert grammar.is_complete(said[:place]) or (rows[-1] == bits[0]).all()


def test_log_probabilities_are_those_of_the_model_not_of_the_mask() -> None:
    engine = make_engine()
    request = ask(engine, STRUCTURES["choice"], 4, 4, max_tokens=30, logprobs=3)
    finish(engine)
    (answer,) = request.output().outputs
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) > 1
    for place, (token, top) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        logits = logits_after(np.array([4, 4, *answer.token_ids[:place]]), VOCAB)
        raw = torch.from_numpy(logits).log_softmax(-1)
        assert next(iter(top)) == token
        assert {*top} == {token, *raw.topk(3).indices.tolist()}
        assert list(top.values()) == pytest.approx([raw[t].item() for t in top], abs=1e-5)


def test_a_guide_begins_behind_the_text_that_is_named() -> None:
    engine = make_engine()
    structured = StructuredOutputsParams.choice(["first", "second"], after="e")
    requests = [ask(engine, structured, i, max_tokens=400) for i in range(10, 16)]
    finish(engine)
    free = 0
    for request in requests:
        said, reason, _, text, _ = told(request)[0]
        begins = next(i for i in range(1, 400) if "e" in tokenizer().decode(said[:i]))
        before = tokenizer().decode(said[:begins])
        if reason == "stop" and said[-1] != EOS:
            assert text in (before + "first", before + "second")
        free += begins > 1
        assert [int(logits_after(np.array([*request.prompt_token_ids, *said[:i]]), VOCAB).argmax())
                for i in range(begins)] == said[:begins]  # fmt: skip
    assert free, "nothing was said before"


def test_a_grammar_of_which_nothing_is_left_to_say_ends_its_sequence() -> None:
    engine = make_engine()
    letter = tokenizer().encode("a", special=False)
    whole, half = (
        ask(engine, StructuredOutputsParams.regex(regex), 5, max_tokens=9, allowed_token_ids=letter)
        for regex in ("a{3}(x[0-9])?", "a{3}b")
    )
    finish(engine)
    assert told(whole)[0][:4] == (letter * 3, "stop", None, "aaa")
    assert half.sequences[0].finish_reason == "error" and "no token is left" in str(half.error)


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutputsParams.json({"$ref": "#"}),
        StructuredOutputsParams.grammar('start: start "a"'),
        StructuredOutputsParams.regex(r"a[^\s\S]"),
        StructuredOutputsParams.grammar('start: "b" x\nx: x "a"'),
    ],
)
def test_a_grammar_of_which_no_text_is_says_so(structured: StructuredOutputsParams) -> None:
    engine = make_engine()
    request = ask(engine, structured, 5)
    finish(engine)
    assert request.error_is_invalid and "nothing that goes on from here" in str(request.error)


def test_ends_are_ignored_only_as_long_as_the_grammar_goes_on() -> None:
    engine = make_engine()
    endless, ending = (
        ask(engine, StructuredOutputsParams.regex(regex), 7, max_tokens=50, ignore_eos=True)
        for regex in ("a(a|b)*", "a(a|b){0,9}")
    )
    finish(engine)
    assert told(endless)[0][1] == "length" and len(told(endless)[0][0]) == 50
    assert told(ending)[0][1] == "stop" and len(told(ending)[0][3]) == 10
