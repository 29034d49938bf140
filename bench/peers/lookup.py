# mypy: disable-error-code="import-not-found"
"""Our drafts beside llama.cpp's and transformers' prompt lookup, on the same requests.

    python -m bench.peers.lookup FILE.gguf     # FILE.gguf of a chat model; --turns N

Every engine answers questions about tables greedily, with its lookup and without, one after the
other in a process of its own: fresh ones, and each again at once. llama.cpp keeps the prefix of the
sequence before; so do we. transformers computes each prompt anew, and with it the model is
tabletalk, since it reads no such file. Ratios are of one engine with itself.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.peers.process import Failed, Worker, serve

MAX_TOKENS = 96
VENVS = {"ours": ".venv", "llama.cpp": ".venv-llama-cpp", "transformers": ".venv"}


class Ours:
    def __init__(self, path: str, lookup: bool) -> None:
        from radixcache import LLM, SamplingParams

        speculate = "auto" if lookup else "off"
        self._llm = LLM(path, speculate=speculate, kv_cache_memory_bytes="512MB")
        self._params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def generate(self, tokens: list[int]) -> list[int]:
        (output,) = self._llm.generate({"prompt_token_ids": tokens}, self._params)
        return output.outputs[0].token_ids


class LlamaCpp:
    def __init__(self, path: str, lookup: bool) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft = LlamaPromptLookupDecoding() if lookup else None  # ten tokens behind two alike
        self._llm = Llama(path, n_ctx=4096, n_threads=2, n_threads_batch=2, n_batch=2048,
                          verbose=False, logits_all=lookup, draft_model=draft)  # fmt: skip

    def generate(self, tokens: list[int]) -> list[int]:
        said: list[int] = []
        for token in self._llm.generate(tokens, temp=0.0, repeat_penalty=1.0):
            said.append(int(token))
            if token == self._llm.token_eos() or len(said) == MAX_TOKENS:
                break
        return said


class Transformers:
    def __init__(self, path: str, lookup: bool) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(path)
        self._more = {"prompt_lookup_num_tokens": 10} if lookup else {}

    def generate(self, tokens: list[int]) -> list[int]:
        import torch

        ids = torch.tensor([tokens])
        said = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS,
            **self._more,
        )  # fmt: skip
        found: list[int] = said[0, len(tokens) :].tolist()
        return found


KINDS: dict[str, Any] = {"ours": Ours, "llama.cpp": LlamaCpp, "transformers": Transformers}


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    said = engine.generate(request["tokens"])
    return {"seconds": time.perf_counter() - start, "tokens": said}


def questions(path: str, turns: int, seed: int) -> list[list[int]]:
    from radixcache.bench.probes.people import ask_about, make_table
    from radixcache.runtime.tokens.tokenizer import Tokenizer

    tokenizer, rng = Tokenizer.load(path, 4096), random.Random(seed)
    assert tokenizer is not None
    found = []
    for _ in range(turns):
        chat = ask_about(rng, *make_table(rng))
        found += [tokenizer.encode(tokenizer.render_chat(chat), special=False)] * 2
    return found


def compare(name: str, path: str, prompts: list[list[int]]) -> None:
    """Each prompt to both processes, which take turns in being first."""
    module = ("bench.peers.lookup", "--worker", name, path)
    workers = [Worker(VENVS[name], "bench-peers", *module, *more) for more in ((), ("lookup",))]
    ratios: dict[str, list[float]] = {"fresh": [], "again": []}
    same = 0
    try:
        for worker in workers:
            worker.ask({"tokens": prompts[0][:-1]})
        for at, tokens in enumerate(prompts):
            order = workers if at % 4 < 2 else workers[::-1]
            told = {id(worker): worker.ask({"tokens": tokens}) for worker in order}
            off, on = (told[id(worker)] for worker in workers)
            ratios["again" if at % 2 else "fresh"].append(off["seconds"] / on["seconds"])
            same += off["tokens"] == on["tokens"]
    finally:
        for worker in workers:
            worker.close()
    shown = ", ".join(f"{kind} {statistics.median(r):.2f}x" for kind, r in ratios.items())
    print(f"{name:13} {shown}; {same} of {len(prompts)} answers the same as without", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, metavar="FILE.gguf")
    parser.add_argument("--turns", type=int, default=10, help="questions (10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from radixcache.runtime.files import BUNDLED_MODEL

    for name, path in (
        ("ours", str(args.model)), ("llama.cpp", str(args.model)),
        ("ours", str(BUNDLED_MODEL)), ("transformers", str(BUNDLED_MODEL)),
    ):  # fmt: skip
        try:
            compare(name, path, questions(path, args.turns, args.seed))
        except Failed as failed:
            print(f"{name} is left out: {failed}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, path, *lookup = sys.argv[2:]
        serve(lambda: (KINDS[name](path, bool(lookup)), ""), answer)
    main()
