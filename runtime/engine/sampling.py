"""How the next token is chosen: parameters only, importable without torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from radixcache.errors import InvalidRequest
from radixcache.runtime.engine.structured import Structured

MAX_PROMPT_LOGPROBS = 20
"""Likeliest tokens that can be asked for at each position of a prompt."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; the names mean what they mean in vLLM.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than `min_p` times the likeliest, in [0, 1].
        max_tokens: tokens to generate at most; None means up to the end of the context. 0 only
            scores the prompt, and needs `prompt_logprobs`.
        stop: strings that end the text; they are not part of it. None, here and below, is none.
        stop_token_ids: tokens that end the text, besides the model's own end tokens.
        ignore_eos: go on past the model's end tokens.
        seed: makes the request's tokens independent of what else is in the batch.
        n: completions per prompt; the prompt is computed once.
        logprobs: report this many likeliest tokens per step, besides the chosen one.
        prompt_logprobs: report for every prompt token its log-probability and those of this many
            likeliest tokens, 20 at most. Cached tokens that no earlier request had scored are
            computed again, and do not count as cached.
        structured: the form that the text must have; None leaves it free.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Collection[int] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", "at least 0", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(-1 <= self.top_k < 2**31, "top_k", "at least 1, or 0 or -1 for all", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        least = 1 if self.prompt_logprobs is None else 0
        _require(
            self.max_tokens is None or self.max_tokens >= least,
            "max_tokens",
            f"at least {least}",
            self.max_tokens,
        )
        _require(
            self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "of 64 bits", self.seed
        )
        _require(self.n >= 1, "n", "at least 1", self.n)
        _require(
            self.logprobs is None or self.logprobs >= 0, "logprobs", "at least 0", self.logprobs
        )
        _require(
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_PROMPT_LOGPROBS,
            "prompt_logprobs",
            f"from 0 to {MAX_PROMPT_LOGPROBS}",
            self.prompt_logprobs,
        )
        _require(
            self.structured is None or isinstance(self.structured, Structured),
            "structured",
            "a Structured, as by Structured.json(schema)",
            self.structured,
        )
        _require(all(self.stop_strings), "stop", "non-empty strings", self.stop)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{name} must be {rule}, not {value!r}")
