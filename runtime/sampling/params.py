"""The sampling parameters of a request; importable without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import numpy as np

from radixcache.errors import InvalidRequest
from radixcache.runtime.config.flags import setting
from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams

MAX_PROMPT_LOGPROBS = 20
"""Likeliest tokens that a request may ask for at each position of a prompt."""


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) or (_is_int(value) and abs(value) < 2**1023)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_int(token) and _is_float(bias) and -100 <= bias <= 100 for token, bias in value.items()
    )


def _all(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        listed = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        return listed and all(map(is_one, value))

    return holds


_STRINGS = "a list of strings that are not empty"
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "float": (_is_float, "a number"),
    "int": (_is_int, "an integer"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str | Sequence[str]": (lambda v: _is_text(v) or _all(_is_text)(v), f"a string or {_STRINGS}"),
    "Sequence[str]": (_all(_is_text), _STRINGS),
    "Collection[int]": (_all(_is_int), "token ids"),
    "Mapping[int, float]": (_is_bias, "of token ids and numbers in [-100, 100]"),
    "StructuredOutputsParams": (
        lambda v: isinstance(v, StructuredOutputsParams),
        "StructuredOutputsParams, as by StructuredOutputsParams.json(...)",
    ),
}
"""The values that each type of field takes, None besides where the type says so."""

_RANGES = [
    ("temperature", 0, 1e308, "at least 0 and finite"),
    ("top_k", -1, 2**31 - 1, "at least 1, or 0 or -1 for all"),
    ("min_p", 0, 1, "in [0, 1]"),
    ("seed", -(2**63), 2**63 - 1, "of 64 bits"),
    ("n", 1, inf, "at least 1"),
    ("logprobs", 0, inf, "at least 0"),
    ("prompt_logprobs", 0, MAX_PROMPT_LOGPROBS, f"from 0 to {MAX_PROMPT_LOGPROBS}"),
    ("presence_penalty", -2, 2, "in [-2, 2]"),
    ("frequency_penalty", -2, 2, "in [-2, 2]"),
]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; the names have vLLM's meanings.

    Log-probabilities are the model's, before penalties, biases and forbidden tokens.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than `min_p` times the likeliest, in [0, 1].
        max_tokens: tokens to generate at most; None means up to the end of the context. 0 only
            computes the prompt: it is cached, and scored if there are `prompt_logprobs`.
        stop: strings that end the text, and are not part of it; in thoughts they do not count.
            None, here and below, is none.
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
        min_tokens: end tokens, stop tokens and stop strings count only after so many tokens.
        include_stop_str_in_output: the text includes the stop string.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the form that the text must have; None leaves it free.
        ends_conversation: no later prompt goes on from this one and its answer: what they alone use
            of the cache is evicted first.
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
    structured_outputs: StructuredOutputsParams | None = None
    ends_conversation: bool = False

    def __post_init__(self) -> None:
        for name, optional, (holds, rule) in _CHECKS:
            value = getattr(self, name)
            if isinstance(value, (np.generic, np.ndarray)):
                value = value.tolist()
                object.__setattr__(self, name, value)
            _require((optional and value is None) or holds(value), name, rule, value)
        for name, least, most, rule in _RANGES:
            value = getattr(self, name)
            _require(value is None or least <= value <= most, name, rule, value)
        longest = inf if self.max_tokens is None else self.max_tokens
        _require(longest >= 0, "max_tokens", "at least 0", self.max_tokens)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        penalty = self.repetition_penalty
        _require(0 < penalty < inf, "repetition_penalty", "above 0", penalty)
        rule = f"at least 0 and at most max_tokens ({self.max_tokens})"
        _require(0 <= self.min_tokens <= longest, "min_tokens", rule, self.min_tokens)
        allowed, rule = self.allowed_token_ids, "token ids, one at least"
        _require(allowed is None or len(allowed) > 0, "allowed_token_ids", rule, allowed)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def describe(self) -> str:
        """Describes the sampling in a few words.

        >>> SamplingParams(temperature=0).describe(), SamplingParams(top_p=0.9).describe()
        ('temperature 0 (greedy)', 'temperature 1, top_p 0.9')
        """
        if self.temperature == 0:
            parts = ["temperature 0 (greedy)"]
        else:
            parts = [f"temperature {self.temperature:g}"]
            parts += [f"top_p {self.top_p:g}"] if self.top_p < 1 else []
            parts += [f"top_k {self.top_k}"] if self.top_k > 0 else []
            parts += [f"min_p {self.min_p:g}"] if self.min_p > 0 else []
        penalty = self.repetition_penalty
        return ", ".join(parts + ([f"repetition_penalty {penalty:g}"] if penalty != 1 else []))


_CHECKS = [
    (field.name, "None" in str(field.type), _KINDS[str(field.type).removesuffix(" | None")])
    for field in fields(SamplingParams)
]
"""For each field: its name, whether it may be None, and what else it takes."""


def _require(holds: object, name: str, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{name} must be {rule}, not {value!r:.100}")


@dataclass(frozen=True)
class SamplingArgs:
    """Defaults from the command line or a server's settings, for requests without their own."""

    max_tokens: int | None = setting(
        None,
        "most tokens (512 in `radixcache chat`, else the model's, or 16)",
        metavar="N",
    )
    temperature: float | None = setting(None, "0 is greedy", metavar="T")
    top_p: float | None = setting(None, "likeliest tokens that add up to P", metavar="P")
    top_k: int | None = setting(None, "the K likeliest tokens", metavar="K")
    repetition_penalty: float | None = setting(None, "above 1, words come again less", metavar="X")
