"""Files of workloads, as tests write them."""

from __future__ import annotations

import json

from radixcache.bench.workloads.rendered import Joined


def encode(text):
    return list(text.encode())


PLAIN = Joined(encode)


def write(tmp_path, *lines, name="file.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
HISTORY = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "U"}, {"type": "image_url"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "R"},
    {"role": "assistant", "content": "A"},
]
CALLED = b'{"name":"look","arguments":"{\\"at\\": 1}"}'
