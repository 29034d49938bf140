"""What the model of these tests says: a function of the prompt, the same for every client.

It does what it is told without being guided, but for two things that it would rather not: give
JSON of which it was told nothing, and call a tool of which the user said nothing.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.helpers.scripted import call, turns

NORA = {"name": "Nora Lund", "age": 30}


def answer(prompt: str) -> str | list[str]:
    role, text = turns(prompt)[-2]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
    tools = _tools(prompt)
    if results:
        return f"It is {' and '.join(results)}."
    if cities := re.findall(r"weather in (\w+)(?: and (\w+))?", text):
        calls = [call("get_weather", city=city) for city in cities[0] if city]
        return "\n".join(calls) if "get_weather" in tools else "I have no window."
    if "Nora" in text:
        return _nora(tools, "JSON" in prompt)
    return [f"You are the {role}, and said: {text}", call("get_weather", city="Oslo")]


def _nora(tools: dict[str, Any], told_json: bool) -> list[str]:
    fitting = [name for name, properties in tools.items() if NORA.keys() <= properties.keys()]
    if fitting:
        return [call(fitting[0], **NORA)]
    ways = ["Nora Lund is 30 years old.", json.dumps(NORA)]
    return ways[::-1] if told_json else ways


def _tools(prompt: str) -> dict[str, Any]:
    """The properties of each tool that the prompt tells of."""
    found = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    told = [json.loads(line)["function"] for line in found[1].splitlines()] if found else []
    return {tool["name"]: tool.get("parameters", {}).get("properties", {}) for tool in told}
