"""What happens where nobody says: sampling, context, memory, answers that go round in circles."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from radixcache import LLM, SamplingParams
from radixcache.errors import ContextExceeded
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.cli import main
from radixcache.runtime.outputs import MIN_REPEATED, MIN_REPEATS, find_repetition
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.serving import ServingContext
from radixcache.runtime.server.settings import read_settings
from tests.helpers.models import tiny_model
from tests.runtime.server.live import live


@pytest.mark.parametrize(
    ("said", "temperature", "top_p"),
    [
        ({}, 1, 1),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, 0, 1),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.5}, 0.7, 0.5),
        ({"temperature": 0.7}, 0.7, 1),
    ],
)
def test_what_a_model_says_of_its_sampling_holds_or_temperature_1(
    tmp_path: Path, said: dict[str, object], temperature: float, top_p: float
) -> None:
    folder = tiny_model("llama", tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    with LLM(folder, kv_cache_memory_bytes="1MiB") as llm:
        assert (llm.default_params.temperature, llm.default_params.top_p) == (temperature, top_p)


def test_a_servers_own_sampling_stands_between_the_request_and_the_model() -> None:
    _, options = read_settings({"temperature": "0.5", "max_tokens": "7"})
    assert options.sampling == {"temperature": 0.5, "max_tokens": 7}
    with LLM(kv_cache_memory_bytes="16MiB") as llm:
        backend = ServingContext(llm, options)
        assert any("answers by temperature 0.5" in note for note in backend.notes)
        assert backend.chat_defaults.temperature == backend.completion_defaults.temperature == 0.5
        with live(llm, sampling={"max_tokens": 3}) as server:
            body = {"prompt": "| a | b |", "ignore_eos": True}
            answer = server.post("/v1/completions", body).json()
            assert answer["usage"]["completion_tokens"] == 3
            answer = server.post("/v1/completions", {**body, "max_tokens": 2}).json()
            assert answer["usage"]["completion_tokens"] == 2
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        ServerArgs(sampling={"temperature": -1})


def test_a_server_says_at_its_start_whether_it_can_chat(tmp_path: Path) -> None:
    for left_out, reason in (("", None), ("*.jinja", "chat template"), ("token*", "tokenizer")):
        folder = tmp_path / f"without {reason}"
        shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns(left_out))
        with LLM(folder, kv_cache_memory_bytes="1MiB") as llm:
            notes = ServingContext(llm, ServerArgs()).notes
            told = [note for note in notes if "has no " in note]
            assert len(told) == (reason is not None)
            assert all(f"has no {reason}:" in note for note in told)


def test_the_context_is_what_fits_and_a_refusal_says_what_to_do() -> None:
    with LLM(page_size=4, kv_cache_memory_bytes="128KiB") as llm:
        engine = llm.engine
        most = engine.max_model_len
        assert most == (engine.kv_pool.num_pages - 1) * 4 + 1 < engine.model.max_context
        assert any(f"context {most:,} tokens; KV memory " in note for note in llm.notes)
        fits = SamplingParams(max_tokens=2, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [3] * (most - 2)}, fits)
        assert len(output.outputs[0].token_ids) == 2
        with pytest.raises(ContextExceeded, match=rf"of {most - 1:,} tokens: give it more \(--kv-"):
            llm.generate({"prompt_token_ids": [3] * (most + 1)}, fits)
        with live(llm) as server:
            (model,) = server.get("/v1/models").json()["data"]
            assert model["max_model_len"] == most
            body = {"prompt": [3] * (most + 1), "max_tokens": 2}
            error = server.post("/v1/completions", body).json()["error"]
            assert (
                error["code"] == "context_length_exceeded"
                and "--kv-cache-memory-bytes" in error["message"]
            )


def plain_repetition(tokens: list[int]) -> int | None:
    for period in range(1, len(tokens) + 1):
        times = max(MIN_REPEATS, -(-MIN_REPEATED // period))
        length = max(period * MIN_REPEATS, MIN_REPEATED)
        if length <= len(tokens) and (tokens[-period:] * times)[-length:] == tokens[-length:]:
            return period
    return None


def test_a_repeated_end_is_found_as_by_trying_all_lengths() -> None:
    choose, found = random.Random(20261124), 0
    for _ in range(2000):
        unit = choose.choices(range(3), k=choose.randint(1, 30))
        tokens = choose.choices(range(3), k=choose.randint(0, 20)) + unit * choose.randint(1, 20)
        tokens += unit[: choose.randint(0, len(unit))] + [9] * choose.randint(0, 1)
        expected = plain_repetition(tokens)
        found += expected is not None
        assert find_repetition(tokens) == expected
    assert 500 < found < 1500


def test_an_answer_that_goes_round_in_circles_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    loop = ["--max-tokens", "64", "--temperature", "0"]
    with LLM(kv_cache_memory_bytes="16MiB") as llm, live(llm) as server:
        body = {"prompt": [5], "max_tokens": 64, "allowed_token_ids": [7], "temperature": 0}
        answer = server.post("/v1/completions", body).json()
        assert answer["radixcache"]["repetitions"] == [1]
        few = server.post("/v1/completions", {**body, "max_tokens": 9}).json()
        assert few["radixcache"]["repetitions"] is None
    assert main(["generate", "| a | a | a | a |", *loop]) == 0
    assert "it repeats its last 1 tokens" in capsys.readouterr().err
