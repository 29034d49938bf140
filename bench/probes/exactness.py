"""What a hit and a batch change: logits and greedy answers, by default and in exact mode.

    python -m radixcache.bench.probes.exactness     # --quick: in a minute

Every prompt is answered alone with nothing cached, behind a cached prefix, and in a batch with
others. Figures of the first token's log-probabilities are parts of their standard deviation over
the vocabulary. The models: tabletalk, which is in the package, asked about tables; a Llama of 33 M
parameters and a Gemma 2 of 13 M with random weights, whose tokens are nearly tied, asked about
random tokens.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Gemma2Config, Gemma2ForCausalLM

from radixcache import LLM, SamplingParams
from radixcache.bench.probes.people import ask_about, make_table
from radixcache.bench.probes.random_llama import save_random_llama
from radixcache.runtime.engine.input_processor import Prompt
from radixcache.runtime.files import BUNDLED_MODEL

DTYPES = ("float32", "bfloat16")
GROUP = 10  # questions about one table or document


def save_random_gemma(folder: Path, seed: int) -> None:
    """Transformers' layers run it: windows, soft caps, and GELU."""
    torch.manual_seed(seed)
    config = Gemma2Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, sliding_window=128,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)


def table_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Conversations of one question, GROUP for each table."""
    rng, prompts = random.Random(seed), list[list[int]]()
    tokenizer = llm.history.tokenizer
    while len(prompts) < count:
        table, people = make_table(rng)
        for _ in range(GROUP):
            text = tokenizer.render_chat(ask_about(rng, table, people))
            prompts.append(tokenizer.encode(text, special=False))
    return prompts[:count]


def random_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Random tokens: GROUP questions of 5 to 20 behind each document of 200 to 500."""
    rng, vocabulary = np.random.default_rng(seed), llm.engine.model.vocab_size
    prompts: list[list[int]] = []
    while len(prompts) < count:
        document = rng.integers(0, vocabulary, rng.integers(200, 500)).tolist()
        for length in rng.integers(5, 20, GROUP):
            prompts += [document + rng.integers(0, vocabulary, length).tolist()]
    return prompts[:count]


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams, way: str) -> list[Any]:
    """The answers in one way: "alone", "hit" or "batch"; or all log-probabilities, if asked for."""
    found = []
    for start in range(0, len(prompts), GROUP):
        group: list[Prompt] = [
            {"prompt_token_ids": prompt} for prompt in prompts[start : start + GROUP]
        ]
        if way == "batch":
            found += llm.generate(group, params, use_tqdm=False)
            continue
        if way == "hit":
            llm.reset_prefix_cache()
            columns = zip(*prompts[start : start + GROUP], strict=False)
            shared = [column[0] for column in takewhile(lambda c: len({*c}) == 1, columns)]
            llm.generate({"prompt_token_ids": shared}, SamplingParams(max_tokens=1))
        for prompt in group:
            found += llm.generate(prompt, params)
            if way == "hit":
                assert found[-1].num_cached_tokens
    answers = [output.outputs[0] for output in found]
    if params.logprobs is None:
        return [answer.token_ids for answer in answers]
    rows = [(answer.logprobs or [])[0] for answer in answers]
    return [[row[i] for i in range(params.logprobs)] for row in rows]


def compare(name: str, folder: Path, dtype: str, exact: bool, args: argparse.Namespace) -> None:
    tabletalk = folder == BUNDLED_MODEL
    count = args.questions if tabletalk else args.prompts
    answers: dict[str, list[Any]] = {}
    logits: dict[str, NDArray[Any]] = {}
    # One after the other: two engines would have more threads than cores.
    for warm, ways in ((False, ("alone", "batch")), (True, ("hit",))):
        llm = LLM(
            folder,
            dtype=dtype,
            exact=exact,
            cache="radix" if warm else "none",
            kv_cache_memory_bytes="256MiB",
        )
        with llm:
            prompts = (table_prompts if tabletalk else random_prompts)(llm, count, args.seed)
            answer = SamplingParams(temperature=0, max_tokens=args.answer)
            vocabulary = llm.engine.model.vocab_size
            first = SamplingParams(temperature=0, max_tokens=1, logprobs=vocabulary)
            for way in ways:
                answers[way] = ask(llm, prompts, answer, way)
                logits[way] = np.array(ask(llm, prompts[: args.rows], first, way))
    for way in ("hit", "batch"):
        error = (logits[way] - logits["alone"]) / logits["alone"].std(1, keepdims=True)
        flips = sum(a != b for a, b in zip(answers[way], answers["alone"], strict=True))
        size = f"{abs(error).max():.1e} | {(error**2).mean() ** 0.5:.1e}"
        print(
            f"| {name} | {dtype} | {'exact' if exact else 'default'} | {way} | "
            f"{size if error.any() else '0 | 0'} | {flips:,} of {count:,} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=int, default=1000, help="to tabletalk (1000)")
    parser.add_argument("--prompts", type=int, default=100, help="to the other models (100)")
    parser.add_argument("--answer", type=int, default=32, help="tokens (32)")
    parser.add_argument("--rows", type=int, default=20, help="whose log-probabilities count (20)")
    parser.add_argument("--seed", type=int, default=0)
    models = ("tabletalk", "llama", "gemma2")
    parser.add_argument("--models", nargs="+", choices=models, default=models, metavar="NAME",
                        help=f"of {', '.join(models)} (all)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="20 questions, 10 prompts")
    args = parser.parse_args()
    if args.quick:
        args.questions, args.prompts = 20, 10
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, seed {args.seed}")
    print("| model | dtype | mode | by | largest | RMS | answers that flip |")
    print("|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as place:
        llama, gemma = Path(place, "llama"), Path(place, "gemma2")
        for folder, save in ((llama, save_random_llama), (gemma, save_random_gemma)):
            if folder.name in args.models:
                save(folder, args.seed)
        folders = {"tabletalk": BUNDLED_MODEL, "llama": llama, "gemma2": gemma}
        for name in args.models:
            for dtype in DTYPES:
                for exact in (False, True):
                    compare(name, folders[name], dtype, exact, args)


if __name__ == "__main__":
    main()
