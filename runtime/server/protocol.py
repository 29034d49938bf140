"""Requests and responses as OpenAI's API has them, with vLLM's names for what it adds.

Unknown fields are ignored. Known ones that would change the answer but are not supported are
refused, unless they say what is done anyway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from radixcache.runtime.engine.explain import Reason
from radixcache.runtime.engine.sampling import SamplingParams

MAX_LOGPROBS = 20
MAX_STOPS = 64
"""Stop strings of a request, and stop tokens: each is looked for in every step."""
MAX_STOP_LENGTH = 4096
"""Characters of all stop strings of a request."""

T = TypeVar("T")


def _check_text(text: str) -> str:
    """JSON can say half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode: half of a surrogate pair") from None
    return text


def _check_stop(stop: str | list[str] | None) -> str | list[str] | None:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOPS or sum(map(len, strings)) > MAX_STOP_LENGTH:
        raise ValueError(f"at most {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters together")
    return stop


def _decode_header(text: str) -> str:
    """A header that is UTF-8, although it was read as Latin-1."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        raise ValueError("not UTF-8") from None


Text = Annotated[str, AfterValidator(_check_text)]
# An error for each item of a large body would take gigabytes, and all clients would wait for it.
List = Annotated[list[T], Field(fail_fast=True)]
TokenIds = List[Annotated[int, Field(ge=0, lt=2**31)]]
Salt = Annotated[Text, Field(min_length=1, max_length=512)]
HeaderSalt = Annotated[str, AfterValidator(_decode_header), Field(min_length=1, max_length=512)]
PrefixName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class _Model(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


# Requests.


class TextPart(_Model):
    """A part of a message's content; text is the only kind there is."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Model):
    """A message of a conversation."""

    role: Annotated[Text, Field(min_length=1)]
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Not supported."
    )
    content: Text | List[TextPart]

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it; parts are joined by line breaks."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": self.role, "content": content}


class StreamOptions(_Model):
    """What a stream has besides the text."""

    include_usage: bool | None = None


class ResponseFormat(_Model):
    """The form of the answer; only free text is supported."""

    type: Literal["text"]


class GenerationRequest(_Model):
    """What chat and plain completions have in common. None is the model's own default."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Text | List[Text] | None, AfterValidator(_check_stop)] = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None

    cache_salt: Salt | None = Field(
        None, description="Cached prefixes are shared only among requests with the same salt."
    )
    prefix: PrefixName | None = Field(
        None, description="Name of a pinned prefix that the prompt goes on from."
    )

    explain: bool | None = Field(
        None, description="Say in `radixcache.explanation` why prompt tokens were not cached."
    )

    frequency_penalty: Literal[0] | None = Field(None, description="Not supported.")
    presence_penalty: Literal[0] | None = Field(None, description="Not supported.")
    repetition_penalty: Literal[1] | None = Field(None, description="Not supported.")
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(
        None, description="Not supported."
    )
    min_tokens: Literal[0] | None = Field(None, description="Not supported.")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """Sampling as asked for, and else as in `defaults`.

        Raises:
            InvalidRequest: a value makes no sense.
        """
        names = (
            *("n", "max_tokens", "temperature", "top_p", "seed", "stop"),
            *("top_k", "min_p", "stop_token_ids", "ignore_eos"),
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(defaults, **{**given, **more})

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are only for streams: set stream to true")
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Text | List[Text] | TokenIds | List[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Literal[""] | None = Field(None, description="Not supported.")
    best_of: int | None = Field(None, description="Must equal n.")

    @property
    def prompts(self) -> list[str | TokenIds]:
        """The prompts, one at least."""
        match self.prompt:
            case [str() | list(), *_] as many:
                return cast(list[str | TokenIds], many)
            case one:
                return [cast(str | TokenIds, one)]

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported: it must equal n")
        if self.echo and self.prefix is not None:
            raise ValueError("a prefix cannot be echoed")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, unless the prompt is echoed")
        return self


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[List[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Not supported."
    )
    tool_choice: Literal["none", "auto"] | None = Field(None, description="Not supported.")
    functions: Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="Not supported."
    )
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(
        None, description="Not supported."
    )

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class PrefixRequest(_Model):
    """POST /v1/prefixes: either `prompt` or `messages`."""

    name: PrefixName
    prompt: Text | TokenIds | None = None
    messages: Annotated[List[ChatMessage], Field(min_length=1)] | None = None
    lifetime: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds until it is unpinned by itself; null is never."
    )
    cache_salt: Salt | None = None

    @model_validator(mode="after")
    def _one_source(self) -> PrefixRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a prefix is either a prompt or messages")
        return self


class TokenizeRequest(_Model):
    """POST /tokenize: either `prompt` or `messages`."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[List[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either a prompt or messages are tokenised")
        return self


class DetokenizeRequest(_Model):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


# Responses.


class PromptTokensDetails(_Model):
    """How many of the prompt's tokens were not computed."""

    cached_tokens: int


class Usage(_Model):
    """Tokens of a request, over all its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(_Model):
    """Log-probabilities of a plain completion; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Model):
    """A plain completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class MissedTokens(_Model):
    """Prompt tokens [start, end) that were not cached, why, and that in a sentence."""

    reason: Reason
    start: int
    end: int
    text: str


class Extension(_Model):
    """What OpenAI's answers have no field for.

    Attributes:
        ttft: seconds from the request's arrival to its first token.
        explanation: of each prompt in turn, if it was asked for.
    """

    ttft: float | None
    explanation: list[MissedTokens] | None = None


class Completion(_Model):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    radixcache: Extension


class TokenLogprob(_Model):
    """A token and its log-probability; `bytes` is null where the token alone is no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """A token of an answer, and the likeliest in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Model):
    """Log-probabilities of an answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(_Model):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Model):
    """One answer of those that were asked for."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(_Model):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    radixcache: Extension


class ModelCard(_Model):
    """A name under which the model is served; `exact` if it was started with `--exact`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["radixcache"] = "radixcache"
    max_model_len: int
    exact: bool


class ModelList(_Model):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Prefix(_Model):
    """A pinned prefix; `expires_in` in seconds, null for never."""

    object: Literal["prefix"] = "prefix"
    name: str
    num_tokens: int
    salted: bool
    expires_in: float | None


class PrefixList(_Model):
    """The pinned prefixes of a salt, oldest first, and the pages that they hold and may hold."""

    object: Literal["list"] = "list"
    data: list[Prefix]
    pinned_pages: int
    budget_pages: int


class CachePrefix(Prefix):
    """A pinned prefix, and which salt's it is, as in `CacheNamespace`."""

    namespace: str | None


class CachePrefixList(_Model):
    """The pinned prefixes of all salts, oldest first, and the pages that they hold and may hold."""

    object: Literal["list"] = "list"
    data: list[CachePrefix]
    pinned_pages: int
    budget_pages: int


class DeletedPrefix(_Model):
    """The answer to a DELETE of a pinned prefix."""

    name: str
    object: Literal["prefix"] = "prefix"
    deleted: Literal[True] = True


class CacheNode(_Model):
    """A node of the tree; see `radixcache.snapshot.CachedNode`."""

    id: str
    start: int
    num_tokens: int
    text: str
    age: int
    leases: int
    pins: list[str]
    pinned: bool
    num_hidden: int
    children: list[CacheNode]


class CacheNamespace(_Model):
    """The tree of the requests with one salt; `namespace` is a digest of it, keyed by the process,
    null without a salt."""

    namespace: str | None
    tree: CacheNode


class CacheStatistics(_Model):
    """Counters since the last flush, and pages now."""

    requests: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float
    evicted_tokens: int
    evicted_pages: int
    copied_pages: int
    pages: int
    free_pages: int
    pinned_pages: int
    page_size: int
    running: int
    waiting: int


class RecentRequest(_Model):
    """What a request hit, and how long it waited for its first token, in seconds."""

    prompt_tokens: int
    cached_tokens: int
    ttft: float


class CacheView(_Model):
    """The answer of GET /v1/cache; `recent` has the last requests, oldest first."""

    kind: str
    stats: CacheStatistics
    namespaces: list[CacheNamespace]
    recent: list[RecentRequest]


class Flushed(_Model):
    """The answer of POST /v1/cache/flush."""

    flushed: Literal[True] = True


class Tokenized(_Model):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: list[str] | None = None


class Detokenized(_Model):
    """The answer of /detokenize."""

    prompt: str


class Health(_Model):
    """The answer of /health."""

    status: Literal["ok"] = "ok"


class ErrorBody(_Model):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Model):
    """The answer to whatever cannot be served."""

    error: ErrorBody
