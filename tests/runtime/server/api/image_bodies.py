"""Bodies with images, as each chat API writes them."""

from __future__ import annotations

from typing import Any

from tests.helpers.pictures import data_url, file_of, picture
from tests.runtime.server.api.apis import user

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
FILE = file_of(picture())
URL = data_url(FILE)
TEXT = "What is this?"


def text(path: str, said: str) -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": said}


def image(path: str, url: str = URL, **more: Any) -> dict[str, Any]:
    """A picture as the API of a path writes it."""
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": url, **more}}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url, **more}
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": kind, "data": data}
    return {"type": "image", "source": source}


def body(path: str, *messages: dict[str, Any]) -> dict[str, Any]:
    name = "input" if path == RESPONSES else "messages"
    return {name: [*messages], **({"max_tokens": 5} if path == MESSAGES else {})}


def asked(path: str, *urls: str) -> dict[str, Any]:
    """A question about pictures."""
    return body(path, user([text(path, TEXT), *(image(path, url) for url in urls)]))


def result(path: str, url: str) -> list[dict[str, Any]]:
    """A tool is called, and answers with a text and a picture."""
    shown = [text(path, "Look"), image(path, url)]
    function = {"name": "look", "arguments": "{}"}
    if path == CHAT:
        calls = [{"id": "c", "type": "function", "function": function}]
        made: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        return [user("Hi"), made, {"role": "tool", "tool_call_id": "c", "content": shown}]
    if path == RESPONSES:
        answer = {"type": "function_call_output", "call_id": "c", "output": shown}
        return [user("Hi"), {"type": "function_call", "call_id": "c", **function}, answer]
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "c", "content": shown, "is_error": True}
    return [user("Hi"), {"role": "assistant", "content": [use]}, user([block])]
