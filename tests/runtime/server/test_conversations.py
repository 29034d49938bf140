"""What the server does for conversations: stable tokens, and reasons for what was not cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from radixcache import LLM
from tests.runtime.server.live import SYSTEM, LiveServer, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHARED = "and here is what all of them have in common at their ends."


@pytest.fixture
def llm() -> LLM:
    return LLM(
        kv_cache_memory_bytes="32MiB"
    )  # one for each test: what is explained depends on all before


@pytest.fixture
def fresh(llm: LLM) -> Iterator[LiveServer]:
    with live(llm) as server:
        yield server
        server.assert_idle()


def misses(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["radixcache"]["explanation"]
    return found


def test_each_turn_computes_only_what_is_new(fresh: LiveServer):
    """Also the answers' own tokens are found again, however the template's text spells them."""
    with openai.OpenAI(base_url=f"{fresh.url}/v1", api_key="any", max_retries=0) as client:
        messages: list[Any] = [SYSTEM]
        before = 0
        for turn, name in enumerate(["Nora Lund", "Felix Wolf", "Ada Byron", "Hugo Marsh"]):
            messages.append({"role": "user", "content": f"How old is {name}?"})
            stream = turn % 2 == 1
            if stream:
                chunks = list(
                    client.chat.completions.create(
                        model="tabletalk",
                        messages=messages,
                        stream=True,
                        stream_options={"include_usage": True},
                    )
                )
                text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                usage = chunks[-1].usage
            else:
                answer = client.chat.completions.create(model="tabletalk", messages=messages)
                text, usage = answer.choices[0].message.content or "", answer.usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached is not None
            if turn:  # all but the last sampled token, which has no KV
                assert before - 1 <= cached < before + 1
            before = usage.prompt_tokens + usage.completion_tokens
            messages.append({"role": "assistant", "content": text})


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_at_the_top_is_named_as_the_reason(fresh: LiveServer, stream: bool):
    def ask(time: str) -> dict[str, Any]:
        system = f"It is {time} o'clock.\n{SYSTEM['content']}"
        body = {
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": "How old is Nora Lund?"},
            ],
            "explain": True,
            "stream": stream,
        }
        response = fresh.post(CHAT, body)
        assert response.status_code == 200
        if not stream:
            answer: dict[str, Any] = response.json()
            return answer
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        last: dict[str, Any] = json.loads(lines[-2])
        assert lines[-1] == "[DONE]" and not last["choices"]
        return last

    (first,) = misses(ask("10:38"))
    assert first["reason"] == "first_seen" and first["start"] == 0
    (second,) = misses(ask("10:41"))
    assert second["reason"] == "diverged" and 0 < second["start"] < 20
    assert "10:41" in second["text"] and "10:38" in second["text"]
    assert "move what changes to the end" in second["text"]
    assert misses(ask("10:41")) == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_how_far_its_prompts_are_computed_if_asked(path: str):
    """After each step, until the first token comes."""
    with live(LLM(kv_cache_memory_bytes="32MiB", max_num_batched_tokens=64)) as server:
        text = "x y " * 450
        body: dict[str, Any] = {"prompt": [text, f"{text}z"]}
        if path == CHAT:
            body = {"messages": [{"role": "user", "content": text}]}

        def stream(**options: bool) -> list[dict[str, Any]]:
            more = {"stream": True, "stream_options": {"include_usage": True, **options}}
            lines = server.post(path, {**body, "max_tokens": 2, **more}).text.splitlines()
            return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

        chunks = stream(include_progress=True)
        told = [chunk["radixcache"] for chunk in chunks if "computed_tokens" in str(chunk)]
        prompt = chunks[-1]["usage"]["prompt_tokens"]
        assert {one["prompt_tokens"] for one in told} == {prompt}
        computed = [one["computed_tokens"] for one in told]
        assert computed == sorted({*computed}) and told
        first = prompt // len(body.get("prompt", "1"))  # whose token comes first
        assert 0 < computed[0] < prompt and 0 <= first - computed[-1] <= 64
        assert all(not chunk["choices"] and chunk["usage"] is None for chunk in chunks[: len(told)])
        assert all(chunk["choices"] for chunk in chunks[len(told) : -1])
        server.post("/v1/cache/flush")
        assert len(stream()) == len(chunks) - len(told)
        server.wait_until(lambda: not server.backend.llm.worker._followed)
        server.assert_idle()


def test_explanations_are_given_when_asked_for_only(fresh: LiveServer):
    answer = fresh.post(COMPLETIONS, {"prompt": ["a b c", "a b d"], "max_tokens": 1}).json()
    assert answer["radixcache"]["explanation"] is None and answer["radixcache"]["ttft"] > 0
    body = {"prompt": ["x y z", "x y w"], "max_tokens": 1, "explain": True}
    reasons = [miss["reason"] for miss in misses(fresh.post(COMPLETIONS, body).json())]
    assert reasons[0] == "first_seen" and reasons
    text = fresh.get("/metrics").text
    assert 'radixcache_missed_tokens_total{reason="first_seen"}' in text
    counted = [line for line in text.splitlines() if line.startswith("radixcache_missed_tokens_")]
    assert sum(float(line.split()[-1]) for line in counted) > 0


def test_texts_of_others_can_be_hidden(llm: LLM):
    body = {"prompt": f"the secret of Alice is {SHARED}", "max_tokens": 1, "explain": True}
    with live(llm, hide_texts=True) as server:
        server.post(COMPLETIONS, body)
        other = server.post(
            COMPLETIONS, {**body, "prompt": f"the secret of Bob is {SHARED}"}
        ).json()
        (miss,) = misses(other)
        assert miss["reason"] == "diverged" and "Bob" in miss["text"]
        assert "Alice" not in miss["text"]
        assert "secret" not in server.get("/v1/cache").text
        found = server.get("/v1/cache/search?text=secret")  # or whoever asks learns by guessing
        assert found.status_code == 403 and "total" not in found.text
        server.assert_idle()


def test_the_end_of_somebody_s_prefix_is_hidden_too(llm: LLM):
    with live(llm, hide_texts=True) as server:
        secret = [{"role": "system", "content": "The code is 555-4822"}]
        server.post("/v1/prefixes", {"name": "p", "messages": secret})
        for question in (f"How old {SHARED}", f"Which is {SHARED}"):
            messages = [{"role": "user", "content": question}]
            body = {"prefix": "p", "messages": messages, "max_tokens": 1, "explain": True}
            answer = server.post(CHAT, body).json()
        (miss,) = misses(answer)
        assert miss["reason"] == "diverged" and "Which" in miss["text"]
        assert "4822" not in miss["text"]
        server.delete("/v1/prefixes/p")
        server.assert_idle()
