"""Time to first token of a question about a long document: cold, cached, and asked again.

The runs take turns in one process, so that the ratios hold when the machine's speed drifts. What is
asked again is cached to its last token, and its logits are kept; a decode step, of the answers that
follow, is there to compare. Prints each run, the medians, and the ratio of cold to cached.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from radixcache import LLM, SamplingParams
from radixcache.bench.probes.random_llama import save_random_llama
from radixcache.runtime.engine.input_processor import Prompt

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


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
        llm = LLM(folder, page_size=args.page_size, kv_cache_memory_bytes="256MiB")
    document = rng.integers(0, 16_384, args.document)

    def ask(question: NDArray[np.int64]) -> tuple[float, float, int]:
        prompt: Prompt = {"prompt_token_ids": np.concatenate([document, question])}
        (output,) = llm.generate(prompt, PARAMS)
        metrics = output.metrics
        assert metrics.ttft is not None and metrics.tokens_per_second is not None
        return metrics.ttft, 1 / metrics.tokens_per_second, metrics.prefilled_tokens

    print(
        f"random Llama, {size / 1e6:.0f} M parameters, {llm.engine.model.dtype}, seed {args.seed}: "
        f"a {args.document}-token document, questions of {args.question} tokens"
    )
    times: dict[str, list[float]] = {"cold": [], "cached": [], "again": [], "decode step": []}
    for pair in range(-1, args.pairs):
        llm.reset_prefix_cache()
        first, question = rng.integers(0, 16_384, (2, args.question))
        for name, asked in (("cold", first), ("cached", question), ("again", question)):
            ttft, step, prefilled = ask(asked)
            if pair < 0:  # warm-up
                continue
            times[name].append(ttft)
            times["decode step"].append(step)
            print(f"pair {pair}  {name:6}  prefilled {prefilled:5}  TTFT {ttft * 1000:8.1f} ms")
    median = {name: 1000 * statistics.median(found) for name, found in times.items()}
    print(
        f"median TTFT: cold {median['cold']:.1f} ms, cached {median['cached']:.1f} ms: "
        f"1/{median['cold'] / median['cached']:.1f} of cold; asked again {median['again']:.1f} ms, "
        f"where a decode step takes {median['decode step']:.1f} ms"
    )


if __name__ == "__main__":
    main()
