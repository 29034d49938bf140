"""Tokens per second with a schema, against the same number of tokens without.

Sixteen prompts that are cached run as one batch, greedy and sampled, by two schemas: a record, much
of which is forced, and one long string, nothing of which is. Free answers are as long as the guided
ones of the same prompts. Both ways alternate in one process; so does the record with a step for
each forced token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from radixcache import LLM, SamplingParams, Structured

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 24},
        "department": {"enum": ["accounting", "engineering", "marketing"]},
        "employees": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "age": {"type": "integer", "minimum": 18, "maximum": 67},
                    "remote": {"type": "boolean"},
                },
                "required": ["age", "remote"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["name", "department", "employees"],
    "additionalProperties": False,
}
STRING = {"type": "string", "minLength": 300, "maxLength": 400}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; the bundled one")
    parser.add_argument("--batch", type=int, default=16, help="prompts (16)")
    parser.add_argument("--pairs", type=int, default=9, help="runs in each way (9)")
    args = parser.parse_args()
    prompts: Any = [f"Tell me of person number {i}:" for i in range(args.batch)]
    with LLM(args.model, max_num_seqs=args.batch, kv_memory="128MiB") as llm:
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)

        def timed(params: list[SamplingParams], forces: bool = True) -> tuple[float, list[int]]:
            """Tokens per second, and how many tokens each answer has."""
            llm.engine._forces_tokens = forces
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            counts = [len(output.outputs[0].token_ids) for output in outputs]
            return sum(counts) / seconds, counts

        for name, schema, both in (("record", RECORD, True), ("string", STRING, False)):
            for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                structured = Structured.json(schema)
                guided = [
                    SamplingParams(
                        temperature=temperature, seed=i, max_tokens=500, structured=structured
                    )
                    for i in range(args.batch)
                ]
                before = llm.worker.num_steps
                _, counts = timed(guided)
                steps = llm.worker.num_steps - before
                free = [
                    SamplingParams(
                        temperature=temperature, seed=i, max_tokens=count, ignore_eos=True
                    )
                    for i, count in enumerate(counts)
                ]
                timed(free)
                ratios, one_by_one = [], []
                for pair in range(args.pairs):
                    rates = {}
                    ways = ["free", "guided", "single"][: 2 + both]
                    for way in ways if pair % 2 else reversed(ways):
                        params = free if way == "free" else guided
                        rates[way], again = timed(params, forces=way == "guided")
                        assert again == counts, "not the same number of tokens"
                    ratios.append(rates["guided"] / rates["free"])
                    if both:
                        one_by_one.append(rates["single"] / rates["free"])
                print(
                    f"{name}, {kind}: {sum(counts):,} tokens, longest answer {max(counts)} in "
                    f"{steps} steps; with the schema {statistics.median(ratios):.2f} of without "
                    f"({min(ratios):.2f} to {max(ratios):.2f})"
                    + (
                        f"; {statistics.median(one_by_one):.2f} if forced tokens take a step each"
                        if both
                        else ""
                    )
                )


if __name__ == "__main__":
    main()
