"""One server for most tests; those that need another one start it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch

from radixcache import LLM
from tests.runtime.server.live import LiveServer, live


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that share two busy cores wait for each other more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live(LLM(kv_memory="32MiB")) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The stock client; after the test nothing is left running and no page is lost."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
    server.assert_idle()
