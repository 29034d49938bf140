"""The examples of docs/server.md, and the one of the README, answer what they say."""

from __future__ import annotations

import io
import re
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

from tests.runtime.server.live import LiveServer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/server.md").read_text()
BOTH = (ROOT / "README.md").read_text() + PAGE
ADDRESS = "http://127.0.0.1:8000"
COMMANDS = re.findall(
    r"^(curl .*?)\n# ([^\n]+)",
    "\n".join(re.findall(r"```bash\n(.*?)```", BOTH, re.DOTALL)),
    re.DOTALL | re.MULTILINE,
)
PROGRAM = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))


def test_every_curl_prints_what_is_below_it(server: LiveServer):
    server.post("/v1/cache/flush")
    assert len(COMMANDS) == BOTH.count("\ncurl ")
    for command, claim in COMMANDS:
        assert ADDRESS in command
        done = subprocess.run(
            ["bash", "-c", command.replace("curl", "curl -sS", 1).replace(ADDRESS, server.url)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert claim in done.stdout, f"{command}\n{done.stdout}"
    server.assert_idle()


def test_the_python_examples_print_what_their_comments_say(server: LiveServer):
    server.post("/v1/cache/flush")
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(PROGRAM.replace(ADDRESS, server.url), "server.md", "exec"), {})
    claims = re.findall(r"^print\(.*\)  # (.+)$", PROGRAM, re.MULTILINE)
    assert len(claims) == 6 and out.getvalue().splitlines() == claims
