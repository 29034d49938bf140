"""Time to first token after a restart: computed, from disk in a new process, and again and again.

python -m radixcache.bench.probes.restart [MODEL] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from radixcache import LLM, SamplingParams
from radixcache.bench.probes.random_llama import save_random_llama

ONE = SamplingParams(temperature=0, max_tokens=1)
REPEATS = 36


def ttft(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds, and how many of the prompt's tokens were loaded."""
    (output,) = llm.generate([prompt], ONE)
    assert output.metrics.ttft is not None
    return 1000 * output.metrics.ttft, output.metrics.loaded_tokens


def run(model: str, kv_dir: str, length: int) -> dict[str, list[tuple[float, int]]]:
    """Time one process's first request, and further ones after evictions of everything."""
    rng = np.random.default_rng(0)
    with LLM(model, kv_dir=kv_dir, kv_dir_size="2GB", kv_cache_memory_bytes="512MB") as llm:
        size = llm.engine.model.vocab_size
        prompt, other = (rng.integers(8, size, n).tolist() for n in (length, 200))
        ttft(llm, other)  # what a first request loads of libraries, and what computing takes
        seen = {"first": [ttft(llm, prompt)], "again": list[tuple[float, int]]()}
        for _ in range(REPEATS):
            llm.call(lambda: llm.cache.evict(llm.cache.pool.num_pages))
            assert llm.offload is not None and llm.offload.disk is not None
            llm.offload.disk.flush()
            seen["again"].append(ttft(llm, prompt))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a folder or GGUF (a random Llama of 33 M)")
    parser.add_argument("--tokens", type=int, default=3001, help="of the prompt (3001)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(args.model, args.run, args.tokens)))
        return
    with TemporaryDirectory() as folder:
        if args.model is None:
            args.model = f"{folder}/model"
            save_random_llama(Path(args.model))
        command = [sys.executable, "-m", "radixcache.bench.probes.restart", args.model]
        command += ["--tokens", str(args.tokens), "--run", f"{folder}/kv"]
        before, after = (
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(2)
        )
    ((cold, loaded),), ((restarted, found),) = before["first"], after["first"]
    assert not loaded, "the folder was empty"
    steady = median(time for time, _ in after["again"])
    print(f"TTFT of {args.tokens:,} tokens, computed: {cold:,.0f} ms")
    print(f"in a new process, {found:,} loaded: {restarted:,.0f} ms (1/{cold / restarted:.0f})")
    print(f"again, median of {REPEATS}: {steady:,.0f} ms (1/{cold / steady:.0f})")


if __name__ == "__main__":
    main()
