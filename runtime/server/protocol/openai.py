"""Bodies of OpenAI's API, with vLLM's names for fields that it adds.

A field that would change the answer is never ignored: an unsupported one is refused (see
`unsupported.py`), and so is an unknown one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, cast

from pydantic import AfterValidator, Field, model_validator

from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.protocol.fields import (
    MAX_LOGPROBS,
    MAX_SHOWN_IDS,
    MAX_STOPS,
    Allowed,
    Flag,
    List,
    LogitBias,
    MaxTokens,
    PrefixName,
    Salt,
    SomeItems,
    Stop,
    StrictModel,
    Temperature,
    Text,
    TokenIds,
    TopK,
    TopP,
    Unsupported,
    check_stop,
)
from radixcache.runtime.server.protocol.response_format import StructuredFields
from radixcache.runtime.server.protocol.tools import ChatMessage, ToolFields
from radixcache.runtime.server.protocol.turn import Thinking, Turn
from radixcache.runtime.server.protocol.unsupported import (
    HARMLESS,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
)
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.tokens import TokensLike


class StreamOptions(StrictModel):
    harmless = frozenset({"include_obfuscation"})

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = Field(
        None, description="With include_usage, every chunk has the usage so far, as in vLLM."
    )
    include_progress: Flag | None = Field(
        None,
        description="Until the first token, send chunks without choices that say how many prompt "
        "tokens are computed.",
    )


_SAMPLING = {field.name for field in fields(SamplingParams)} - {"logprobs", "structured_outputs"}
"""The fields that have their name in `SamplingParams`."""


class GenerationRequest(StructuredFields, StrictModel):
    """The fields of both chat and plain completions; None is the model's own default."""

    harmless: ClassVar[frozenset[str]] = HARMLESS

    model: Text | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None

    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: Flag | None = None

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: LogitBias | None = None
    bad_words: Annotated[List[Text], AfterValidator(check_stop)] | None = None
    allowed_token_ids: Allowed | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None

    cache_salt: Salt | None = Field(
        None, description="Cached prefixes are shared only among requests with the same salt."
    )
    prefix: PrefixName | None = Field(
        None, description="Name of a pinned prefix that goes before the prompt."
    )
    ends_conversation: Flag | None = Field(
        None, description="No later prompt goes on from this one: what it alone uses may go first."
    )

    explain: Flag | None = Field(
        None, description="Say in `radixcache.explanation` why prompt tokens were not cached."
    )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)

    def sampling_params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The sampling parameters, with `defaults` for what is not given; `InvalidRequest` if a
        value makes no sense."""
        given = {name: value for name, value in self if name in _SAMPLING and value is not None}
        return replace(defaults, structured_outputs=self.structured(), **{**given, **more})

    @model_validator(mode="after")
    def _streams_have_their_own(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are only for streams: set stream to true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed: set stream to false")
        return self


class CompletionRequest(GenerationRequest):
    refused: ClassVar[Mapping[str, Unsupported]] = REFUSED_IN_COMPLETIONS

    prompt: Text | List[Text] | TokenIds | List[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Flag | None = None
    add_special_tokens: Flag | None = Field(
        None, description="False leaves out tokens that the model wants around a text, such as BOS."
    )
    best_of: int | None = Field(None, description="Must equal n.")

    def sampling_params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        scored = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        if scored and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs or 0
        return super().sampling_params(defaults, logprobs=self.logprobs, **more)

    @property
    def prompts(self) -> list[str | TokenIds]:
        match self.prompt:
            case [str() | list(), *_] as many:
                return cast(list[str | TokenIds], many)
            case one:
                return [cast(str | TokenIds, one)]

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported: ask for n answers and choose")
        if self.echo and self.prefix is not None:
            raise ValueError("a prefix cannot be echoed")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise ValueError("echo with logprobs has the prompt's: leave prompt_logprobs out")
        return self


class ChatRequest(GenerationRequest, ToolFields):
    refused: ClassVar[Mapping[str, Unsupported]] = REFUSED_IN_CHAT

    messages: SomeItems[ChatMessage]
    max_completion_tokens: MaxTokens | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def turn(self, defaults: SamplingParams) -> Turn:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        limits = (self.max_completion_tokens, self.max_tokens, defaults.max_tokens)
        limit = next((one for one in limits if one is not None), None)
        return Turn.of(
            self,
            [message.plain() for message in self.messages],
            self.sampling_params(defaults, logprobs=logprobs, max_tokens=limit),
            template_kwargs=self.chat_template_kwargs or {},
            thinking=Thinking(self.reasoning_effort, place="reasoning_effort"),
            continue_final=bool(self.continue_final_message),
            ask=self.add_generation_prompt is not False,
            prefix=self.prefix,
        )

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class PromptOrMessages(StrictModel):
    prompt: Text | TokenIds | None = None
    messages: SomeItems[ChatMessage] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> PromptOrMessages:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self


class PrefixRequest(PromptOrMessages):
    """POST /v1/prefixes: either `prompt` or `messages`."""

    name: PrefixName
    lifetime: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds until the prefix is unpinned; null is never."
    )
    cache_salt: Salt | None = None

    def encode(self, tokenizer: Tokenizer) -> TokensLike:
        """The prefix's tokens; `tokenizer` is not used if they are given."""
        if self.messages is not None:
            text = tokenizer.render_chat([m.plain() for m in self.messages], ask=False)
            return tokenizer.encode(text, special=False)
        return tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt or []


class ExplainRequest(ToolFields, PromptOrMessages):
    """POST /v1/explain: either `prompt` or `messages`, and other fields that the prompt depends on.

    All other fields of a chat or a completion are allowed, and change nothing.
    """

    harmless: ClassVar[frozenset[str]] = HARMLESS | frozenset(
        {**ChatRequest.model_fields, **CompletionRequest.model_fields}
    )
    refused: ClassVar[Mapping[str, Unsupported]] = {
        **REFUSED_IN_COMPLETIONS,
        **REFUSED_IN_CHAT,
    }
    model: Text | None = None
    add_special_tokens: Flag | None = None
    cache_salt: Salt | None = None
    prefix: PrefixName | None = None

    @property
    def request(self) -> ChatRequest | CompletionRequest:
        """The request whose prompt is explained, with the fields that the prompt depends on."""
        kind = CompletionRequest if self.messages is None else ChatRequest
        names = self.model_fields_set & kind.model_fields.keys()
        return kind.model_construct(**{name: getattr(self, name) for name in names})


class TokenizeRequest(PromptOrMessages):
    """POST /tokenize: either `prompt` or `messages`."""

    model: Text | None = None
    prompt: Text | None = None
    add_special_tokens: Flag = True
    return_token_strs: Flag = False


class DetokenizeRequest(StrictModel):
    model: Text | None = None
    tokens: Annotated[TokenIds, Field(max_length=MAX_SHOWN_IDS)]
