"""The ingress reads prompts in a process without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.router.prompts import Prompts
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.helpers.gguf.files import gguf_bytes
from tests.helpers.gguf.tokenizers import byte_level_metadata, sentencepiece_metadata
from tests.runtime.tokens.tiny_tokenizers import byte_level


def test_an_ingress_has_no_torch(tmp_path: Path) -> None:
    """Which takes seconds to import, and most of the memory."""
    models: list[str | None] = [None]
    for metadata in (byte_level_metadata(byte_level()), sentencepiece_metadata()):
        models.append(str(tmp_path / f"{len(models)}.gguf"))
        Path(models[-1] or "").write_bytes(gguf_bytes(metadata))
    code = (
        "import sys; from radixcache.runtime.router.app import create_app;"
        "from radixcache.runtime.router.prompts import load_prompts;"
        "import radixcache.runtime.server.http.serve;"
        "ask = {'prompt': 'the cat', 'model': 'tabletalk'};"
        f"read = [load_prompts(m).read('/v1/completions', ask) for m in {models}];"
        "assert all(map(len, read)), read;"
        "assert sys.modules['torch'] is None and 'torch.nn' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("path", "name", "image"),
    [
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": "data:x"}}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": "data:x"}),
        ("/v1/messages", "messages", {"type": "image", "source": {"type": "url", "url": "data:x"}}),
    ],
)
def test_a_prompt_with_images_goes_where_its_text_leads(path: str, name: str, image: Any) -> None:
    """No router reads them, so that none refuses one."""
    prompts = Prompts(Tokenizer.load(str(BUNDLED_MODEL)))
    text = {"type": "text", "text": "Who is it?"}

    def read(*content: Any) -> list[int]:
        body: dict[str, Any] = {name: [{"role": "user", "content": [*content]}]}
        if path == "/v1/messages":
            body["max_tokens"] = 1
        return prompts.read(path, body).tolist()

    assert read(text, image) == read(text) != []
