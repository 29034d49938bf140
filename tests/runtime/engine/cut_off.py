"""Runs an engine that is cut off at random lines of the package, and steps on.

A trace function counts the lines that run within the package, and raises `MemoryError` or
`KeyboardInterrupt` at one drawn at random, then at another; also in the engine's recovery. Every
request must end as if nothing had happened, and no page may be lost.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import radixcache
from radixcache import RadixCache, SamplingParams, StructuredOutputsParams
from radixcache.runtime.engine.explain import Explainer
from radixcache.runtime.model.kv_pool import WindowLayout
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.grammar import GrammarBackend
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.helpers.drafts import speculate
from tests.helpers.engines import assert_no_page_is_lost
from tests.helpers.hash_model import VOCAB, assert_cached_is_computed, greedy, hash_engine
from tests.helpers.tiers import MemoryStore, attach

ROOT = Path(radixcache.__file__).resolve().parents[1]
FOLDERS = tuple(str(ROOT / name) + "/" for name in ("radixcache", "runtime", "kernels"))
CACHES = ("radix", "radix", "hash-block", "none")
ERRORS = (MemoryError, KeyboardInterrupt)
TEXTS = "abcdefghijklmnopqrstuvwxyz .,"
STRUCTURES = (
    StructuredOutputsParams.regex("[a-e]{2,5}(forced stretch|fan)[xyz]*"),
    StructuredOutputsParams.regex("(so it is|soon)+", after="e"),
    StructuredOutputsParams.choice(["a choice of words", "a chance", "b"]),
)


class Letters(Tokenizer):
    """A token is a character, the last one is the end."""

    def __init__(self) -> None:
        characters = TEXTS[:-1].replace(" ", "\u0120")
        tokenizer = Backend(models.BPE({c: i for i, c in enumerate(characters)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["</s>"])
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=tokenizer))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(TEXTS[i] for i in ids)


LOCKING = GrammarBackend.find.__code__, GrammarBackend.read_vocabulary.__code__
GRAMMARS = GrammarBackend(Letters(), VOCAB, [VOCAB - 1])
for one_of in STRUCTURES:  # outside of what is cut off
    GRAMMARS.compile(one_of)


class CutOff:
    """Raises at the given counts of lines, each counted from the one before.

    Attributes:
        where: the places that were hit.
    """

    def __init__(self, rng: random.Random, gaps: list[int]) -> None:
        self._rng, self._gaps, self._left = rng, gaps, gaps.pop() if gaps else 0
        self._known: dict[str, bool] = {}
        self.lines = 0
        self.where: list[str] = []

    def __enter__(self) -> CutOff:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code in LOCKING:
            return None  # a lock's end is a line, too: cut off there, it would stay locked
        name = frame.f_code.co_filename
        if name not in self._known:
            self._known[name] = str(Path(name).resolve()).startswith(FOLDERS)
        return self._line if self._known[name] else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self._left:
                self._left -= 1
                if not self._left:
                    self._left = self._gaps.pop() if self._gaps else 0
                    self.where.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                    raise self._rng.choice(ERRORS)
        return self._line


class Run:
    """One engine and its requests, all of it drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        page_size = rng.choice([1, 2, 4, 8])
        num_pages = rng.choice([120, 300]) // page_size + 4
        running, states = rng.choice([2, 16]), 0
        if rng.random() < 0.4:
            states = running + rng.choice([1, 2, 9])
        step, windows = rng.choice([8, 24, 200]), None
        if not states and rng.random() < 0.5:
            windows = WindowLayout(rng.randint(3, 40), rng.randint(1, 9), (True, False))
            num_pages += min(90, windows.window + step) // windows.page_size + 4
        self.engine = hash_engine(
            rng.choice(CACHES), page_size, num_pages, step, running, states, windows=windows,
            decode=lambda ids: "".join(TEXTS[i] for i in ids), grammar_backend=GRAMMARS,
        )  # fmt: skip
        tiers = isinstance(self.engine.cache, RadixCache) and not states
        if tiers and rng.random() < 0.5:
            attach(self.engine, MemoryStore(self.engine.kv_pool), rng.choice([9, 200]))
        self.model: Any = self.engine.model
        self.engine.overlap = rng.random() < 0.5
        if states or rng.random() < 0.3:
            explainer = Explainer(self.engine.cache, 400)
            self.engine.scheduler.on_publish = lambda s, n: explainer.remember(s.tokens[:n])
        else:
            speculate(self.engine, 400)
        stem = [rng.randrange(VOCAB - 1) for _ in range(30)]
        self.jobs: list[tuple[list[int], SamplingParams, bool]] = []
        for _ in range(rng.randint(3, 7)):
            own = [rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 12))]
            prompt = stem[: rng.choice([0, 5, 17, 30])] + own
            if self.jobs and rng.random() < 0.3:  # its logits may be kept
                prompt = rng.choice(self.jobs)[0]
            settings: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(1, 14)}
            if rng.random() < 0.3:
                settings |= {"temperature": 1.0, "seed": rng.randrange(99), "n": rng.choice([1, 2])}
            if rng.random() < 0.3:
                settings["stop"] = [rng.choice(TEXTS), rng.choice(TEXTS) + rng.choice(TEXTS)]
            if rng.random() < 0.2:
                settings["logprobs"] = 1
            if rng.random() < 0.2:
                settings["prompt_logprobs"] = 1
            if rng.random() < 0.4:
                settings["structured_outputs"] = rng.choice(STRUCTURES)
                settings["max_tokens"] += 10
            self.jobs.append((prompt, SamplingParams(**settings), rng.random() < 0.15))
        self.clients = [rng.choice("aab") for _ in self.jobs]

    def play(self, cut: CutOff) -> list[Request]:
        """All requests, a step between two of them, and on to the end of all."""
        requests: list[Request] = []
        recover = self.engine._recover

        def traced_recover() -> None:
            with cut:  # Python takes a trace function away that has raised
                recover()

        self.engine._recover = traced_recover  # type: ignore[method-assign]
        for (prompt, params, leaves), client in zip(self.jobs, self.clients, strict=True):
            add = partial(self.engine.add_request, prompt, params, client=client)
            request = self._insist(cut, add)
            requests.append(request)
            self._try(cut, self.engine.step)
            if leaves:
                self._insist(cut, lambda r=request: self.engine.abort(r))
        for _ in range(3000):
            if not self.engine.has_work:
                return requests
            self._try(cut, self.engine.step)
        raise AssertionError("it never ends")

    def _insist(self, cut: CutOff, call: Any) -> Any:
        while True:
            try:
                with cut:
                    return call()
            except ERRORS:
                pass

    def _try(self, cut: CutOff, call: Any) -> None:
        try:
            with cut:
                call()
        except ERRORS:
            pass
        else:
            self.engine.check()


def answers(run: Run, requests: list[Request]) -> list[Any]:
    """What each request was told; of one that was aborted only that it has ended."""
    told: list[Any] = []
    for request, (prompt, params, leaves) in zip(requests, run.jobs, strict=True):
        assert request.finished, "a request without an end"
        assert request.error is None, request.error
        output = request.output()
        tokens = [o.token_ids for o in output.outputs]
        if (
            not leaves
            and params.temperature == 0
            and not params.stop
            and not params.structured_outputs
        ):
            assert tokens == [greedy(prompt, params.max_tokens or 0)], "a wrong token"
        text = [(o.text, o.finish_reason, o.logprobs and len(o.logprobs)) for o in output.outputs]
        scored = output.prompt_logprobs
        told.append(leaves or (tokens, text, scored and len(scored)))
    return told


def one(seed: int) -> list[str]:
    """Cut one run off, and compare it with itself undisturbed; where it was cut off."""
    calm = Run(seed)
    counted = CutOff(random.Random(seed), [])
    wanted = answers(calm, calm.play(counted))
    rng = random.Random(f"cut {seed}")
    # The first anywhere, the others soon after the one before: often in a recovery.
    gaps = [rng.randint(1, rng.choice([30, 200, 1500])) for _ in range(2)]
    gaps.append(rng.randint(1, counted.lines))
    cut, run = CutOff(rng, gaps), Run(seed)
    try:
        assert answers(run, run.play(cut)) == wanted, "another answer than undisturbed"
        assert not run.model.unwritten, "a slot was read before it was written"
        assert not getattr(run.model, "wrong_states", 0), "a state of other tokens"
        assert not getattr(run.model, "wrong_windows", 0), "a window of other tokens"
        assert not run.engine.scheduler.open
        assert_cached_is_computed(run.engine)
        run.engine.check()
        assert_no_page_is_lost(run.engine)
    except BaseException as error:
        raise AssertionError(f"seed {seed}, cut off at {cut.where}: {error!r}") from error
    return cut.where
