"""/v1/completions by the stock client, and tokens for texts; the embedded runtime knows better."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.scripted import CHAT_TEMPLATE
from tests.runtime.server.api.apis import PROMPT
from tests.runtime.server.live import LiveServer, ask

ANSWER = " The age of Nora Lund is 30."


def create(client: Any, prompt: Any = PROMPT, **more: Any) -> Any:
    return client.completions.create(model="tabletalk", prompt=prompt, **more)


def test_prompts_may_be_texts_or_tokens_one_or_many(client: Any, server: LiveServer):
    texts = [PROMPT, PROMPT.replace("Lund", "Holm")]
    ids = [server.backend.tokenizer.encode(text) for text in texts]
    answers = [ANSWER, " The age of Nora Holm is 57."]
    for prompt in (texts[0], texts, ids[0], ids):
        got = [choice.text for choice in create(client, prompt, stop="\n").choices]
        assert got == answers[: 2 if prompt in (texts, ids) else 1]


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


def test_fields_of_vllm(client: Any, server: LiveServer):
    def complete(**extra: object) -> Any:
        return create(client, max_tokens=30, temperature=2.0, extra_body=extra)

    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert complete(**extra).choices[0].text.startswith(ANSWER)
    assert complete(top_k=1, ignore_eos=True).usage.completion_tokens == 30
    (dot,) = server.backend.tokenizer.encode(".", special=False)
    stopped = complete(top_k=1, stop_token_ids=[dot]).choices[0]
    assert (stopped.text, stopped.stop_reason) == (ANSWER[:-1], dot)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_shows_the_prompt_and_its_logprobs(client: Any, stream: bool):
    text = "Question: How old is Nora Lund? Your answer: The age of"  # the name is to follow
    seen = create(client, text, max_tokens=2, echo=True, logprobs=2, stream=stream)
    choices = [part.choices[0] for part in (seen if stream else [seen])]
    shown = "".join(choice.text for choice in choices)
    told = [choice.logprobs for choice in choices if choice.logprobs]
    tokens, values, offsets, tops = (
        [value for logprobs in told for value in getattr(logprobs, name)]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
    )
    assert shown.startswith(text) and len(shown) > len(text) and "".join(tokens) == shown
    assert all(shown[at:].startswith(token) for token, at in zip(tokens, offsets, strict=True))
    assert values[-1] == max(tops[-1].values()) and len(tops[-1]) == 2
    assert values[0] is None
    assert all(isinstance(value, float) and value <= 0 for value in values[1:])
    alone = create(client, "| 1 | Nora", max_tokens=0, echo=True, stream=stream)
    (choice,) = [part.choices[0] for part in (alone if stream else [alone])]
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("| 1 | Nora", None, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_exact_with_characters_of_several_tokens(client: Any, stream: bool):
    text = "| 1 | Ünïcode 🙂🙂 漢 | How old? "
    options: Any = {"echo": True, "logprobs": 2, "temperature": 5.0, "seed": 4, "stream": stream}
    seen = create(client, text, max_tokens=30, **options)
    choices = [part.choices[0] for part in (seen if stream else [seen])]
    shown = "".join(choice.text for choice in choices)
    told = [choice.logprobs for choice in choices if choice.logprobs]
    names = [name for logprobs in told for name in logprobs.tokens]
    offsets = [at for logprobs in told for at in logprobs.text_offset]
    assert shown.startswith(text) and len(offsets) == len(names) > len(text.split())
    split = [name for name in names if name.startswith("bytes:")]
    assert len(split) >= 4 and "\ufffd" not in "".join(names[:20])
    whole = [as_bytes(name) for name in names]
    for place, at in enumerate(offsets[: len(names) // 2]):
        before = b"".join(whole[:place]).decode(errors="ignore")
        assert at == len(before) and shown.startswith(before)
    assert offsets == sorted(offsets) and offsets[-1] <= len(shown)
    continuation = next(place for place, at in enumerate(offsets) if at >= len(text))
    assert b"".join(whole[:continuation]).decode() == text


def as_bytes(name: str) -> bytes:
    """What a token's name says, as OpenAI writes it."""
    if name.startswith("bytes:"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


def test_a_stream_gives_what_it_held_back_when_it_ends(client: Any):
    """Text that may be the start of a stop string waits, but not for ever."""
    options = {"stop": " Nora Lund is here", "max_tokens": 5}
    parts = [chunk.choices[0].text for chunk in create(client, **options, stream=True)]
    assert "".join(parts) == create(client, **options).choices[0].text == ANSWER[:21]


def test_what_a_tokenizer_is_is_told(server: LiveServer, scripted: LiveServer):
    told, plain = (s.get("/tokenizer_info").json() for s in (server, scripted))
    assert told["eos_token"] == "<|end|>" and told["model_max_length"] == 4096
    assert plain["chat_template"] == CHAT_TEMPLATE and plain["bos_token"] is None
    (end,) = server.post("/tokenize", {"prompt": "<|end|>", "add_special_tokens": False}).json()[
        "tokens"
    ]
    assert server.post("/detokenize", {"tokens": [end]}).json()["prompt"] == told["eos_token"]


def test_texts_become_tokens_and_back(server: LiveServer):
    text = "| 1 | Nora Lund | Ünïcode 🙂 |"
    tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": ask("Who?")}).json()["tokens"]
    rendered = server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert rendered.startswith("<|system|>")
    assert rendered.endswith("<|user|>Who?<|end|><|assistant|>")
