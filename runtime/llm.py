"""The embedded runtime: prompts in, completions out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import finalize

from radixcache.base import PrefixCache
from radixcache.errors import InvalidRequest
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.engine.build import build_engine, model_path
from radixcache.runtime.engine.input_processor import (
    EngineInput,
    InputProcessor,
    Prompt,
    Prompts,
    is_conversation,
    naming_prompt,
)
from radixcache.runtime.engine.named_prefixes import NamedPrefix, NamedPrefixes
from radixcache.runtime.engine.pooling_inputs import (
    Output,
    Pooled,
    PoolingInputs,
    Texts,
    pooled_outputs,
)
from radixcache.runtime.engine.stream import Stream
from radixcache.runtime.engine.worker import Worker
from radixcache.runtime.explanation import Explanation
from radixcache.runtime.kv_events.publisher import KVEventPublisher
from radixcache.runtime.kv_offload import session
from radixcache.runtime.kv_offload.offload import Offload
from radixcache.runtime.model.host.system_memory import give_back
from radixcache.runtime.multimodal.prompt_images import behind, keys_of
from radixcache.runtime.outputs import (
    EmbeddingOutput,
    RequestOutput,
    ScoringOutput,
)
from radixcache.runtime.request import Request
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.start_notes import start_notes
from radixcache.runtime.tokens.conversation import Conversations, thoughts_of
from radixcache.runtime.tokens.history import TokenHistory
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import check_tools
from radixcache.runtime.tokens.tool_parser import MessageParser
from radixcache.stats import CacheStats
from radixcache.tokens import TokensLike, as_tokens

T = TypeVar("T")


class LLM:
    """A model with a prefix cache, for any number of threads.

    Requests of all threads run together, on the engine's own thread. `close` ends that thread, as
    does the end of a ``with`` block, or of the last reference.

    >>> llm = LLM()  # doctest: +SKIP
    >>> llm.generate("...", SamplingParams(temperature=0))[0].outputs[0].text  # doctest: +SKIP

    Args:
        model: a folder, GGUF file or hub id of any causal language model that transformers loads
            and that can run over KV pages; None is the bundled `tabletalk`.
        settings: the other settings of `EngineArgs`, by name.

    Raises:
        ModelError: there is no such model, or it would be silently wrong over pages, or it is not
            exact.
        InvalidRequest: a setting makes no sense.
    """

    __signature__ = signature(EngineArgs)

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        start = time.perf_counter()
        args = EngineArgs(model, **settings)
        built = build_engine(args)
        self.model_name = Path(model_path(args)).name
        self.engine, self.tokenizer = built.engine, built.tokenizer
        self.grammar_backend, self.default_params = built.grammar_backend, built.default_params
        self.explainer, self.kv_events, self.offload = (
            built.explainer, built.kv_events, built.offload,
        )  # fmt: skip
        self.images = built.images
        self.inputs = InputProcessor(
            self.tokenizer, self.grammar_backend, self.default_params, self.images
        )
        self.pooling_inputs = PoolingInputs(self.engine.model, self.inputs)
        self.prefixes = NamedPrefixes(self.engine)
        after_step = None if self.kv_events is None else self.kv_events.end_step
        self.worker = Worker(self.engine, self.prefixes, after_step)
        self._close = finalize(
            self, _close, self.worker, self.kv_events, self.offload, self.inputs, self.prefixes
        )
        if self.offload is not None and self.offload.disk is not None:
            try:
                session.restore(self.offload.disk, self.inputs.conversations, self._pin)
                self.cache.stats = CacheStats()  # no request has come yet
            except BaseException:
                self.close()  # else the error's traceback would keep the folder locked
                raise
        give_back()  # the memory that only loading needed
        self.load_seconds = time.perf_counter() - start

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache, to read: statistics, pins. Change it through `call` only."""
        return self.engine.cache

    @property
    def notes(self) -> list[str]:
        """Device and kernels, context and KV memory, images, the cost of loading: a line each."""
        kept = [] if self.offload is None else self.offload.describe()
        images = ["takes images"] if self.images.features is not None else []
        return start_notes(self.engine, [*kept, *images], self.load_seconds)

    @property
    def history(self) -> TokenHistory:
        """Tokenises texts; `InvalidRequest` if the model has no tokenizer."""
        return self.turns.history

    @property
    def turns(self) -> Conversations:
        """Tokenises conversations; `InvalidRequest` if the model has no tokenizer."""
        return self.inputs.turns

    def __repr__(self) -> str:
        engine = getattr(self, "engine", None)  # absent during construction, as in a debugger
        return f"LLM({self.model_name}: {engine.model.placement})" if engine else "LLM(not loaded)"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's thread; calls that wait for an answer, and later ones, raise
        `EngineStopped`."""
        self._close()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread between two steps, and return its result.

        Use it for anything of `engine`, `cache` and `prefixes` that this class does not offer.

        Raises:
            EngineStopped: `close` was called.
        """
        return self.worker.call(function).result()

    def reset_prefix_cache(self) -> None:
        """Forget the whole cache, on disk too, and the tokens of conversations; `LeaseError` while
        requests run or prefixes are pinned; `Busy` if the disk could not be emptied."""

        def reset() -> None:
            self.prefixes.drop_yielding()
            self.engine.reset_cache()
            if self.inputs.conversations is not None:
                self.inputs.conversations.clear()

        self.call(reset)
        disk = None if self.offload is None else self.offload.disk
        if disk is not None and disk.cleared is not None:
            from radixcache.runtime.kv_offload.disk import confirm_gone

            confirm_gone(disk.cleared)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, batched continuously; outputs come in the order of the prompts.

        Args:
            prompts: strings, lists of token ids, or dicts with "prompt_token_ids", or with a
                "prompt" and its images, {"image": [...]}, in "multi_modal_data".
            sampling_params: one for all or one for each; by default the model's own settings.
            prefix: name of a pinned prefix of this salt that goes before each prompt; see
                `pin_prefix`.
            cache_salt: requests share cached prefixes only within the same salt.
            use_tqdm: show a progress bar for more than one prompt.

        Raises:
            InvalidRequest: a prompt is unusable; then none is run.
            PinError: no prefix of that name and salt is pinned.
            EngineFailed: the steps of these requests failed twice in a row.
            EngineStopped: `close` was called.
        """
        inputs = self.inputs.process(
            prompts, sampling_params, special=prefix is None, cache_salt=cache_salt
        )
        stream = Stream()
        ended = self.worker.read(stream, partial(self.add, inputs, cache_salt, prefix))
        if use_tqdm and len(inputs) > 1:
            from tqdm import tqdm

            ended = tqdm(ended, total=len(inputs), desc="Prompts", unit="prompt", leave=False)
        for _ in ended:
            pass
        return stream.outputs()

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
        inputs = self.inputs.process(
            [prompt], sampling_params, special=prefix is None, cache_salt=cache_salt
        )
        add = partial(self.add, inputs, cache_salt, prefix)
        return self.worker.read(Stream(every_token=True), add)

    def explain(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        prefix: str | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Explanation:
        """Explain why `prompt`, sent now, would not be cached in full; print it. Changes nothing.

        `prompt` is a prompt of `generate`, or the messages (with `tools`) of `chat`. The result
        may show texts of other prompts: it is for the operator, not for users. See
        `radixcache.runtime.engine.explain`.

        Raises:
            InvalidRequest: the prompt is unusable (`ContextExceeded` if it is too long).
            PinError: no prefix of that name and salt is pinned.
        """
        if is_conversation(prompt):
            if prefix is not None:
                raise InvalidRequest("a prefix goes before text or token ids, not before messages")
            prompt = self.turns.encode(prompt, cache_salt, tools=tools)
        given = self.inputs.encode_one(
            cast(Prompt, prompt),
            self.default_params,
            special=prefix is None,
            cache_salt=cache_salt,
        )
        text = as_tokens(given.tokens)
        decode = self.tokenizer.show if self.tokenizer else None

        def explain() -> Explanation:
            tokens = text if prefix is None else self.prefixes.extend(prefix, text, cache_salt)
            self.engine.check_prompt(tokens)
            images = behind(given.images, len(tokens) - len(text))
            placed = self.engine.place(images, len(tokens)) if images else None
            tokens = keys_of(tokens, images)
            hit = self.engine.match(tokens, cache_salt)
            kv = self.engine.cache.match(tokens, cache_salt)
            misses = self.explainer.explain(tokens, hit, cache_salt, kv, placed)
            return Explanation(len(tokens), hit, misses, decode)

        return self.call(explain)

    def embed(
        self,
        texts: Prompts,
        *,
        dimensions: int | None = None,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Embed texts: the row of each text's last token behind the last norm, of length 1
        unless the checkpoint normalizes none.

        Equal texts have equal vectors; a text that was embedded before costs no forward pass.

        Args:
            texts: as the prompts of `generate`.
            dimensions: of the vectors: the first numbers of rows (Matryoshka); None is all.
            instruction: for queries: "Instruct: {instruction}\\nQuery:" goes before each text.
            cache_salt: as in `generate`.

        Raises:
            InvalidRequest: a text is unusable, or the model embeds none; then none is run.
            EngineFailed, EngineStopped: as in `generate`.
        """
        pooled = self.pooling_inputs.embed(texts, dimensions, instruction)
        return self._pool(pooled, cache_salt)

    def score(
        self,
        query: Texts,
        documents: Texts,
        *,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> list[ScoringOutput]:
        """Score how well documents fit a query, or each its own, from 0 to 1, in their order. What
        the pairs begin with is computed once; else as in `embed`.

        By the checkpoint's classification head, or by the probability of yes against no in the
        prompt of Qwen3-Reranker's model card, with the instruction in it.
        """
        pooled = self.pooling_inputs.score(query, documents, instruction)
        return self._pool(pooled, cache_salt)

    def _pool(self, pooled: Pooled[Output], cache_salt: str | None) -> list[Output]:
        stream = Stream()
        for _ in self.worker.read(stream, partial(self.add, pooled.inputs, cache_salt, pools=True)):
            pass
        return pooled_outputs(pooled, stream)

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
        begins with it. `llm.prefixes.list()` lists them. The prefixes of one salt (or all unsalted
        ones) may hold `llm.cache.pins.share` pages: a quarter of all; those of all salts half.

        Raises:
            PinError: the salt uses the name for another prefix, or too few pages can be pinned.
            InvalidRequest: the prompt is unusable.
        """
        return self._pin(name, prompt, lifetime=lifetime, cache_salt=cache_salt)

    def _pin(
        self,
        name: str,
        prompt: Prompt,
        *,
        lifetime: float | None = None,
        cache_salt: str | None = None,
        messages: list[Message] | None = None,
    ) -> NamedPrefix:
        tokens, stream, prefixes = self.encode(prompt), Stream(), self.prefixes
        prepare = partial(prefixes.prepare, name, tokens, lifetime=lifetime, cache_salt=cache_salt)
        for _ in self.worker.read(stream, lambda: [prepare()]):
            pass
        keep = partial(prefixes.keep, lifetime=lifetime, messages=messages)
        return self.call(lambda: keep(name, stream.requests[0]))

    def unpin_prefix(self, name: str, *, cache_salt: str | None = None) -> None:
        """Unpin a prefix; `PinError` if there is none of that name."""
        self.call(lambda: self.prefixes.unpin(name, cache_salt))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template.

        A conversation that goes on from an earlier one, answers included, reuses its tokens. An
        image is a part {"type": "image", "image": a path, a file's bytes or a PIL image} of a
        message's content.

        Args:
            tools: functions that the model may call, described as in OpenAI's API; `read_message`
                finds the calls in an answer.
            chat_template_kwargs: more values for the template, such as `enable_thinking`.
            add_generation_prompt: ask for the assistant's next message.
            continue_final_message: go on with the last message instead, whatever
                `add_generation_prompt` is.
        """
        texts = self.inputs.render(
            messages,
            cache_salt,
            tools=tools or (),
            template_kwargs=chat_template_kwargs,
            ask=add_generation_prompt,
            continue_final=continue_final_message,
        )
        outputs = self.generate(texts, sampling_params, cache_salt=cache_salt, use_tqdm=use_tqdm)
        self.inputs.remember(texts, outputs)
        return outputs

    def read_message(
        self,
        output: RequestOutput,
        tools: Sequence[Mapping[str, Any]] = (),
        index: int = 0,
        *,
        cache_salt: str | None = None,
    ) -> Message:
        """Parse an output of `chat` into a message to go on from: `content`, and where present
        `reasoning_content` and `tool_calls`, whose `arguments` are a dict.

        Args:
            tools: the tools given to `chat`: some models' calls cannot be read without.
            index: the index of the completion.
            cache_salt: the salt given to `chat`.
        """
        tokenizer, completion = self.inputs.tokenizer, output.outputs[index]
        begun = thoughts_of(tokenizer.decode(output.prompt_token_ids[-8:], special=True))
        check_tools(tools)
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters", {}) for function in functions}
        parser = MessageParser(tokenizer.tool_format, tokenizer.reasons, bool(begun), schemas)
        parser.feed(completion.text, ended=True, cut=completion.finish_reason == "length")
        parsed = parser.message()
        self.turns.keep(parsed, begun + self.history.text_of(completion.token_ids), cache_salt)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [call.as_template() for call in parsed.calls]
        return message

    def encode(self, prompt: Prompt, *, special: bool = True) -> TokensLike:
        """The token ids of a prompt; `special` adds the model's special tokens, such as BOS.

        Raises:
            InvalidRequest: it is neither text nor token ids, or the model has no tokenizer.
        """
        return self.inputs.encode(prompt, special=special)

    def add(
        self,
        inputs: Sequence[EngineInput],
        cache_salt: str | None = None,
        prefix: str | None = None,
        client: Hashable = None,
        pools: bool = False,
    ) -> list[Request]:
        """Queue a request for each input, or none if one is unusable; on the engine's thread.

        Clients share the engine fairly (see `radixcache.runtime.engine.scheduling.fairness`).
        With `pools`, the requests end with rows.
        """
        task = self.engine.model.pooler.pooling.task
        if task is not None and not pools:
            raise InvalidRequest(f"this model was made to {task} texts, and generates none")
        requests: list[Request] = []
        try:
            for text, tokens, params, _, images in inputs:
                with naming_prompt(len(requests), len(inputs)):
                    whole = tokens
                    if prefix is not None:
                        whole = self.prefixes.extend(prefix, tokens, cache_salt)
                    most = params.max_tokens
                    most = self.engine.model.max_context if most is None else most
                    self.prefixes.make_room(len(whole) + most)
                    request = self.engine.add_request(
                        *(whole, params), prompt=text, namespace=cache_salt, client=client,
                        pools=pools, images=behind(images, len(whole) - len(tokens)),
                    )  # fmt: skip
                requests.append(request)
        except BaseException:
            self.worker.discard(requests)
            raise
        return requests


def _close(
    worker: Worker,
    kv_events: KVEventPublisher | None,
    offload: Offload | None,
    inputs: InputProcessor,
    prefixes: NamedPrefixes,
) -> None:
    worker.close()
    if offload is not None:
        offload.close(inputs.conversations, prefixes.notes())
    if kv_events is not None:  # the cache does not change any more
        kv_events.close()
