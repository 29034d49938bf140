"""Images come to the model's side of all chat APIs as the same parts, read on threads, or not at
all."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from radixcache import LLM
from radixcache.runtime.multimodal.image import ImageSource
from radixcache.runtime.multimodal.image_input import image_of_url
from radixcache.runtime.multimodal.images import NoImages
from radixcache.runtime.server import pools
from radixcache.runtime.server.api import response_store
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.tokens.conversation import Conversations
from radixcache.runtime.tokens.history import TokenisedText
from tests.helpers.pictures import FORMATS, data_url, file_of, picture, png_of
from tests.runtime.server.api.apis import user
from tests.runtime.server.api.image_bodies import (
    CHAT,
    FILE,
    MESSAGES,
    PATHS,
    RESPONSES,
    TEXT,
    URL,
    asked,
    body,
    image,
    result,
    text,
)
from tests.runtime.server.live import LiveServer, assert_error, live

WEB = "https://a.example/a.png"


class Rendered:
    """The messages that came to be tokenised, images included."""

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, Any]]] = []
        self.threads: set[str] = set()

    @property
    def last(self) -> dict[str, Any]:
        return self.conversations[-1][-1]


@pytest.fixture(autouse=True)
def a_text_model_takes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the server looks at them."""
    monkeypatch.setattr(NoImages, "prepare", lambda *_: [])


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Rendered:
    """A text model is given the texts alone."""
    found, encode, decode = Rendered(), Conversations.encode, image_of_url

    def encode_texts(self: Conversations, messages: Any, *args: Any, **how: Any) -> TokenisedText:
        found.conversations.append([*messages])
        return encode(self, [*map(without_images, messages)], *args, **how)

    def decode_here(url: str) -> Any:
        found.threads.add(threading.current_thread().name.partition("_")[0])
        return decode(url)

    monkeypatch.setattr(Conversations, "encode", encode_texts)
    monkeypatch.setattr(pools, "image_of_url", decode_here)
    return found


def without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    return {**message, "content": content}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("path", PATHS)
def test_a_picture_comes_as_it_was_sent(
    scripted: LiveServer, rendered: Rendered, path: str, form: str
):
    file = file_of(picture(), form)
    url = data_url(file, f"image/{form.lower()}")
    details: Any = {"PNG": "auto", "JPEG": "high", "WEBP": None}
    own = {"detail": details[form]} if form in details and path != MESSAGES else {}
    shown = image(path, url, **own)
    answer = scripted.post(path, body(path, user([text(path, TEXT), shown])))
    assert answer.status_code == 200, answer.text
    assert rendered.last.keys() == {"role", "content"} and rendered.last["role"] == "user"
    said, shown = rendered.last["content"]
    assert said == {"type": "text", "text": TEXT} and shown.keys() == {"type", "image"}
    source = shown["image"]
    assert shown["type"] == "image" and source.identity == sha256(file).digest()
    expected = np.asarray(Image.open(BytesIO(file)).convert("RGB"))
    assert np.array_equal(np.asarray(source.open()), expected)
    assert rendered.threads == {"images"}


@pytest.mark.parametrize("path", PATHS)
def test_the_result_of_a_tool_may_have_pictures(
    scripted: LiveServer, rendered: Rendered, path: str
):
    answer = scripted.post(path, body(path, *result(path, URL)))
    assert answer.status_code == 200, answer.text
    content = rendered.last["content"]
    assert rendered.last["role"] == "tool" and rendered.last["tool_call_id"] == "c"
    texts = [part["text"] for part in content if part["type"] == "text"]
    assert texts == (["Error: ", "Look"] if path == MESSAGES else ["Look"])
    assert content[-1]["image"].identity == sha256(FILE).digest()


@pytest.mark.parametrize("path", PATHS)
def test_texts_alone_stay_one_text(scripted: LiveServer, rendered: Rendered, path: str):
    scripted.post(path, body(path, user([text(path, "a"), text(path, "b")])))
    assert rendered.last == user("a\nb") and not rendered.threads
    scripted.post(path, asked(path))
    assert rendered.last == user(TEXT)


def test_tokens_are_counted_and_explained_with_pictures(scripted: LiveServer, rendered: Rendered):
    for path, of in (
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/responses/input_tokens", RESPONSES),
        ("/v1/explain", CHAT),
    ):
        sent = asked(of, URL)
        sent.pop("max_tokens", None)
        assert scripted.post(path, sent).status_code == 200
        assert isinstance(rendered.last["content"][1]["image"], ImageSource), path


def test_a_response_goes_on_with_its_pictures(scripted: LiveServer, rendered: Rendered):
    first = scripted.post(RESPONSES, asked(RESPONSES, URL)).json()
    more = {"input": "And now?", "previous_response_id": first["id"]}
    second = scripted.post(RESPONSES, more).json()
    assert second["status"] == "completed"
    shown = rendered.conversations[-1][0]["content"][1]
    assert shown["image"].identity == sha256(FILE).digest() and rendered.last == user("And now?")
    items = scripted.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
    assert items[0]["content"][1]["image_url"] == URL


def test_an_answer_says_that_it_is_not_kept(scripted: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(response_store, "_OBJECTS", 1 << 30)
    answer = scripted.post(RESPONSES, body(RESPONSES, user("Hi"))).json()
    assert answer["status"] == "completed" and answer["store"] is False
    assert scripted.get(f"/v1/responses/{answer['id']}").status_code == 404


@pytest.mark.parametrize("path", PATHS)
def test_urls_are_fetched_from_allowed_hosts(
    llm: LLM, rendered: Rendered, path: str, monkeypatch: pytest.MonkeyPatch
):
    calls: list[Any] = []

    def fetch(*args: Any) -> bytes:
        calls.append((threading.current_thread().name.partition("_")[0], *args))
        return FILE

    monkeypatch.setattr(pools, "fetch", fetch)
    before = time.monotonic()
    with live(llm, allowed_media_domains=["A.example", "b.example"]) as server:
        assert server.post(path, asked(path, WEB, URL, WEB)).status_code == 200
        server.assert_idle()
    assert [call[:4] for call in calls] == [
        ("images", WEB, {"a.example", "b.example"}, 20_000_000)
    ] * 2
    (deadline,) = {call[4] for call in calls}  # of all together
    assert before < deadline - 10 < time.monotonic()
    assert [part["image"].identity for part in rendered.last["content"][1:]] == [
        sha256(FILE).digest()
    ] * 3


def test_no_more_is_fetched_than_fits(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def fetch(url: str, *_: Any) -> bytes:
        calls.append(url)
        return FILE + bytes(20_000_000 - len(FILE))

    monkeypatch.setattr(pools, "fetch", fetch)
    with live(llm, allowed_media_domains=["a.example"]) as server:
        refused = server.post(CHAT, asked(CHAT, *[WEB] * 64))
        assert_error(refused, 400, "a prompt has at most 64 MB of images")
    assert len(calls) == 4


def test_fetched_images_have_a_bound_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pools, "fetch", lambda *_: FILE)
    monkeypatch.setattr(pools, "MAX_FETCHED", 3 * len(FILE))
    pool = pools.ImagePool(["a.example"], NoImages(""))

    def get(count: int) -> Any:
        shown = {"type": "image_url", "image_url": {"url": WEB}}
        return asyncio.run(pool.read([user([shown] * count)], None))

    held = [get(2), get(1)]
    with pytest.raises(ApiError, match="too many images from URLs"):
        get(1)
    del held[0]
    for _ in range(1000):  # the pool's thread may not have let go of the last one yet
        gc.collect()
        if len(pool._fetched) == 1:
            break
        time.sleep(0.01)
    assert len(get(2)[0]["content"]) == 2
    pool.close()


SVG = data_url(b"<svg/>", "image/svg+xml")
WIDE = data_url(png_of(8000, 4000, b""))
NOT_READ = [
    ((SVG,), "an image is a PNG, JPEG, WebP or GIF, and this is an SVG"),
    ((WIDE,) * 3, "a prompt has at most 64 million pixels of images"),
    ((URL,) * 1000, "a prompt has at most 64 images, not 1000"),
    ((WEB,), "not fetched from 'a.example': send it in base64, or start the server with --"),
    (("/etc/passwd",), "an image's URL is a data: URL, or begins with"),
    (("file:///etc/passwd",), "an image's URL is a data: URL, or begins with"),
]


@pytest.mark.parametrize(("urls", "sentence"), NOT_READ, ids=range(len(NOT_READ)))
@pytest.mark.parametrize("path", PATHS)
def test_a_picture_that_cannot_be_read_is_refused(
    scripted: LiveServer, path: str, urls: tuple[str, ...], sentence: str
):
    refused = scripted.post(path, asked(path, *urls))
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["type"] == "invalid_request_error"
    assert sentence in error["message"] and len(error["message"]) < 200
    scripted.assert_idle()


LOW = "images are read in their own detail"
OTHER = "send text, or an image as this API writes it"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
FLAWED: list[tuple[str, Any, str]] = [
    (CHAT, image(CHAT, detail="low"), LOW),
    (RESPONSES, image(RESPONSES, detail="low"), LOW),
    (CHAT, image(CHAT, detail="huge"), "the detail of an image is auto or high"),
    (CHAT, image(CHAT, size=7), "size: there is no such field"),
    (CHAT, {"type": "image_url"}, "a image_url needs 'image_url'"),
    (CHAT, {"type": "image_url", "image_url": URL}, "image_url: Input should be"),
    (CHAT, {"type": "text", "text": "x", "image_url": {"url": URL}}, "not both"),
    (CHAT, {"type": "image_url", "text": "x", "image_url": {"url": URL}}, "not both"),
    (CHAT, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, OTHER),
    (CHAT, {"type": "video_url", "video_url": {"url": URL}}, OTHER),
    (CHAT, {"type": "file", "file": {"file_id": "f"}}, OTHER),
    (CHAT, image(MESSAGES), OTHER),
    (RESPONSES, {"type": "input_image", "file_id": "f"}, OTHER),
    (RESPONSES, {"type": "input_file", "file_data": "x"}, OTHER),
    (RESPONSES, {"type": "input_text", "text": "x", "image_url": URL}, "not both"),
    (MESSAGES, {"type": "image"}, "a image needs 'source'"),
    (MESSAGES, {"type": "image", "source": {"type": "url"}}, "a url needs 'url'"),
    (MESSAGES, {"type": "image", "source": {"type": "base64"}}, "a base64 needs 'media_type'"),
    (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "not supported"),
    (MESSAGES, {"type": "document", "source": SOURCE}, "type: Input should be 'text'"),
    (MESSAGES, {"type": "text", "text": "x", "source": SOURCE}, "not both"),
    (MESSAGES, {**image(MESSAGES), "text": "x"}, "not both"),
    (MESSAGES, image(CHAT), OTHER),
]


@pytest.mark.parametrize(("path", "part", "sentence"), FLAWED, ids=range(len(FLAWED)))
def test_a_part_that_is_no_picture_is_refused(
    scripted: LiveServer, path: str, part: dict[str, Any], sentence: str
):
    refused = scripted.post(path, body(path, user([part])))
    assert refused.status_code == 400 and sentence in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "role"),
    [
        *((path, role) for path in (CHAT, RESPONSES) for role in ("system", "developer")),
        *((path, "assistant") for path in PATHS),
        (MESSAGES, "system"),
    ],
)
def test_only_users_and_tools_show_pictures(scripted: LiveServer, path: str, role: str):
    refused = scripted.post(path, body(path, {"role": role, "content": [image(path)]}, user("Hi")))
    sentence = f"images are in messages of users and tools, not of role {role!r}"
    assert refused.status_code == 400 and sentence in refused.json()["error"]["message"]


def test_neither_thoughts_nor_instructions_have_pictures(scripted: LiveServer):
    thought = {"type": "reasoning", "content": [image(RESPONSES)]}
    summed = {"type": "reasoning", "summary": [image(RESPONSES)]}
    for item in (thought, summed):
        refused = scripted.post(RESPONSES, body(RESPONSES, user("Hi"), item))
        assert_error(refused, 400, "not of role 'assistant'")
    refused = scripted.post(MESSAGES, {**asked(MESSAGES), "system": [image(MESSAGES)]})
    assert refused.status_code == 400 and "system" in refused.json()["error"]["message"]
