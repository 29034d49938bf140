"""Time to first token of a question about a long document, cold against cached.

Cold and cached runs alternate in one process, so that the ratio holds when the machine's speed
drifts. Prints each pair, the medians, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np

from radixcache import LLM, SamplingParams
from radixcache.bench.probes.random_llama import save_random_llama

PARAMS = SamplingParams(temperature=0, max_tokens=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--document", type=int, default=3000, help="tokens (3000)")
    parser.add_argument("--question", type=int, default=30, help="tokens (30)")
    parser.add_argument("--pairs", type=int, default=7, help="cold and cached runs each (7)")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        size = save_random_llama(Path(folder), args.seed)
        llm = LLM(folder, page_size=args.page_size, kv_memory="256MiB")
    document = rng.integers(0, 16_384, args.document)

    def ask() -> tuple[float, int]:
        question = rng.integers(0, 16_384, args.question)
        (output,) = llm.generate({"prompt_token_ids": np.concatenate([document, question])}, PARAMS)
        assert output.metrics.ttft is not None
        return output.metrics.ttft, output.metrics.prefilled_tokens

    print(
        f"random Llama, {size / 1e6:.0f} M parameters, {llm.engine.model.dtype}, seed {args.seed}: "
        f"a {args.document}-token document, questions of {args.question} tokens"
    )
    ask(), ask()  # warm-up
    cold: list[float] = []
    cached: list[float] = []
    for pair in range(args.pairs):
        llm.reset_prefix_cache()
        for times, name in ((cold, "cold"), (cached, "cached")):
            ttft, prefilled = ask()
            times.append(ttft)
            print(f"pair {pair}  {name:6}  prefilled {prefilled:5}  TTFT {ttft * 1000:8.1f} ms")
    a, b = statistics.median(cold), statistics.median(cached)
    print(f"median TTFT: cold {a * 1000:.1f} ms, cached {b * 1000:.1f} ms: 1/{a / b:.1f} of cold")


if __name__ == "__main__":
    main()
