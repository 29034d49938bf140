"""How the next token is chosen: parameters only, importable without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from math import inf
from typing import Any, TypeVar

import numpy as np

from radixcache.errors import InvalidRequest
from radixcache.runtime import vllm_names
from radixcache.runtime.engine.structured import Structured

T = TypeVar("T")

MAX_PROMPT_LOGPROBS = 20
"""Likeliest tokens that can be asked for at each position of a prompt."""


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, float | np.floating) or (_is_int(value) and abs(value) < 2**1023)


def _is_some(value: Any, is_one: Callable[[Any], bool]) -> bool:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        return False
    return all(map(is_one, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "float": (_is_float, "a number"),
    "int": (_is_int, "an integer"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str | Sequence[str]": (
        lambda value: _is_text(value) or _is_some(value, _is_text),
        "a string or a list of strings that are not empty",
    ),
    "Sequence[str]": (
        lambda value: _is_some(value, _is_text),
        "a list of strings that are not empty",
    ),
    "Collection[int]": (lambda value: _is_some(value, _is_int), "token ids"),
    "Mapping[int, float]": (
        lambda value: (
            isinstance(value, Mapping)
            and all(_is_int(t) and _is_float(b) and -100 <= b <= 100 for t, b in value.items())
        ),
        "of token ids and numbers in [-100, 100]",
    ),
    "Structured": (
        lambda value: isinstance(value, Structured),
        "a Structured, as by Structured.json(schema)",
    ),
}
"""What a field of `SamplingParams` of each type takes; where the type says so, None besides."""


def _refusing(cls: type[T]) -> type[T]:
    """A dataclass that tells what to do where arguments are not its own."""
    init: Callable[..., None] = cls.__init__

    @wraps(init)
    def refusing(self: T, *values: Any, **given: Any) -> None:
        others = [name for name in given if name not in cls.__dict__["__dataclass_fields__"]]
        vllm_names.check(cls, {name: given.pop(name) for name in others})
        init(self, *values, **given)

    cls.__init__ = refusing  # type: ignore[assignment]
    return cls


@_refusing
@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; the names mean what they mean in vLLM.

    Log-probabilities are those of the model, before penalties, biases and what is forbidden.

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
        presence_penalty: taken from the logit of every token that was generated, in [-2, 2].
        frequency_penalty: the same, as often as the token was generated.
        repetition_penalty: divides the logits above 0 of tokens in the prompt or generated, and
            multiplies those below; above 0, and 1 changes nothing.
        logit_bias: token ids, and what is added to their logits, in [-100, 100].
        bad_words: strings that are not generated: the last token of each is forbidden where the
            others have just come, whether the word begins a text or follows a space.
        allowed_token_ids: the only tokens that are generated.
        min_tokens: so many tokens come before an end token, a stop token or a stop string counts.
        include_stop_str_in_output: the text ends with what stopped it, not before.
        skip_special_tokens: the text is without them.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = ()
    allowed_token_ids: Collection[int] | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured: Structured | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic | np.ndarray):
                value = value.tolist()
                object.__setattr__(self, field.name, value)
            kind, optional, _ = str(field.type).partition(" | None")
            holds, rule = _KINDS[kind]
            _require((optional and value is None) or holds(value), field.name, rule, value)
        _require(
            0 <= self.temperature < inf, "temperature", "at least 0 and finite", self.temperature
        )
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
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, "in [-2, 2]", getattr(self, name))
        penalty, allowed = self.repetition_penalty, self.allowed_token_ids
        _require(0 < penalty < inf, "repetition_penalty", "above 0", penalty)
        _require(
            allowed is None or len(allowed) > 0,
            "allowed_token_ids",
            "token ids, one at least",
            allowed,
        )
        _require(
            0 <= self.min_tokens <= (inf if self.max_tokens is None else self.max_tokens),
            "min_tokens",
            f"at least 0 and at most max_tokens ({self.max_tokens})",
            self.min_tokens,
        )

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


def _require(holds: object, name: str, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{name} must be {rule}, not {value!r:.100}")
