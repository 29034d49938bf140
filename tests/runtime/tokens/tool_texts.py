"""Formats of tool calls, and texts in them whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from radixcache.runtime.tokens.tool_formats import ToolFormat, find_format

HERMES = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CODER = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
MISTRAL_11 = "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}"
MISTRAL = "{{ '[TOOL_CALLS][' }}"
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.'


def written(template: str, name: str, arguments: Mapping[str, object]) -> str:
    """A call as the models of each family write it, from their documentation."""
    told = json.dumps(arguments)
    match template:
        case _ if template == HERMES:
            return f'<tool_call>\n{{"name": "{name}", "arguments": {told}}}\n</tool_call>'
        case _ if template == CODER:
            parts = "".join(
                f"<parameter={key}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
                for key, v in arguments.items()
            )
            return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"
        case _ if template == MISTRAL_11:
            return f"[TOOL_CALLS]{name}[ARGS]{told}"
        case _ if template == MISTRAL:
            return f'[TOOL_CALLS][{{"name": "{name}", "arguments": {told}}}]'
        case _:
            return f'{{"name": "{name}", "parameters": {told}}}'


def fmt(template: str) -> ToolFormat:
    found = find_format(template)
    assert found is not None
    return found


def each(*templates: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("template", templates, ids=lambda t: t[:12])


ALL, WITH_MANY = each(HERMES, CODER, MISTRAL_11, MISTRAL, LLAMA), each(HERMES, CODER, MISTRAL_11)
