"""Sessions of Claude Code and of Codex: what they send, to models of several templates.

No request is refused, and each turn finds all of the one before in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from radixcache import SamplingParams
from radixcache.runtime.server.protocol.anthropic import CountRequest, MessagesRequest
from radixcache.runtime.server.protocol.responses import ResponsesRequest
from tests.helpers.scripted import CHAT_TEMPLATE, call, scripted_llm
from tests.runtime.server.live import LiveServer, live

MESSAGES, RESPONSES = "/v1/messages?beta=true", "/v1/responses"
PLAIN = (  # as SmolLM2's: no tools, no thoughts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # as Gemma's: no system message, and roles take turns
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_FIRST = (  # as Qwen3.5's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must be first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"thinks": CHAT_TEMPLATE, "plain": PLAIN, "strict": STRICT, "system": SYSTEM_FIRST}

PATCH = '*** Begin Patch\n*** Add File: a.txt\n+Say "hi" \\ é\n*** End Patch'
CALLS = {
    "claude": [
        call("Bash", command="ls", description="Look"),
        "Let me look.\n" + call("Read", file_path="a.txt") + "\n" + call("Read", file_path="b.txt"),
        call("ToolSearch", query="select:WebFetch"),
        call("WebFetch", url="https://example.org"),
    ],
    "codex": [
        call("exec_command", cmd="ls"),
        call("apply_patch", input=PATCH),
        call("mcp__memory__recall", key="a") + "\n" + call("exec_command", cmd="pwd"),
        call("local_shell", command=["cat", "a.txt"], timeout_ms=1000),
    ],
}
DONE = "All is done."


def script(prompt: str) -> str | list[str]:
    """Calls one after the other, as often as somebody was asked for an answer."""
    if "Work" not in prompt:
        return ["A title", '{"title": "A title"}']
    calls = CALLS["codex" if "Codex" in prompt else "claude"]
    turn = prompt.count("<|im_start|>assistant\n") - 1
    return calls[turn] if turn < len(calls) else DONE


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    llm = scripted_llm(script, TEMPLATES[request.param], kv_cache_memory_bytes="16MiB")
    with live(llm) as server:
        yield server
        server.call(llm.prefixes.drop_yielding)
        server.assert_idle()


def events(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# ------------------------------------------------------------------------------- Claude Code


def client_tool(name: str, *parameters: str, **more: Any) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
    }
    schema |= {"properties": properties, "required": [parameters[0]], "additionalProperties": False}
    told = {"name": name, "description": f"{name}s.", "input_schema": schema}
    return {**told, "eager_input_streaming": True, **more}


TOOLS = [
    client_tool("Bash", "command", "description", input_examples=[{"command": "ls"}]),
    client_tool("Read", "file_path"),
    client_tool("ToolSearch", "query"),
    client_tool("WebFetch", "url", defer_loading=True),
]
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}


def claude(number: int, *messages: Any, **more: Any) -> dict[str, Any]:
    """The body of Claude Code's request of this number."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Be brief.\n# Environment\n...", "cache_control": EPHEMERAL},
    ]
    return {
        "model": "scripted",
        "messages": [*messages],
        "system": system,
        "tools": TOOLS,
        "metadata": {"user_id": "user_x_account__session_y"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
        **more,
    }


def total(usage: dict[str, int]) -> int:
    names = "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"
    return sum(usage[name] for name in names)


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def question(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def put_together(streamed: list[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    """The blocks of a message, and its usage."""
    blocks: list[Any] = []
    for event in streamed:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            kind, value = event["delta"].values()
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(kind, "json")
            blocks[-1][name] += value
    for block in blocks:
        if arguments := block.pop("json"):
            block["input"] = json.loads(arguments)
    assert streamed[-1]["type"] == "message_stop"
    return blocks, streamed[-2]["usage"]


def test_a_session_of_claude_code(server: LiveServer) -> None:
    assert httpx.head(server.url, verify=False).status_code == 200  # whether anybody is there
    assert server.get("/v1/models?limit=1000").json()["data"][0]["id"] == "scripted"
    probe = {"model": "scripted", "max_tokens": 1, "metadata": {"user_id": "x"}}
    probe["messages"] = [{"role": "user", "content": "quota"}]
    assert server.post(MESSAGES, probe).status_code == 200
    form: dict[str, Any] = {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
    }
    form["additionalProperties"] = False
    title: dict[str, Any] = claude(
        0, question(text("Name it")), tools=[], thinking={"type": "disabled"}
    )
    title["output_config"] = {"format": {"type": "json_schema", "schema": form}}
    blocks, _ = put_together(events(server.post(MESSAGES, {**title, "temperature": 1})))
    assert json.loads(blocks[-1]["text"]).keys() == {"title"}

    first = question(
        text("<system-reminder>\nToday.\n</system-reminder>"),
        text("Work!", cache_control=EPHEMERAL),
    )
    warm = server.post(MESSAGES, {**claude(1, first), "max_tokens": 0, "stream": False}).json()
    assert (warm["content"], warm["stop_reason"]) == ([], "max_tokens")
    counted = {**claude(1, first)}
    for name in ("metadata", "max_tokens", "stream"):
        del counted[name]
    count = server.post("/v1/messages/count_tokens?beta=true", counted).json()["input_tokens"]
    assert count == total(warm["usage"])

    conversation, before, called = [first], count + 1, list[str]()
    for number in range(2, 12):
        response = server.post(MESSAGES, claude(number, *conversation))
        blocks, usage = put_together(events(response))
        assert usage["cache_read_input_tokens"] == before - 1, (number, called)
        assert "x-tools-left-out" not in response.headers
        before = total(usage) + usage["output_tokens"]
        conversation.append({"role": "assistant", "content": blocks})
        used = [block for block in blocks if block["type"] == "tool_use"]
        called += [block["name"] for block in used]
        if not used:
            assert blocks[-1]["text"] == DONE
            break
        results = [_result(block) for block in used]
        results[-1] |= {"cache_control": EPHEMERAL}
        reminder = [text("<system-reminder>Mind the list.</system-reminder>")] * (number % 2)
        conversation.append(question(*results, *reminder))
        if number == 3:
            conversation.append({"role": "system", "content": "The user is away."})
        for message in conversation[:-2]:  # the marks move on
            for block in message["content"] if isinstance(message["content"], list) else []:
                block.pop("cache_control", None)
    assert called == ["Bash", "Read", "Read", "ToolSearch", "WebFetch"]

    search = claude(12, question(text("Search")), tools=[WEB_SEARCH])
    response = server.post(MESSAGES, search)
    assert put_together(events(response))[0][-1]["text"] == "A title"
    assert response.headers["x-tools-left-out"] == "web_search_20250305"


def test_deferred_tools_are_told_where_a_search_finds_them() -> None:
    searched = {"type": "tool_search_tool_bm25_20251119", "name": "search"}
    for more, at_once in (([], False), ([searched], True)):  # nobody here runs that search
        asked = claude(1, question(text("Hi")), tools=[*TOOLS, *more])
        request = MessagesRequest(**asked)
        told = request.turn(SamplingParams()).rendering["tools"]
        assert ("WebFetch" in [tool["function"]["name"] for tool in told]) == at_once
        assert len(request.offered) == 4
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "x"}}
    asked = claude(1, question(text("Hi")), {"role": "assistant", "content": [use]})
    asked["messages"].append(question(_result(use)))
    *_, result = MessagesRequest(**asked).turn(SamplingParams()).messages
    assert json.loads(result["content"])["name"] == "WebFetch"


@pytest.mark.parametrize(
    ("template", "asked", "status"),
    [
        ("", {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, 200),
        ("", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 200),
        ("{# </think> #}", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 200),
        ("{# </think> #}", {"output_config": {"effort": "low"}}, 200),
        ("{# </think> #}", {"thinking": {"type": "disabled"}}, 400),
        ("{# </think> #}", {"output_config": {"effort": "none"}}, 400),
        ("{# </think> #}{{ reasoning_effort }}", {"output_config": {"effort": "none"}}, 200),
        ("{# </think> #}{{ reasoning_effort }}", {"thinking": {"type": "disabled"}}, 400),
        ("{# </think> #}{{ enable_thinking }}", {"thinking": {"type": "disabled"}}, 200),
    ],
)
def test_only_what_always_thinks_cannot_be_told_not_to(
    template: str, asked: dict[str, Any], status: int
) -> None:
    with live(scripted_llm(script, template + PLAIN)) as server:
        hello = question(text("Hi"))
        warm = {"max_tokens": 4}
        for path, more in (("/v1/messages", warm), ("/v1/messages/count_tokens", {})):
            response = server.post(path, {"messages": [hello], **more, **asked})
            assert response.status_code == status
            assert status == 200 or "does not support switching thinking off" in response.text
        if effort := asked.get("output_config", {}).get("effort"):
            chat = {"messages": [hello], "max_tokens": 4, "reasoning_effort": effort}
            assert server.post("/v1/chat/completions", chat).status_code == status
            other = {"input": "Hi", "reasoning": {"effort": effort}, "max_output_tokens": 4}
            assert server.post(RESPONSES, other).status_code == status


def test_options_of_a_message_count_from_there_on_and_what_asks_for_nothing_is_taken() -> None:
    config: Any = {"effort": "low", "task_budget": {"type": "tokens", "total": 1000}}
    for own, effort in (({}, "low"), ({"effort": "high"}, "high"), (None, "low")):
        more = {"role": "system", "content": "x", "clear_at": "never", "output_config": own}
        asked: Any = {"betas": ["x"], "output_config": config}
        asked["messages"] = [question(text("Hi")), more, question(text("And?"))]
        for request in (CountRequest(**asked), MessagesRequest(**asked, max_tokens=1)):
            assert request.turn(SamplingParams()).thinking.effort == effort


@pytest.mark.parametrize("betas", ["x", 7, [7]])
def test_betas_are_a_list_of_texts(server: LiveServer, betas: Any) -> None:
    sent = {"max_tokens": 1, "messages": [question(text("a"))], "betas": betas}
    assert (response := server.post(MESSAGES, sent)).status_code == 400 and "betas" in response.text


@pytest.mark.parametrize("field", ["stream", "explain", "ends_conversation"])
def test_only_true_and_false_are_booleans(server: LiveServer, field: str) -> None:
    hello = [{"role": "user", "content": "Hi"}]
    for path, body in (
        (MESSAGES, {"messages": hello, "max_tokens": 1}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/chat/completions", {"messages": hello, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ):
        for value in ("no", "yes", 0, 1):
            response = server.post(path, {**body, field: value})
            assert response.status_code == 400 and f"{field}: " in response.text
        assert server.post(path, {**body, field: None}).status_code == 200


def test_old_thoughts_are_left_out_if_that_is_asked(server: LiveServer) -> None:
    def thought(number: int) -> dict[str, Any]:
        told = {"type": "thinking", "thinking": f"Thought {number}", "signature": ""}
        return {"role": "assistant", "content": [told, text("Yes.")]}

    said = [question(text("a")), thought(1), question(text("b")), thought(2), question(text("c"))]
    kept: list[list[int]] = []
    for keep in ("all", {"type": "thinking_turns", "value": 1}, None):
        edit = {"type": "clear_thinking_20251015", "keep": keep}
        sent: Any = {"max_tokens": 1, "messages": said, "context_management": {"edits": [edit]}}
        turn = MessagesRequest(**sent).turn(SamplingParams())
        thoughts = [message.get("reasoning_content", "") for message in turn.messages]
        kept.append([n for n in (1, 2) if f"Thought {n}" in thoughts])
        assert server.post(MESSAGES, sent).status_code == 200
    assert kept == [[1, 2], [2], [2]]


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content: Any = [text(f"{block['name']} says\nso")]
    if block["name"] == "ToolSearch":
        content = [{"type": "tool_reference", "tool_name": "WebFetch"}]
    return {"type": "tool_result", "tool_use_id": block["id"], "content": content}


# ------------------------------------------------------------------------------------- Codex


def function(name: str, *parameters: str, **more: Any) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": [*parameters[:1]]}
    told = {"type": "function", "name": name, "description": f"{name}s.", "strict": False}
    return {**told, "parameters": {**schema, "additionalProperties": False}, **more}


CODEX_TOOLS = [
    function("exec_command", "cmd", "workdir"),
    function("update_plan", "explanation"),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. FREEFORM: no JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "namespace",
        "name": "mcp__memory__",
        "description": "Remembers.",
        "tools": [function("recall", "key", defer_loading=True)],
    },
    {"type": "local_shell"},
]


def codex(*items: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "instructions": "You are Codex.",
        "input": [*items],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-thread",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "y"},
        "truncation": "auto",
        **more,
    }


def said(role: str, told: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": told}]}


ENVIRONMENT = "<environment_context>\n  <cwd>/x</cwd>\n</environment_context>"


def outputs_of(items: list[Any]) -> list[Any]:
    """What Codex's tools answer."""
    made = [item for item in items if item["type"].endswith("_call")]
    kinds = {"custom_tool_call": "custom_tool_call_output"}
    return [
        {
            "type": kinds.get(item["type"], "function_call_output"),
            "call_id": item["call_id"],
            "output": f"Exit code: 0\n{item['type']}",
        }
        for item in made
    ]


def test_a_session_of_codex(server: LiveServer) -> None:
    assert server.get("/v1/models?client_version=0.150.1").status_code == 200
    probe = {"model": "scripted", "input": [], "max_output_tokens": 1, "store": False}
    assert server.post(RESPONSES, probe).status_code == 200
    conversation = [said("developer", "<permissions>"), said("user", ENVIRONMENT)]
    conversation.append(said("user", "Work!"))
    before, called = 0, list[Any]()
    for number in range(10):
        response = server.post(RESPONSES, codex(*conversation))
        streamed = events(response)
        assert streamed[-1]["type"] == "response.completed"
        whole = streamed[-1]["response"]
        assert response.headers["x-tools-left-out"] == "web_search, image_generation"
        usage = whole["usage"]
        assert not before or usage["input_tokens_details"]["cached_tokens"] == before - 1, number
        before = usage["total_tokens"]
        items = [e["item"] for e in streamed if e["type"] == "response.output_item.done"]
        assert items == whole["output"]
        made = [item for item in items if item["type"].endswith("_call")]
        called += made
        # Codex sends neither the ids nor the states of what it got.
        conversation += [{k: v for k, v in i.items() if k not in ("id", "status")} for i in items]
        if not made:
            assert items[-1]["content"][0]["text"] == DONE
            break
        conversation += outputs_of(items)
        if number == 1:
            conversation.append(said("developer", "<collaboration_mode>Go on.</...>"))
        if number == 2:
            conversation.append(said("user", "Mind the tests."))
    shell = {"type": "exec", "env": {}, "command": ["cat", "a.txt"], "timeout_ms": 1000}
    assert [(item["type"], item.get("name"), item.get("namespace")) for item in called] == [
        ("function_call", "exec_command", None),
        ("custom_tool_call", "apply_patch", None),
        ("function_call", "recall", "mcp__memory__"),
        ("function_call", "exec_command", None),
        ("local_shell_call", None, None),
    ]
    assert called[1]["input"] == PATCH and called[4]["action"] == shell


def test_what_the_model_is_told_of_codex_tools() -> None:
    request = ResponsesRequest(**codex(said("user", "Hi")))
    told = {tool.name: tool for tool in request.offered}
    assert [*told] == [
        *("exec_command", "update_plan", "apply_patch", "mcp__memory__recall", "local_shell"),
    ]
    assert request.left_out == ("web_search", "image_generation")
    patch, recall = told["apply_patch"], told["mcp__memory__recall"]
    assert patch.parameters["properties"] == {"input": {"type": "string"}}
    assert "start: /.+/s" in str(patch.description)
    assert recall.description == "recalls.\nmcp__memory__: Remembers."
    named = codex(said("user", "Hi"), tool_choice={"type": "custom", "name": "apply_patch"})
    assert ResponsesRequest(**named).choice.names == ("apply_patch",)
    inner = {"type": "function", "namespace": "mcp__memory__", "name": "recall"}
    assert ResponsesRequest(**{**named, "tool_choice": inner}).choice.names == (recall.name,)


def test_input_items_of_codex_by_id(server: LiveServer) -> None:
    """The conversation goes on by id; what it was given comes back as items."""
    first = server.post(RESPONSES, codex(said("user", "Work! 2"), store=True, stream=False)).json()
    second = codex(*outputs_of(first["output"]), store=True, stream=False)
    whole = server.post(RESPONSES, {**second, "previous_response_id": first["id"]}).json()
    assert whole["output"][0]["type"] == "custom_tool_call"
    third = codex(*outputs_of(whole["output"]), store=True, stream=False)
    whole = server.post(RESPONSES, {**third, "previous_response_id": whole["id"]}).json()
    path = f"{RESPONSES}/{whole['id']}/input_items"
    items = server.get(f"{path}?order=asc").json()
    kinds = ["message", "function_call", "function_call_output"]
    kinds += ["custom_tool_call", "custom_tool_call_output"]
    assert [item["type"] for item in items["data"]] == kinds and not items["has_more"]
    assert items["data"][3]["input"] == PATCH
    last = server.get(f"{path}?limit=1").json()
    assert last["data"] == items["data"][-1:] and last["has_more"]
    rest = server.get(f"{path}?after={last['last_id']}").json()
    assert rest["data"] == items["data"][-2::-1]
    again = codex(*items["data"], said("user", "Goes on"), stream=False)
    assert server.post(RESPONSES, again).status_code == 200
    assert server.get(f"{path}?after=x").status_code == 404


def test_calls_that_a_server_ran_are_left_out_of_a_history() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"q": "x"}}
    asked = [said("user", "Work!"), said("user", "Go on")]
    plain = ResponsesRequest.model_validate({"input": asked})
    kinds = "mcp_call", "mcp_list_tools", "mcp_approval_request", "tool_search_output"
    items = [asked[0], search, *({"type": kind, "id": "x"} for kind in kinds), asked[1]]
    request = ResponsesRequest.model_validate({"input": items})
    assert request.messages() == plain.messages()
    for item in ({**search, "type": "computer_call"}, {**search, "type": ["web_search_call"]}):
        with pytest.raises(ValueError, match="type"):
            ResponsesRequest.model_validate({"input": [item]})
