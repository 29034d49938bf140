"""Measures many clients on one shared prefix: over HTTP, and in transformers' `generate_batch`."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

from radixcache.bench.gpu.models import free_memory
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report, Row, figure
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL

AIM = 2.0
"""Wanted requests per second over HTTP, in multiples of `generate_batch`'s."""

_START_SECONDS = 60


class Served(NamedTuple):
    """Figures of one request: seconds to the first token and to the end, and tokens received."""

    first: float
    whole: float
    tokens: int


def run(place: Place, report: Report) -> None:
    with TemporaryDirectory() as folder:
        vocab_size = _save(place, folder)
        rng = np.random.default_rng(3)
        sizes = place.sizes
        prefix = rng.integers(0, vocab_size, sizes.cached[0]).tolist()
        own = rng.integers(0, vocab_size, (sizes.requests, sizes.questions[-2])).tolist()
        prompts = [prefix + tokens for tokens in own]
        rates: list[float] = []
        report.measure("HTTP", _http, place, folder, prompts, rates)
        few = prompts[: sizes.clients]  # all at once: it had answered none of 256 after 90 s (H100)
        report.measure("generate_batch", _generate_batch, place, folder, few, rates)


def _save(place: Place, folder: str) -> int:
    """Save a random model with the bundled tokenizer; returns the tokenizer's size."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_MODEL)
    tokenizer.save_pretrained(folder)
    shape: dict[str, Any] = place.sizes.served | {"vocab_size": len(tokenizer)}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    model.to(place.dtype)
    model.generation_config = GenerationConfig(do_sample=False)
    model.save_pretrained(folder)
    return len(tokenizer)


def _device(place: Place) -> str:
    """The device for another process: a simulated GPU exists in this one only."""
    return str(place.device) if torch.version.cuda else "cpu"


def _generate_batch(
    place: Place, folder: str, prompts: list[list[int]], rates: list[float]
) -> Iterator[Row]:
    """Time the second of two calls, which shares no KV with the first, against HTTP."""
    name = str(place.dtype).removeprefix("torch.")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=name).eval()
    model.to(_device(place))
    config = GenerationConfig(
        max_new_tokens=place.sizes.served_answer, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Its attention over pages needs much memory besides KV.
    batching = ContinuousBatchingConfig(max_memory_percent=0.4)
    for part in (prompts[:2], prompts):
        start = time.perf_counter()
        found = model.generate_batch(
            part, generation_config=config, continuous_batching_config=batching
        )
        seconds = time.perf_counter() - start
    tokens = sum(len(output.generated_tokens) for output in found.values())
    if tokens < len(prompts) * place.sizes.served_answer:
        raise RuntimeError(f"it gave {tokens} tokens, less than was asked for")
    del model
    free_memory()
    rate = len(found) / seconds
    note = f"{tokens / seconds:,.0f} tokens/s, {len(prompts)} requests at once"
    yield figure("generate_batch, shared prefix", rate, "requests/s", note=note)
    if rates:
        yield figure("HTTP over generate_batch", rates[0] / rate, "x", at_least=AIM)


def _http(place: Place, folder: str, prompts: list[list[int]], rates: list[float]) -> Iterator[Row]:
    with _server(place, folder) as port, ThreadPoolExecutor(place.sizes.clients) as pool:

        def ask(prompt: list[int]) -> Served:
            return _ask(port, prompt, place.sizes.served_answer)

        list(pool.map(ask, prompts[: place.sizes.clients]))  # the prefix is cached from here on
        start = time.perf_counter()
        served = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - start
    rate = len(served) / seconds
    rates.append(rate)
    firsts = sorted(one.first for one in served)
    tokens = sum(one.tokens for one in served)
    between = statistics.median((one.whole - one.first) / (one.tokens - 1) for one in served)
    p99 = firsts[int(0.99 * (len(firsts) - 1))]
    note = f"{tokens / seconds:,.0f} tokens/s, {between * 1e3:.1f} ms between tokens"
    yield figure(f"HTTP, {place.sizes.clients} clients", rate, "requests/s", note=note)
    note = f"p99 {p99 * 1e3:.1f} ms"
    yield figure("HTTP: TTFT, median", statistics.median(firsts) * 1e3, "ms", note=note)


@contextmanager
def _server(place: Place, folder: str) -> Iterator[int]:
    """Run a server of the model in its own process; gives its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    name = str(place.dtype).removeprefix("torch.")
    words = ["serve", "--model", folder, "--served-model-name", "llama", "--port", str(port)]
    words += ["--dtype", name]
    log = Path(place.out) / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "radixcache", *words, "--device", _device(place)],
            stdout=out,
            stderr=out,
        )
        try:
            until = time.monotonic() + _START_SECONDS
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield port
        finally:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _ask(port: int, prompt: Sequence[int], max_tokens: int) -> Served:
    body = {
        "model": "llama", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    start, first, tokens = time.perf_counter(), 0.0, 0
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:500].decode()}")
    for line in answer:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            if b'"usage":{' in line.replace(b" ", b""):
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    whole = time.perf_counter() - start
    connection.close()
    return Served(first, whole, tokens)
