"""Answers about images over HTTP: those of the same messages in Python, in all chat APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixcache import LLM, SamplingParams
from tests.helpers.pictures import data_url, file_of, picture
from tests.helpers.vlm_models import write_vlm
from tests.runtime.server.api.image_bodies import (
    CHAT,
    MESSAGES,
    PATHS,
    TEXT,
    asked,
    body,
    image,
)
from tests.runtime.server.live import LiveServer, assert_error, live

PICTURE = picture(100, 60)
URL = data_url(file_of(PICTURE))


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = write_vlm(tmp_path_factory.mktemp("vlm"), request.param)
    with LLM(path, page_size=4, kv_cache_memory_bytes="16MB") as llm:
        yield llm


@pytest.fixture
def seeing(llm: LLM) -> Iterator[LiveServer]:
    with live(llm) as server:
        yield server
        server.assert_idle()


def usage(server: LiveServer, path: str, given: dict[str, Any]) -> tuple[int, int]:
    """The prompt's tokens, and how many of them were cached."""
    answer = server.post(path, {**given, "temperature": 0})
    assert answer.status_code == 200, answer.text
    used = answer.json()["usage"]
    if path == MESSAGES:
        cached = used["cache_read_input_tokens"]
        new = used["input_tokens"], used["cache_creation_input_tokens"]
        return cached + sum(new), cached
    kind = "prompt" if path == CHAT else "input"
    return used[f"{kind}_tokens"], used[f"{kind}_tokens_details"]["cached_tokens"]


def test_the_same_question_is_the_same_prompt_in_every_api(llm: LLM, seeing: LiveServer) -> None:
    content = [{"type": "text", "text": TEXT}, {"type": "image", "image": PICTURE}]
    params = SamplingParams(temperature=0, max_tokens=5)
    (wanted,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    length = len(wanted.prompt_token_ids)
    for path in PATHS:
        assert usage(seeing, path, asked(path, URL)) == (length, length)
    answer = seeing.post(CHAT, {**asked(CHAT, URL), "temperature": 0, "max_tokens": 5})
    assert answer.json()["choices"][0]["message"]["content"] == wanted.outputs[0].text
    given = {name: value for name, value in asked(MESSAGES, URL).items() if name != "max_tokens"}
    counted = seeing.post("/v1/messages/count_tokens", given)
    assert counted.json() == {"input_tokens": length}
    explained = seeing.post("/v1/explain", asked(CHAT, URL))
    assert explained.json()["cached_tokens"] == length


def test_a_marked_prefix_ends_behind_its_image(llm: LLM, seeing: LiveServer) -> None:
    other = data_url(file_of(picture(90, 70)))
    shown = image(MESSAGES, other) | {"cache_control": {"type": "ephemeral"}}
    question = [shown, {"type": "text", "text": "What about it?"}]
    answer = seeing.post(MESSAGES, body(MESSAGES, {"role": "user", "content": question})).json()
    used, behind = answer["usage"], len("What about it?\n[assistant]")
    cached = used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    assert used["input_tokens"] <= behind and cached > 10


def test_what_has_no_images_refuses_them(seeing: LiveServer) -> None:
    assert_error(seeing.post("/tokenize", asked(CHAT, URL)), 400, "only text")
    pinned = {"name": "x", **asked(CHAT, URL)}
    assert_error(seeing.post("/v1/prefixes", pinned), 400, "only text")


def test_a_text_model_refuses_them(server: LiveServer) -> None:
    for path in PATHS:
        refused = server.post(path, asked(path, URL))
        assert refused.status_code == 400
        assert "takes no images" in refused.json()["error"]["message"]
