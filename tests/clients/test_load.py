"""guidellm: a load of made-up texts, by both of the APIs that it asks by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[2] / "runtime/tabletalk"
REQUESTS, PROMPT, OUTPUT = 6, 48, 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_load_is_served_without_errors(served: dict[str, Any], tmp_path: Path, path: str):
    pytest.importorskip("guidellm")
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={served['bundled']},request_format={path}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={MODEL}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "output": f"kind=json,path={report}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    program = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    subprocess.run([*program, *flags], env=environment, cwd=tmp_path, check=True, timeout=300)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    said = benchmark["metrics"]["output_token_count"]["successful"]
    assert said["mean"] == said["min"] == OUTPUT
