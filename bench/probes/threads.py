"""Tokens per second of threads that share one LLM, against one call with all their prompts.

As many threads as sequences may run at once call `generate` with a prompt each, again and again.
Both ways alternate in one process, each from an empty cache, and must give the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from radixcache import LLM, SamplingParams
from radixcache.runtime.demo.script import TABLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=200, help="of each thread (200)")
    parser.add_argument("--answer", type=int, default=16, help="tokens (16)")
    parser.add_argument("--pairs", type=int, default=3, help="runs in each way (3)")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    table, count = TABLE.read_text(), args.threads * args.calls
    prompts = [f"{table}\nQuestion {index}: who is the oldest?" for index in range(count)]
    ratios = []
    with LLM(max_num_seqs=args.threads, kv_memory="64MiB") as llm:

        def one_call() -> list[list[int]]:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        def by_threads() -> list[list[int]]:
            def call(thread: int) -> list[list[int]]:
                mine = prompts[thread :: args.threads]
                return [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in mine]

            with ThreadPoolExecutor(args.threads) as pool:
                by_thread = list(pool.map(call, range(args.threads)))
            return [by_thread[i % args.threads][i // args.threads] for i in range(count)]

        print(
            f"{args.threads} threads x {args.calls} calls of {args.answer} tokens, {count} prompts"
        )
        for pair in range(args.pairs):
            rates, answers = [], []
            for way in (one_call, by_threads):
                llm.reset_prefix_cache()
                start = time.perf_counter()
                answers.append(way())
                rates.append(count * args.answer / (time.perf_counter() - start))
            assert answers[0] == answers[1], "other tokens"
            ratios.append(rates[1] / rates[0])
            print(
                f"pair {pair}: one call {rates[0]:,.0f} tokens/s, threads {rates[1]:,.0f}, "
                f"ratio {ratios[-1]:.2f}"
            )
    print(f"median ratio {statistics.median(ratios):.2f}; the same tokens in both ways")


if __name__ == "__main__":
    main()
