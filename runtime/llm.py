"""The embedded runtime: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from radixcache.base import PrefixCache, TokensLike, as_tokens
from radixcache.errors import InvalidRequest
from radixcache.hash_block import HashBlockCache
from radixcache.none import NoCache
from radixcache.pages import PagePool
from radixcache.radix import RadixCache
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.explain import Explainer, Explanation
from radixcache.runtime.engine.outputs import RequestOutput
from radixcache.runtime.engine.request import Request
from radixcache.runtime.engine.request import Sequence as Completion
from radixcache.runtime.engine.sampling import SamplingParams
from radixcache.runtime.engine.scheduler import Policy, Scheduler
from radixcache.runtime.model.decode_graphs import bytes_beside_pages
from radixcache.runtime.model.kv_pool import count_pages
from radixcache.runtime.model.load import load_model
from radixcache.runtime.prefixes import NamedPrefix, NamedPrefixes
from radixcache.runtime.text.history import TokenHistory
from radixcache.runtime.text.tokenizer import Tokenizer

BUNDLED_MODEL = Path(__file__).parent / "tabletalk"
"""The model that is used if none is named: it answers questions about tables of people."""

CACHES: dict[str, type[RadixCache] | type[HashBlockCache] | type[NoCache]] = {
    "radix": RadixCache,
    "hash-block": HashBlockCache,
    "none": NoCache,
}


class TokensPrompt(TypedDict):
    """A prompt that is tokenised already."""

    prompt_token_ids: TokensLike


Prompt = str | TokensPrompt
Message = dict[str, str]
"""A chat message: {"role": "user", "content": "..."}."""


class LLM:
    """A model with a prefix cache.

    >>> llm = LLM()  # doctest: +SKIP
    >>> llm.generate("...", SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP

    Args:
        model: a folder or hub id of any causal language model that transformers loads and that can
            run over KV pages; None is the bundled `tabletalk`.
        cache: "radix" (token-exact radix tree), "hash-block" (vLLM's prefix caching, whole blocks
            only) or "none".
        page_size: tokens per KV page.
        block_size: the same by the name it has in hash-block caching; it stands if both are given.
        dtype: "auto" is float32 on a CPU, the checkpoint's on a GPU.
        device: "auto" takes a GPU if there is one.
        kv_memory: bytes for KV pages, as a number or like "2GB" or "512MiB"; the default is a
            quarter of a CPU's free memory, 1 GiB at most, or most of a GPU's.
        max_num_batched_tokens: tokens per step; longer prompts are prefilled in chunks.
        max_num_seqs: sequences that run at the same time.
        schedule: "longest-prefix" or "fcfs".
        seed: of the sampling noise.

    Raises:
        ModelError: no such model, or one that would be silently wrong over pages.
        InvalidRequest: an argument makes no sense.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        cache: Literal["radix", "hash-block", "none"] = "radix",
        page_size: int = 16,
        block_size: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        kv_memory: int | str | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        schedule: Policy = "longest-prefix",
        seed: int = 0,
    ) -> None:
        _check_choice("cache", cache, tuple(CACHES))
        _check_choice("schedule", schedule, ("longest-prefix", "fcfs"))
        page_size = page_size if block_size is None else block_size
        for name, value in (
            ("page_size", page_size),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_num_seqs", max_num_seqs),
        ):
            if value < 1:
                raise InvalidRequest(f"{name} must be at least 1, not {value!r}")
        path = str(model if model is not None else BUNDLED_MODEL)
        paged = load_model(path, dtype=dtype, device=device)
        page_bytes = paged.bytes_per_token * page_size
        taken = bytes_beside_pages(paged, page_size, max_num_seqs)
        num_pages = count_pages(kv_memory, page_bytes, paged.device, taken)
        if kv_memory is None:  # more than every sequence at full context is never used
            most = (paged.max_context // page_size + 2) * max_num_seqs * 4
            num_pages = min(num_pages, most)
        prefix_cache = CACHES[cache](PagePool(num_pages, page_size))
        self.tokenizer = Tokenizer.load(path)
        self.engine = Engine(
            paged,
            paged.allocate(num_pages, page_size),
            prefix_cache,
            Scheduler(prefix_cache, max_num_batched_tokens, max_num_seqs, schedule),
            self.tokenizer.decode if self.tokenizer else None,
            seed,
        )
        self.engine.capture_graphs()
        self.explainer = Explainer(prefix_cache)
        self.engine.scheduler.on_publish = self._before_publish
        self.prefixes = NamedPrefixes(self.engine)
        self.model_name = Path(path).name
        self.default_params = _default_params(paged.generation_config)

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache: statistics, pins, `match`, `reset`."""
        return self.engine.cache

    @cached_property
    def history(self) -> TokenHistory:
        """Tokenises conversations; `InvalidRequest` if the model has no tokenizer."""
        return TokenHistory(self._need_tokenizer())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, batched continuously; outputs come in the order of the prompts.

        Args:
            prompts: strings, or dicts with "prompt_token_ids".
            sampling_params: one for all or one for each; by default the model's own settings.
            prefix: name of a pinned prefix of this salt that each prompt goes on from; see
                `pin_prefix`.
            cache_salt: requests share cached prefixes only within the same salt.
            use_tqdm: show a progress bar for more than one prompt.

        Raises:
            InvalidRequest: any prompt is unusable; then none is run.
            PinError: no prefix of that name and salt is pinned.
        """
        requests = self.add_requests(prompts, sampling_params, cache_salt, prefix)
        return self._run_all(requests, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Complete one prompt, yielding its state after every token.

        Closing the iterator before its end aborts the request.
        """
        stream = self._stream(self.add_requests(prompt, sampling_params, cache_salt, prefix)[0])
        next(stream)  # closing a generator that has not begun would abort nothing
        return cast(Generator[RequestOutput, None, None], stream)

    def explain(
        self, prompt: Prompt, *, prefix: str | None = None, cache_salt: str | None = None
    ) -> Explanation:
        """Why `prompt`, sent now, would not be cached in full; print it. Changes nothing.

        It may show texts that other prompts have put into the cache: it is for whoever runs the
        engine. See `radixcache.runtime.engine.explain`.

        Raises:
            InvalidRequest: the prompt is unusable.
            PinError: no prefix of that name and salt is pinned.
        """
        tokens = as_tokens(self._encode_after(prefix, prompt, cache_salt))
        if not len(tokens):
            raise InvalidRequest("the prompt is empty")
        hit = self.cache.match(tokens, cache_salt)
        misses = self.explainer.explain(tokens, hit, cache_salt)
        decode = self.tokenizer.decode if self.tokenizer else None
        return Explanation(len(tokens), hit, misses, decode)

    def pin_prefix(
        self,
        name: str,
        prompt: Prompt,
        *,
        lifetime: float | None = None,
        cache_salt: str | None = None,
    ) -> NamedPrefix:
        """Compute the KV of `prompt` and keep it until `unpin_prefix`, or for `lifetime` seconds.

        `generate(..., prefix=name)` with the same salt goes on from it; so does any prompt that
        begins with it. `llm.prefixes.list()` tells what is pinned. The prefixes of a salt, or of
        none, may hold `llm.cache.pin_share` pages: a quarter of all, and all together half.

        Raises:
            PinError: the salt has that name, or there are too few pages left to pin.
            InvalidRequest: the prompt is unusable.
        """
        return self.prefixes.pin(
            name, self.encode(prompt), lifetime=lifetime, cache_salt=cache_salt
        )

    def unpin_prefix(self, name: str, *, cache_salt: str | None = None) -> None:
        """Let a pinned prefix be evicted like any other; `PinError` if it is unknown."""
        self.prefixes.unpin(name, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template.

        A conversation that goes on from an earlier one, answers included, reuses its tokens.
        """
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = cast(Sequence[Sequence[Message]], [messages] if single else messages)
        render = self.history.tokenizer.render_chat
        texts = [self.history.encode(render(one), cache_salt) for one in conversations]
        prompts: list[Prompt] = [{"prompt_token_ids": text.tokens} for text in texts]
        outputs = self.generate(prompts, sampling_params, cache_salt=cache_salt, use_tqdm=use_tqdm)
        for text, output in zip(texts, outputs, strict=True):
            for completion in output.outputs:
                self.history.remember(text, completion.token_ids)
        return outputs

    def _before_publish(self, sequence: Completion, num_tokens: int) -> None:
        """Explain a request when it is admitted, and remember what is computed of it."""
        request, lease = sequence.request, sequence.lease
        if request.explanation is None and lease is not None:
            request.explanation = self.explainer.observe(
                sequence.tokens, lease.num_tokens, request.namespace
            )
        self.explainer.remember(sequence.tokens[:num_tokens], request.namespace)

    def encode(self, prompt: Prompt) -> TokensLike:
        """The token ids of a prompt.

        Raises:
            InvalidRequest: it is neither text nor token ids, or the model has no tokenizer.
        """
        if isinstance(prompt, str):
            return self._need_tokenizer().encode(prompt)
        if not isinstance(prompt, dict) or "prompt_token_ids" not in prompt:
            kind = type(prompt).__name__
            raise InvalidRequest(
                f"a prompt is a string or {{'prompt_token_ids': [...]}}, not {kind}"
            )
        return prompt["prompt_token_ids"]

    def _encode_after(
        self, prefix: str | None, prompt: Prompt, cache_salt: str | None
    ) -> TokensLike:
        if prefix is None:
            return self.encode(prompt)
        own: TokensLike
        if isinstance(prompt, str):
            own = self._need_tokenizer().encode(prompt, special=False)
        else:
            own = self.encode(prompt)
        return self.prefixes.extend(prefix, own, cache_salt)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.model_name} has no tokenizer: give prompt_token_ids")
        return self.tokenizer

    def add_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
        prefix: str | None = None,
    ) -> list[Request]:
        """Queue one request for each prompt, or none if any of them is unusable.

        For callers that run `engine.step` themselves; errors are those of `generate`.
        """
        many = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        if isinstance(params, Sequence):
            if len(params) != len(many):
                raise InvalidRequest(f"{len(params)} parameters for {len(many)} prompts")
            each = list(params)
        else:
            each = [params or self.default_params] * len(many)
        requests: list[Request] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                text = prompt if isinstance(prompt, str) else None
                if one.stop_strings and self.tokenizer is None:
                    raise InvalidRequest("stop strings need a tokenizer, and this model has none")
                tokens = self._encode_after(prefix, prompt, cache_salt)
                request = self.engine.add_request(tokens, one, prompt=text, namespace=cache_salt)
                requests.append(request)
        except BaseException as error:
            for request in requests:
                self.engine.abort(request)
            if not isinstance(error, InvalidRequest):
                raise
            where = f"prompt {len(requests)}: " if len(many) > 1 else ""
            raise type(error)(f"{where}{error}") from None
        return requests

    def _run_all(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        bar = tqdm(
            total=len(requests),
            desc="Prompts",
            unit="prompt",
            disable=not use_tqdm or len(requests) < 2,
            leave=False,
        )
        try:
            open_requests = set(requests)
            with bar:
                while open_requests:
                    done = {r for r in self.engine.step() if r.finished} & open_requests
                    bar.update(len(done))
                    open_requests -= done
        finally:
            for request in requests:
                self.engine.abort(request)
        return [request.output() for request in requests]

    def _stream(self, request: Request) -> Generator[RequestOutput | None, None, None]:
        try:
            yield None
            finished = False
            while not finished:  # also if the request ended in a step that somebody else ran
                if request.finished or request in self.engine.step():
                    finished = request.finished
                    yield request.output()
        finally:
            self.engine.abort(request)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _default_params(config: Any) -> SamplingParams:
    """Sampling as the model's generation_config.json asks for it."""
    sampling = bool(getattr(config, "do_sample", False))

    def setting(name: str, default: Any) -> Any:
        value = getattr(config, name, None)
        return default if value is None or not sampling else value

    return SamplingParams(
        temperature=float(setting("temperature", 1.0 if sampling else 0.0)),
        top_p=float(setting("top_p", 1.0)),
        top_k=int(setting("top_k", 0)),
        min_p=float(setting("min_p", 0.0)),
        max_tokens=getattr(config, "max_new_tokens", None) or 16,
    )
