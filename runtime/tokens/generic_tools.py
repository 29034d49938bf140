"""Tools for a model whose chat template has none: described in words, in the format of Hermes.

The system message describes the functions, an assistant's content has its calls, and a user's has
the results. A model that was not trained for this may call badly; with ``tool_choice`` or
``strict``, a grammar enforces the form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radixcache.runtime.tokens.tool_calls import joined

_HEAD = "You may call functions, each of which is described here by a line of JSON:"
_TAIL = """To call one, answer with its name and its arguments, and with nothing else:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
The result comes with the next message. If no function helps, answer as usual."""


def describe_tools(
    conversation: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The conversation in the roles system, user and assistant, its calls and results as text.

    Args:
        conversation: as chat templates take it; see `tool_calls.for_template`.
        tools: functions in OpenAI's format, which the end of the system message describes.
    """
    messages: list[dict[str, Any]] = []
    for message in conversation:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", joined("<tool_response>\n", content, "\n</tool_response>")
        for call in message.get("tool_calls", ()):
            content += f"{content and chr(10)}<tool_call>\n{_spell(call)}\n</tool_call>"
        last = messages[-1] if messages else None
        if last is not None and message["role"] == "tool" and last["role"] == "user":
            # Templates want the roles to take turns.
            last["content"] = joined(last["content"], "\n", content)
        else:
            messages.append({**message, "role": role, "content": content})
            messages[-1].pop("tool_calls", None)
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        described = "\n".join([_HEAD, *lines, _TAIL])
        if messages and messages[0]["role"] == "system":
            messages[0]["content"] += f"\n\n{described}"
        else:
            messages.insert(0, {"role": "system", "content": described})
    return messages


def _spell(call: Mapping[str, Any]) -> str:
    function = call["function"]
    call = {"name": function["name"], "arguments": function["arguments"]}
    return json.dumps(call, ensure_ascii=False)
