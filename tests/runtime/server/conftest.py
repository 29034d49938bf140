"""One server for most tests; those that need another one start it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from radixcache import LLM
from tests.runtime.server.live import LiveServer, live


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live(LLM(kv_cache_memory_bytes="32MiB")) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The stock client; after the test nothing is left running and no page is lost."""
    with (
        openai.DefaultHttpxClient(verify=False) as plain,  # certificates take longer than requests
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="any", max_retries=0, http_client=plain
        ) as client,
    ):
        yield client
    server.assert_idle()
