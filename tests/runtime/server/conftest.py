"""One server of the bundled model, which drafts, and one of a scripted one; others start theirs."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from radixcache import LLM
from tests.helpers.drafts import drafting_llm
from tests.helpers.scripted import scripted_llm
from tests.runtime.server.api.apis import Chat, script
from tests.runtime.server.live import LiveServer, live


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live(drafting_llm()) as server:
        yield server


@pytest.fixture(scope="session")
def scripted() -> Iterator[LiveServer]:
    with live(scripted_llm(script)) as server:
        yield server


@pytest.fixture(scope="session")
def llm() -> LLM:
    """For servers with options of their own; two requests run at a time."""
    return LLM(kv_cache_memory_bytes="16MiB", max_num_seqs=2)


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The stock client; after the test nothing is left running and no page is lost."""
    with Chat(server.url, False).client() as client:
        yield client
    server.assert_idle()


@pytest.fixture
def fresh(server: LiveServer) -> Iterator[LiveServer]:
    """The server, which has a past, with an empty cache."""
    server.forget()
    yield server
    server.assert_idle()
