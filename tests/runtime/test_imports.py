"""What serving does not import: a model of the loop starts without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.gguf.files import gguf_bytes, write_model
from tests.helpers.gguf.tokenizers import byte_level_metadata
from tests.helpers.sources import ROOT
from tests.runtime.tokens.tiny_tokenizers import byte_level

NEEDLESS = (
    *(
        "transformers",
        "huggingface_hub",
        "accelerate",
        "gguf",
        "safetensors.torch",
        "sentencepiece",
    ),
    *(
        "scipy",
        "sklearn",
        "pandas",
        "requests",
        "ray",
        "opentelemetry.sdk",
        "zmq",
        "msgspec",
        "openai",
    ),
    *("torch._dynamo", "torch._inductor", "triton", "flashinfer", "jsonschema"),
    *("radixcache.bench", "radixcache.runtime.model.fallback.model", "radixcache.plugins"),
)
"""Each would lengthen the start, by 0.05 to 2 seconds."""

PROGRAM = """
import json, sys
from radixcache import LLM
from radixcache.runtime.server.app import create_app
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.tokens.tokenizer import Tokenizer

models, tokenizers = json.loads(sys.argv[1])
for model in models:
    llm = LLM(model, kv_cache_memory_bytes="32MiB")
    create_app(llm, ServerArgs())
    assert llm.generate([[5, 6, 7]])[0].outputs[0].token_ids
for file in tokenizers:
    tokenizer = Tokenizer.load(file)
    text = tokenizer.render_chat([{"role": "user", "content": "the cat"}])
    assert "the cat" in tokenizer.decode(tokenizer.encode(text)), text
print(*sys.modules)
"""


@pytest.mark.parametrize("kind", ["bundled", "gguf"])
def test_a_server_of_the_loops_models_imports_nothing_needless(kind: str, tmp_path: Path) -> None:
    models: list[str | None] = [None]
    tokenizers = [str(ROOT / "runtime" / "tabletalk")]
    if kind == "gguf":
        models, tokenizers = [str(tmp_path / "model.gguf")], [str(tmp_path / "words.gguf")]
        write_model(tmp_path / "model.gguf")
        told = byte_level_metadata(byte_level())
        told["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
        (tmp_path / "words.gguf").write_bytes(gguf_bytes(told))
    command = (sys.executable, "-c", PROGRAM, json.dumps([models, tokenizers]))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert "radixcache.runtime.server.app" in imported
    assert not imported.intersection(NEEDLESS)
