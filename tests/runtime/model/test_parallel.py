"""Models that two processes compute: what they answer, and that none outlives the other."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixcache import LLM, SamplingParams
from radixcache.errors import (
    EngineFailed,
    EngineStopped,
    InvalidRequest,
    MissingDependency,
    ModelError,
    RanksLost,
)
from radixcache.runtime.model.parallel import load as parallel
from radixcache.runtime.model.parallel.workers import Ranks
from radixcache.runtime.model.transformers_patches import row_parallel_linear as local_linear
from tests.helpers.decoders import DECODERS
from tests.helpers.forks import Forked
from tests.helpers.models import NUM_KV_HEADS, tiny_model

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.20")  # as the extra `tensor-parallel` says

SETTINGS: dict[str, Any] = {
    "kv_cache_memory_bytes": "1MB",
    "page_size": 8,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What somebody was told: torch 2.11 also writes to a logger that shows nothing."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


class ForkedRank:
    """What `subprocess.Popen` starts, without the seconds that it takes to import."""

    def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="rank-"))
        os.mkfifo(folder / "in")
        self._forked = Forked(folder, be_rank, folder / "in", command[2], os.getpid(), env)
        self.pid = self._forked.pid
        self.stdin = (folder / "in").open("wb")  # waits until it is opened there
        shutil.rmtree(folder)

    def wait(self, timeout: float = 1e9) -> int:
        end = time.monotonic() + timeout
        while (status := self._forked.poll()) is None and time.monotonic() < end:
            time.sleep(0.005)
        if status is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return status

    def kill(self) -> None:
        self._forked.send_signal(signal.SIGKILL)


def be_rank(stdin: Path, code: str, parent: int, env: dict[str, str]) -> int:
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    os.environ.update(env)
    exec(code.replace(f", {parent})", f", {os.getppid()})"))  # its parent is another here
    return 1


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_linear  # imported, so that the forks need not
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)


def ranks_of(llm: LLM) -> Ranks:
    model = llm.engine.model
    assert isinstance(model, parallel.LeadingModel) and model.ranks is not None
    return model.ranks


def draw(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share stems and part in mid-page, greedy and with seeds."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, 256, length) for length in (37, 90, 61)]
    requests = []
    for number in range(count):
        stem = stems[rng.integers(len(stems))]
        tail = rng.integers(0, 256, rng.integers(1, 30))
        tokens = np.concatenate([stem[: rng.integers(1, len(stem) + 1)], tail]).tolist()
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.8,
            seed=int(rng.integers(1 << 30)),
            max_tokens=int(rng.integers(1, 24)),
            ignore_eos=True,
        )
        requests.append((tokens, params))
    return requests


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """The tokens of each, some streams beside them hung up on."""
    given = []
    for first in range(0, len(requests), 10):
        some = requests[first : first + 10]
        streams = [llm.stream(tokens[:-1], params) for tokens, params in some[:2]]
        for stream in streams:
            next(stream)
        prompts = [tokens for tokens, _ in some]
        outputs = llm.generate(prompts, [params for _, params in some], use_tqdm=False)
        given += [list(output.outputs[0].token_ids) for output in outputs]
        for stream in streams:
            stream.close()
        llm.call(llm.engine.check)
    return given


def check_equal(
    llm: LLM, alone: LLM, count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks answer as one process, and copied pages on the way."""
    told: list[str] = []
    tell = ranks_of(llm).tell

    def note(*message: Any) -> None:
        told.append(message[0])
        tell(*message)

    monkeypatch.setattr(ranks_of(llm), "tell", note)
    requests = draw(count, seed)
    got, wanted = answers(llm, requests), answers(alone, requests)
    monkeypatch.undo()
    different = [i for i in range(count) if got[i] != wanted[i]]
    assert not different, f"{len(different)} of {count} answers differ: {different}"
    assert told.count("copy") >= max(1, count // 20) and told.count("forward") > count // 2


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.usefixtures("forked")
def test_two_ranks_answer_as_one_process_and_end_with_the_first_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")  # of a launcher that started this process
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    model = tiny_model("qwen3", tmp_path)
    with pytest.raises(InvalidRequest, match="hold no page") as error:
        LLM(model, tensor_parallel_size=2, kv_cache_memory_bytes=1)
    assert error.traceback  # which holds what was made; its ranks have ended all the same
    with LLM(model, **SETTINGS) as alone, LLM(model, tensor_parallel_size=2, **SETTINGS) as llm:
        assert os.environ["LOCAL_RANK"] == "7" and "GLOO_SOCKET_IFNAME" not in os.environ
        assert "transformers on 2 ranks" in repr(llm)
        assert llm.engine.model.shapes[0].heads == NUM_KV_HEADS // 2
        check_equal(llm, alone, 10, seed=0, monkeypatch=monkeypatch)
        with pytest.raises(InvalidRequest, match="one tensor-parallel model at a time"):
            LLM(model, tensor_parallel_size=2)
        if not (child := os.fork()):  # whose copy of the model is not the ranks' own
            llm.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and llm.worker.alive

        (process,) = ranks_of(llm)._processes
        streams = [llm.stream([1, 2, n], SamplingParams(max_tokens=400)) for n in range(8)]
        next(streams[0])
        process.kill()
        begun = time.monotonic()
        for stream in streams:  # two of them wait for a slot
            with pytest.raises((EngineFailed, EngineStopped), match=r"rank 1|has stopped"):
                list(stream)
        assert time.monotonic() - begun < 30
        assert not llm.worker.alive
        with pytest.raises(EngineStopped):
            llm.generate([[1, 2, 3]])


@pytest.mark.usefixtures("forked")
def test_two_ranks_keep_their_kv_in_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3", tmp_path, hidden_size=128, head_dim=32)
    settings = SETTINGS | {"kv_cache_dtype": "int8"}
    with LLM(model, **settings) as alone, LLM(model, tensor_parallel_size=2, **settings) as llm:
        assert 2 * llm.engine.model.bytes_per_token == alone.engine.model.bytes_per_token == 272
        check_equal(llm, alone, 10, seed=0, monkeypatch=monkeypatch)


@pytest.mark.usefixtures("forked")
def test_closing_does_not_wait_for_a_rank_that_is_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_model("llama", tmp_path), tensor_parallel_size=2, **SETTINGS) as llm:
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=480, ignore_eos=True))
        next(stream)
        (process,) = ranks_of(llm)._processes
        os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
    assert time.monotonic() - begun < 30
    with pytest.raises(EngineStopped):
        list(stream)
    assert not is_running(process.pid) and not warnings(caplog)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "count"),
    [("llama", 67), ("qwen3", 67), ("gemma3_text", 66), ("minicpm3", 20)],  # MLA, expanded
)
def test_200_answers_of_two_ranks_are_those_of_one_process(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, tmp_path)
    with LLM(model, **SETTINGS) as alone, LLM(model, tensor_parallel_size=2, **SETTINGS) as llm:
        check_equal(llm, alone, count, seed=len(family), monkeypatch=monkeypatch)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["join", "load_transformers"])  # before all have met, and after
def test_a_rank_that_dies_as_the_model_is_loaded_is_not_waited_for(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Ranks] = []

    class Watched(Ranks):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)
            if place == "join":  # it must not have come when it dies
                os.kill(self._processes[0].pid, signal.SIGSTOP)

    def die(*args: Any, **options: Any) -> Any:
        made[0]._processes[0].kill()
        return go_on(*args, **options)

    go_on = getattr(parallel, place)
    monkeypatch.setattr(parallel, place, die)
    monkeypatch.setattr(parallel, "Ranks", Watched)
    with pytest.raises(RanksLost, match=r"rank 1 has ended \(status -9\)"):
        LLM(tiny_model("llama", tmp_path), tensor_parallel_size=2)
    assert not warnings(caplog)  # it is said once


SCRIPT = """
import os, signal, sys, time
from radixcache import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background
llm = LLM(sys.argv[1], tensor_parallel_size=2, kv_cache_memory_bytes="1MB")
print(llm.engine.model.ranks._processes[0].pid, flush=True)
if sys.argv[2] == "fork" and not os.fork():
    time.sleep(30)
    os._exit(0)
if sys.argv[2] == "end":
    llm.generate([[1, 2, 3]])
else:
    many = SamplingParams(max_tokens=480, ignore_eos=True)
    while True:
        llm.generate([[1, 2, 3]] * 4, many)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("ending", ["end", "SIGKILL", "SIGTERM", "SIGINT", "fork"])
def test_no_rank_outlives_the_first(ending: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    leader = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, model, ending], stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    with leader, leader.stdout:
        pid = int(leader.stdout.readline())
        assert is_running(pid)
        if ending != "end":
            time.sleep(0.3)  # in the middle of a step
            os.kill(leader.pid, getattr(signal, ending, signal.SIGKILL))
        try:
            leader.wait(20)
        finally:
            leader.kill()
    assert wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("device", "gpus", "sentence"),
    [
        ("cuda", 1, "tensor_parallel_size=2 needs as many GPUs; there are 1 here"),
        ("auto", 1, "tensor_parallel_size=2 needs as many GPUs; there are 1 here"),
        ("cuda:1", 2, "the ranks take the first devices: say device='cuda'"),
        ("cpu", 2, "is for GPUs, or a CPU without any"),
    ],
)
def test_devices_that_do_not_suffice_are_named(
    device: str, gpus: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(InvalidRequest, match=sentence):
        parallel.load_parallel("no model is read", 2, "auto", device)


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install '.\[tensor-parallel\]'"):
        parallel.load_parallel("no model is read", 2, "auto", "cpu")


@pytest.mark.parametrize(
    ("family", "options", "settings", "sentence"),
    [
        ("llama", {}, {"tensor_parallel_size": 3}, "4 query heads and 2 KV heads cannot be shared"),
        ("llama", {"num_key_value_heads": 1}, {}, "4 query heads and 1 KV heads cannot"),
        ("gemma4_text", DECODERS["gemma4_text"], {}, "4 query heads and 1 KV heads cannot"),
        ("gpt2", {}, {}, "no tensor-parallel plan for 'gpt2'"),
        ("llama", {}, {"exact": True}, "exact mode is for one process"),
        (
            "llama",
            {},
            {"tensor_parallel_size": 0},
            "size must be at least 1, not 0",
        ),
        ("llama", {}, {"dtype": "int8"}, "dtype must be one of auto"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_starts(
    family: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(family, tmp_path, **options)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises((ModelError, InvalidRequest), match=sentence):
        LLM(model, **{"tensor_parallel_size": 2, **settings})
