"""/v1/completions by the stock client, and tokens for texts; the embedded runtime knows better."""

from __future__ import annotations

from typing import Any

import pytest

from radixcache import SamplingParams
from radixcache.runtime.demo.script import TABLE
from tests.runtime.server.live import LiveServer, ask

PROMPT = f"{TABLE.read_text()}Question: How old is Nora Lund? Your answer:"
ANSWER = " The age of Nora Lund is 30."


def create(client: Any, prompt: Any = PROMPT, **more: Any) -> Any:
    return client.completions.create(model="tabletalk", prompt=prompt, **more)


def test_a_completion_is_that_of_the_embedded_runtime(client: Any, server: LiveServer):
    completion = create(client, stop="\n")
    params = SamplingParams(temperature=0, max_tokens=64, stop="\n")
    (wanted,) = server.backend.llm.generate(PROMPT, params)
    assert completion.choices[0].text == wanted.outputs[0].text == ANSWER
    assert completion.usage.prompt_tokens == len(wanted.prompt_token_ids)


def test_prompts_may_be_texts_or_tokens_one_or_many(client: Any, server: LiveServer):
    texts = [PROMPT, PROMPT.replace("Lund", "Holm")]
    ids = [server.backend.tokenizer.encode(text) for text in texts]
    answers = [ANSWER, " The age of Nora Holm is 57."]
    for prompt in (texts[0], texts, ids[0], ids):
        for stream in (False, True):
            got = [""] * (2 if prompt in (texts, ids) else 1)
            result = create(client, prompt, stop="\n", stream=stream)
            for part in result if stream else [result]:
                for choice in part.choices:
                    got[choice.index] += choice.text
            assert got == answers[: len(got)]


def test_choices_are_numbered_by_prompt_and_end_once_each(client: Any):
    """Sampled, so that some end long before others."""
    options: dict[str, Any] = {"n": 3, "max_tokens": 30, "temperature": 5.0, "seed": 3}
    prompts = [PROMPT, PROMPT.replace("Lund", "Holm")]
    whole = create(client, prompts, **options)
    assert [choice.index for choice in whole.choices] == [*range(6)]
    texts, ends = [""] * 6, [0] * 6
    for chunk in create(client, prompts, **options, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [1] * 6 and len({len(text) for text in texts}) > 1
    greedy = create(client, [PROMPT, "| a | b"], n=2, max_tokens=4).choices
    assert greedy[0].text == greedy[1].text == ANSWER[:16]
    assert greedy[2].text == greedy[3].text != greedy[0].text


def test_fields_of_vllm(client: Any, server: LiveServer):
    def complete(**extra: object) -> Any:
        return create(client, max_tokens=30, temperature=2.0, extra_body=extra)

    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert complete(**extra).choices[0].text.startswith(ANSWER)
    assert complete(top_k=1, ignore_eos=True).usage.completion_tokens == 30
    (dot,) = server.backend.tokenizer.encode(".", special=False)
    stopped = complete(top_k=1, stop_token_ids=[dot]).choices[0]
    assert (stopped.text, stopped.stop_reason) == (ANSWER[:-1], dot)


def test_logprobs_have_tokens_values_and_offsets(client: Any):
    (choice,) = create(client, max_tokens=5, logprobs=2).choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    columns = (
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        logprobs.text_offset,
    )
    for token, value, top, offset in zip(*columns, strict=True):
        assert choice.text[offset:].startswith(token)
        assert value == max(top.values()) == top[token] and len(top) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_shows_the_prompt_and_its_logprobs(client: Any, stream: bool):
    text = "Question: How old is Nora Lund? Your answer: The age of"  # the name is to follow
    seen = create(client, text, max_tokens=2, echo=True, logprobs=1, stream=stream)
    choices = [part.choices[0] for part in (seen if stream else [seen])]
    shown = "".join(choice.text for choice in choices)
    tokens: list[str] = []
    values: list[float | None] = []
    offsets: list[int] = []
    for choice in choices:
        if choice.logprobs:
            tokens += choice.logprobs.tokens
            values += choice.logprobs.token_logprobs
            offsets += choice.logprobs.text_offset
    assert shown.startswith(text) and len(shown) > len(text) and "".join(tokens) == shown
    assert all(shown[at:].startswith(token) for token, at in zip(tokens, offsets, strict=True))
    assert values[0] is None
    assert all(isinstance(value, float) and value <= 0 for value in values[1:])
    alone = create(client, "| 1 | Nora", max_tokens=0, echo=True, stream=stream)
    (choice,) = [part.choices[0] for part in (alone if stream else [alone])]
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("| 1 | Nora", None, "length")


def test_a_stream_gives_what_it_held_back_when_it_ends(client: Any):
    """Text that may be the start of a stop string waits, but not for ever."""
    options = {"stop": " Nora Lund is here", "max_tokens": 5}
    whole = create(client, **options).choices[0].text
    assert whole.endswith(" Nora Lund")
    assert (
        "".join(chunk.choices[0].text for chunk in create(client, **options, stream=True)) == whole
    )


def test_texts_become_tokens_and_back(server: LiveServer):
    text = "| 1 | Nora Lund | Ünïcode 🙂 |"
    tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": ask("Who?")}).json()["tokens"]
    rendered = server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert rendered.startswith("<|system|>")
    assert rendered.endswith("<|user|>Who?<|end|><|assistant|>")
