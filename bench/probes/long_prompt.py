"""How long others wait beside one long prompt, and what that costs it.

    python -m radixcache.bench.probes.long_prompt [MODEL] [--tokens 20000]

First the prompt is alone. Then a client's stream runs, the prompt comes, and some clients ask short
questions, one after the other, each with a salt of its own. Last come prompts of full batches.
"""

from __future__ import annotations

import argparse
import threading
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from radixcache import LLM, SamplingParams
from radixcache.bench.tables import console, table

CLIENTS, QUESTIONS, BATCH = 5, 8, 12
SHORT, ANSWER, MIDDLE = 40, 24, 700
"""Tokens of a short prompt, of its answer, and of a prompt of a batch."""


class Seen(NamedTuple):
    """Seconds to the first token, the longest between two, and to the end."""

    first: float
    gap: float
    end: float


class Probe:
    def __init__(self, model: str | None, tokens: int) -> None:
        self.llm = LLM(model, kv_cache_memory_bytes="4GiB")
        self.llm.engine.model.max_context = tokens + 1000  # longer than the model was made for
        self.tokens, self._rng = tokens, np.random.default_rng(0)

    def ask(self, tokens: int, answer: int, salt: str | None = None) -> Seen:
        """A prompt of random tokens."""
        prompt = self._rng.integers(1000, 2000 if not salt else 3000, tokens).tolist()
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        outputs = self.llm.stream({"prompt_token_ids": prompt}, params, cache_salt=salt)
        times = [time.perf_counter(), *(time.perf_counter() for _ in outputs)]
        gaps = [after - before for before, after in pairwise(times[1:])]
        return Seen(times[1] - times[0], max(gaps, default=0.0), times[-1] - times[0])

    def alone(self) -> float:
        return self.ask(self.tokens, 1).end

    def batch(self) -> float:
        """Seconds that a batch takes."""
        prompts = self._rng.integers(1000, 3000, (BATCH, MIDDLE)).tolist()
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    def beside(self) -> tuple[Seen, list[Seen], float]:
        """The stream, the short ones, and seconds until all have ended."""
        stream: list[Seen] = []
        short: list[Seen] = []

        def client(name: str) -> None:
            short.extend(self.ask(SHORT, ANSWER, name) for _ in range(QUESTIONS))

        threads = [threading.Thread(target=lambda: stream.append(self.ask(SHORT, 200, "stream")))]
        threads += [threading.Thread(target=self.alone)]
        threads += [threading.Thread(target=client, args=(f"{n}",)) for n in range(CLIENTS)]
        start = time.perf_counter()
        for number, thread in enumerate(threads):
            thread.start()
            time.sleep(0.5 if number < 2 else 0.1)
        for thread in threads:
            thread.join()
        return stream[0], short, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=20_000)
    args = parser.parse_args()
    probe = Probe(args.model, args.tokens)
    probe.ask(600, 8)
    alone, batch = probe.alone(), min(probe.batch() for _ in range(2))
    stream, short, together = probe.beside()
    firsts = sorted(seen.first for seen in short)
    rows = [
        ["a long prompt alone", f"{alone:.2f}"],
        [f"{BATCH} prompts of {MIDDLE} tokens", f"{batch:.2f}"],
        ["all beside the long prompt", f"{together:.2f}"],
        ["longest wait of a short one for its first token", f"{firsts[-1]:.2f}"],
        ["median wait", f"{firsts[len(firsts) // 2]:.2f}"],
        ["longest gap of the running stream", f"{stream.gap:.2f}"],
        ["longest gap of a short one", f"{max(seen.gap for seen in short):.2f}"],
    ]
    console(100).print(table(["what", "seconds"], rows))


if __name__ == "__main__":
    main()
