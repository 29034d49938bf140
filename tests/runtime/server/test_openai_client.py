"""What the stock OpenAI client sees; the embedded runtime says what the answers should be.

The client counts as untyped here: its overloads know neither our fields nor a dictionary.
"""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from radixcache import SamplingParams
from radixcache.runtime.demo.script import TABLE
from tests.runtime.server.live import SYSTEM, LiveServer, ask
from tests.runtime.test_tabletalk import HEADER, LOOKUP, PEOPLE

QUESTION = "How old is Nora Holm?"
ANSWER = "The age of Nora Holm is 57."
PROMPT = f"{TABLE.read_text()}Question: How old is Nora Lund? Your answer:"


def test_models_are_listed_and_found(client: Any, server: LiveServer):
    (model,) = client.models.list().data
    assert model.id == "tabletalk"
    assert model.max_model_len == server.engine.max_model_len <= server.engine.model.max_context
    assert model.exact is server.engine.model.exact is False
    assert client.models.retrieve("tabletalk") == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.code == "model_not_found"


# Chat.


def test_a_chat_is_answered_and_its_second_turn_is_cached(client: Any):
    first = client.chat.completions.create(model="tabletalk", messages=ask(QUESTION))
    (choice,) = first.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop" and choice.logprobs is None
    messages = [
        *ask(QUESTION),
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And the country?"},
    ]
    second = client.chat.completions.create(model="tabletalk", messages=messages)
    assert second.choices[0].message.content == "The country of Nora Holm is Denmark."
    # All of the first turn but the last generated token, which has no KV.
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert second.usage.total_tokens == (
        second.usage.prompt_tokens + second.usage.completion_tokens
    )


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_chat_adds_up_to_the_whole_answer(client: Any, include_usage: bool):
    whole = client.chat.completions.create(model="tabletalk", messages=ask(QUESTION), n=2)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = [
        *client.chat.completions.create(
            model="tabletalk", messages=ask(QUESTION), stream=True, n=2, **options
        )
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    for index in range(2):
        parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == ANSWER
        assert [part.finish_reason for part in parts].count(None) == len(parts) - 1
        assert parts[-1].finish_reason == "stop"
        assert len(parts) > 5, "it came in one piece"
    used = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(used) == include_usage
    for usage in used:
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens
        assert chunks[-1].choices == []


def test_chat_logprobs_are_those_of_the_embedded_runtime(client: Any, server: LiveServer):
    answer = client.chat.completions.create(
        model="tabletalk", messages=ask(QUESTION), logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    llm = server.backend.llm
    (wanted,) = llm.chat(ask(QUESTION), SamplingParams(temperature=0, max_tokens=64, logprobs=3))
    tokens, logprobs = wanted.outputs[0].token_ids, wanted.outputs[0].logprobs
    assert llm.tokenizer and logprobs and len(content) == len(tokens)
    assert "".join(token.token for token in content) == ANSWER + "<|end|>"
    for seen, token, top in zip(content, tokens, logprobs, strict=True):
        assert seen.token == llm.tokenizer.decode([token], special=True)
        assert bytes(seen.bytes or []).decode() == seen.token
        assert seen.logprob == pytest.approx(top[token], abs=1e-4)
        likeliest = sorted(top.values(), reverse=True)[:3]
        assert [t.logprob for t in seen.top_logprobs] == pytest.approx(likeliest, abs=1e-3)
        assert seen.top_logprobs[0].token == seen.token  # it was greedy


def test_streamed_logprobs_are_those_of_the_whole_answer(client: Any):
    options = {"model": "tabletalk", "messages": ask(QUESTION), "logprobs": True}
    whole = client.chat.completions.create(**options)
    streamed = [
        token
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert [t.token for t in streamed] == [t.token for t in whole.choices[0].logprobs.content]
    for seen, wanted in zip(streamed, whole.choices[0].logprobs.content, strict=True):
        assert seen.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_content_may_come_in_parts(client: Any):
    parts = [{"type": "text", "text": QUESTION[:8]}, {"type": "text", "text": QUESTION[8:]}]
    joined = client.chat.completions.create(
        model="tabletalk", messages=[SYSTEM, {"role": "user", "content": parts}], max_tokens=1
    )
    plain = client.chat.completions.create(
        model="tabletalk", messages=ask(f"{QUESTION[:8]}\n{QUESTION[8:]}"), max_tokens=1
    )
    assert joined.usage.prompt_tokens == plain.usage.prompt_tokens


def test_max_completion_tokens_and_stop_end_an_answer(client: Any):
    cut = client.chat.completions.create(
        model="tabletalk", messages=ask(QUESTION), max_completion_tokens=3
    )
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (
        "The age of",
        "length",
    )
    for stop in (" Holm", [" Denmark", " Holm"]):
        stopped = client.chat.completions.create(
            model="tabletalk", messages=ask(QUESTION), stop=stop
        )
        choice = stopped.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("The age of Nora", "stop")
        assert choice.stop_reason == " Holm"


def test_a_stop_string_never_shows_in_a_stream(client: Any):
    chunks = client.chat.completions.create(
        model="tabletalk", messages=ask(QUESTION), stop="Nora Holm", stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "The age of "


def test_a_seed_makes_sampling_repeatable(client: Any):
    def sample(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="tabletalk", messages=ask("x"), seed=seed, temperature=2.0, n=2, max_tokens=12
        )
        return [choice.message.content for choice in answer.choices]

    assert sample(1) == sample(1) != sample(2)
    assert sample(1)[0] != sample(1)[1]


def test_extra_fields_are_those_of_vllm(client: Any, server: LiveServer):
    def complete(**extra: object) -> Any:
        return client.completions.create(
            model="tabletalk", prompt=PROMPT, max_tokens=30, temperature=2.0, extra_body=extra
        )

    greedy = " The age of Nora Lund is 30."
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        choice = complete(**extra).choices[0]
        assert choice.text.startswith(greedy)
    assert complete(top_k=1, ignore_eos=True).usage.completion_tokens == 30
    (dot,) = server.call(lambda: server.backend.tokenizer.encode(".", special=False))
    stopped = complete(top_k=1, stop_token_ids=[dot]).choices[0]
    assert (stopped.text, stopped.stop_reason) == (greedy[:-1], dot)


# Completions.


def test_a_completion_is_that_of_the_embedded_runtime(client: Any, server: LiveServer):
    completion = client.completions.create(model="tabletalk", prompt=PROMPT, stop="\n")
    assert completion.choices[0].text == " The age of Nora Lund is 30."
    params = SamplingParams(temperature=0, max_tokens=64, stop="\n")
    (wanted,) = server.backend.llm.generate(PROMPT, params)
    assert completion.choices[0].text == wanted.outputs[0].text
    assert completion.usage.prompt_tokens == len(wanted.prompt_token_ids)


def test_prompts_may_be_texts_or_tokens_one_or_many(client: Any, server: LiveServer):
    texts = [PROMPT, PROMPT.replace("Lund", "Holm")]
    ids = server.call(lambda: [server.backend.tokenizer.encode(text) for text in texts])
    answers = [" The age of Nora Lund is 30.", " The age of Nora Holm is 57."]
    for prompt, wanted in (
        (texts[0], answers[:1]),
        (texts, answers),
        (ids[0], answers[:1]),
        (ids, answers),
    ):
        for stream in (False, True):
            got = ["" for _ in wanted]
            result = client.completions.create(
                model="tabletalk", prompt=prompt, stop="\n", stream=stream
            )
            for part in result if stream else [result]:
                for choice in part.choices:
                    got[choice.index] += choice.text
            assert got == wanted


def test_choices_of_several_prompts_are_numbered_by_prompt(client: Any):
    completion = client.completions.create(
        model="tabletalk", prompt=[PROMPT, "| a | b"], n=2, max_tokens=4
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in completion.choices]
    assert texts[0] == texts[1] == " The age of Nora" and texts[2] == texts[3] != texts[0]


def test_streamed_choices_of_several_prompts_end_once_each(client: Any):
    """Sampled, so that some end long before others."""
    options: dict[str, Any] = {
        "model": "tabletalk",
        "prompt": [PROMPT, PROMPT.replace("Lund", "Holm")],
        "n": 3,
        "max_tokens": 30,
        "temperature": 5.0,
        "seed": 3,
    }
    whole = client.completions.create(**options)
    texts, ends = [""] * 6, [0] * 6
    for chunk in client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [1] * 6
    assert len({len(text) for text in texts}) > 1, "they all ended at the same time"


def test_completion_logprobs_have_tokens_values_and_offsets(client: Any):
    choice = client.completions.create(
        model="tabletalk", prompt=PROMPT, max_tokens=5, logprobs=2
    ).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for token, value, top, offset in zip(
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        logprobs.text_offset or [],
        strict=True,
    ):
        assert choice.text[offset:].startswith(token)
        assert value == max(top.values()) == top[token] and len(top) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_shows_the_prompt_and_its_logprobs(client: Any, stream: bool):
    text = "Question: How old is Nora Lund? Your answer: The age of"  # the name is to follow
    seen = client.completions.create(
        model="tabletalk", prompt=text, max_tokens=2, echo=True, logprobs=1, stream=stream
    )
    choices = [part.choices[0] for part in (seen if stream else [seen])]
    shown = "".join(choice.text for choice in choices)
    tokens: list[str] = []
    values: list[float | None] = []
    offsets: list[int] = []
    for choice in choices:
        if choice.logprobs:
            tokens += choice.logprobs.tokens or []
            values += choice.logprobs.token_logprobs or []
            offsets += choice.logprobs.text_offset or []
    assert shown.startswith(text) and len(shown) > len(text)
    assert "".join(tokens) == shown
    assert all(shown[at:].startswith(token) for token, at in zip(tokens, offsets, strict=True))
    assert values[0] is None
    assert all(isinstance(value, float) and value <= 0 for value in values[1:])


def test_the_logprobs_of_an_echo_are_those_of_generating_it(client: Any):
    """A text's score does not depend on whether it is read or written."""
    written = client.completions.create(
        model="tabletalk", prompt=PROMPT, max_tokens=6, logprobs=0
    ).choices[0]
    read = client.completions.create(
        model="tabletalk", prompt=PROMPT + written.text, max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert read.text == PROMPT + written.text and read.finish_reason == "length"
    assert read.logprobs.tokens[-6:] == written.logprobs.tokens
    assert read.logprobs.token_logprobs[-6:] == pytest.approx(
        written.logprobs.token_logprobs, abs=1e-3
    )
    assert math.isfinite(sum(read.logprobs.token_logprobs[1:]))


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_logprobs_is_the_text_alone(client: Any, stream: bool):
    seen = client.completions.create(
        model="tabletalk", prompt="| 1 | Nora", max_tokens=0, echo=True, stream=stream
    )
    (choice,) = [part.choices[0] for part in (seen if stream else [seen])]
    assert (choice.text, choice.logprobs) == ("| 1 | Nora", None)
    assert choice.finish_reason == "length"


def test_a_stream_gives_what_it_held_back_when_it_ends(client: Any):
    """Text that may be the start of a stop string waits, but not for ever."""
    options = {
        "model": "tabletalk",
        "prompt": PROMPT,
        "stop": " Nora Lund is here",
        "max_tokens": 5,
    }
    whole = client.completions.create(**options).choices[0].text
    assert whole.endswith(" Nora Lund")
    chunks = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole


# Errors.


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_bundled_model_looks_people_up_and_computes_only_what_is_new(
    client: Any, choice: str
) -> None:
    messages: list[Any] = [{"role": "system", "content": f"Calls: {choice}."}]
    computed, before = [], 0

    def ask(tool_choice: str) -> Any:
        nonlocal before
        answer = client.chat.completions.create(
            model="tabletalk", messages=messages, tools=[LOOKUP], tool_choice=tool_choice
        )
        usage, said = answer.usage, answer.choices[0].message
        computed.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
        if before:  # all but the last token
            assert usage.prompt_tokens_details.cached_tokens == before
        before = usage.total_tokens - 1
        messages.append(said.model_dump(exclude_none=True))
        return said

    for person, row in PEOPLE.items():
        messages.append({"role": "user", "content": f"What is the age of {person}?"})
        (call,) = ask(choice).tool_calls
        assert json.loads(call.function.arguments) == {"where": f"Name = {person}"}
        result = {"role": "tool", "tool_call_id": call.id, "content": HEADER + row + "\n"}
        messages.append(result)
        assert ask("auto").content == f"The age of {person} is {row.split(' | ')[2]}."
    assert max(computed[1:]) < computed[0]


def test_the_client_raises_the_errors_that_it_knows(client: Any):
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here") as missing:
        client.chat.completions.create(model="gpt-9", messages=ask("?"))
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for options, sentence in (
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"presence_penalty": 2.5}, "presence_penalty: Input should be less than or equal to 2"),
        ({"n": 200}, "n: Input should be less than or equal to 128"),
        ({"stop": [""]}, "stop must be a string or a list of strings that are not empty"),
        ({"stop": ["x"] * 65}, "stop: at most 64 strings of 4096 characters"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"extra_body": {"min_token": 3}}, "min_token: there is no such field: did you mean"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            "takes no enable_thinking",
        ),
        ({"max_tokens": 10**6, "messages": ask("x " * 9000)}, "the context of 4096"),
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(
                **{"model": "tabletalk", "messages": ask("?"), **options}
            )
        assert sentence in bad.value.message
        assert bad.value.type == "invalid_request_error"
        assert (bad.value.code == "context_length_exceeded") == ("context of" in sentence)


def test_an_error_in_a_stream_comes_before_it_begins(client: Any):
    with pytest.raises(openai.BadRequestError, match="token ids outside the vocabulary"):
        client.completions.create(model="tabletalk", prompt=[10**6], stream=True)
