"""Requests made up from the server's own OpenAPI document find no answer that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from radixcache import LLM
from tests.helpers.models import tiny_model
from tests.runtime.server.live import LiveServer, live

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny_model("llama", tmp_path_factory.mktemp("llama"))
    with live(LLM(path, kv_cache_memory_bytes="8MiB")) as server:
        yield server
        server.assert_idle()


@pytest.mark.parametrize("examples", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_no_request_is_answered_with_500(tiny: LiveServer, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]
    assert {"/v1/chat/completions", "/v1/cache/flush"} <= {o.path for o in operations}
    modes = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
    phases, unhealthy = [Phase.explicit, Phase.generate], [*HealthCheck]
    for operation in operations:
        valid, invalid = (operation.as_strategy(generation_mode=mode) for mode in modes)

        @settings(
            max_examples=examples, deadline=None, phases=phases, suppress_health_check=unhealthy
        )
        @given(case=st.one_of(valid, invalid))
        def answers_as_documented(case: schemathesis.Case) -> None:
            case.validate_response(case.call(timeout=60), checks=CHECKS)

        answers_as_documented()
        tiny.assert_idle()
