"""Turns prompts and parameters into the engine's inputs: token ids and compiled grammars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeGuard, cast

import numpy as np

from radixcache.errors import InvalidRequest
from radixcache.runtime.multimodal.image import PlacedImage
from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.tokens.conversation import Conversations
from radixcache.runtime.tokens.history import TokenHistory, TokenisedText
from radixcache.runtime.tokens.tokenizer import Message, Tokenizer
from radixcache.tokens import Tokens, TokensLike, as_tokens

if TYPE_CHECKING:  # imports torch, which a router does without
    from radixcache.runtime.multimodal.images import Images
    from radixcache.runtime.sampling.grammar import CompiledGrammar, GrammarBackend


class TokensPrompt(TypedDict, total=False):
    """A prompt that is tokenised already, or a text, as vLLM has them; images are in
    `multi_modal_data["image"]`, and the text has the model's placeholder for each."""

    prompt_token_ids: TokensLike
    prompt: str
    multi_modal_data: Mapping[str, Any]


Prompt = str | TokensPrompt | TokensLike | TokenisedText
Prompts = str | TokensPrompt | Tokens | Sequence[Prompt | int]
"""One prompt or several; token ids alone are one."""

_WITH_IMAGES = {"prompt", "multi_modal_data"}


class EngineInput(NamedTuple):
    """A prompt in tokens, and its parameters."""

    text: str | None
    tokens: TokensLike
    params: SamplingParams
    grammar: CompiledGrammar | None = None
    """Compiled; while this holds it, the engine finds it at once."""
    images: Sequence[PlacedImage] = ()


class InputProcessor:
    """Tokenises and checks on the caller's thread: a long text delays no other request.

    Args:
        default_params: used for prompts without parameters.
        images: what the model makes of images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        grammar_backend: GrammarBackend,
        default_params: SamplingParams,
        images: Images,
    ) -> None:
        self._tokenizer = tokenizer
        self._grammar_backend = grammar_backend
        self._default_params, self._images = default_params, images
        self.conversations: Conversations | None = None
        if tokenizer is not None:
            self.conversations = Conversations(TokenHistory(tokenizer), images)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `InvalidRequest` if it has none."""
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: give token ids")
        return self._tokenizer

    @property
    def turns(self) -> Conversations:
        """Tokenises conversations; `InvalidRequest` if the model has no tokenizer."""
        _ = self.tokenizer
        assert self.conversations is not None
        return self.conversations

    def encode(self, prompt: Prompt, *, special: bool = True) -> TokensLike:
        """See `LLM.encode`."""
        kind = type(prompt).__name__
        if isinstance(prompt, TokenisedText):
            return prompt.tokens
        if isinstance(prompt, dict):
            given = {key: value for key, value in prompt.items() if value is not None}
            kind = f"a dict of {', '.join(map(repr, given)) or 'nothing'}"
            if given.keys() - {"prompt"} == {"prompt_token_ids"}:
                return cast(TokensLike, given["prompt_token_ids"])
            if given.get("multi_modal_data"):
                raise InvalidRequest(
                    "images go with a 'prompt' that is a text, not with token ids, and not into a "
                    "pinned prefix"
                )
            if given.keys() == {"prompt"}:
                prompt, kind = cast(Prompt, given["prompt"]), type(given["prompt"]).__name__
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=special)
        if isinstance(prompt, Sequence | np.ndarray):
            return cast(TokensLike, prompt)
        raise InvalidRequest(
            "a prompt is a string or token ids, also as {'prompt': ...} or "
            f"{{'prompt_token_ids': [...]}}, not {kind}"
        )

    def encode_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        special: bool = True,
        cache_salt: str | None = None,
    ) -> EngineInput:
        """The input of one prompt, whose images are known by its salt."""
        if isinstance(prompt, TokenisedText):
            return EngineInput(None, prompt.tokens, params, images=prompt.images)
        given = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        text = given if isinstance(given, str) else None
        if text is not None and isinstance(prompt, dict) and prompt.get("multi_modal_data"):
            if more := [key for key in prompt.keys() - _WITH_IMAGES if prompt.get(key) is not None]:
                raise InvalidRequest(f"a prompt with images has no {min(more)!r} here")
            return self._with_images(text, prompt["multi_modal_data"], params, special, cache_salt)
        return EngineInput(text, self.encode(prompt, special=special), params)

    def _with_images(
        self,
        text: str,
        media: Mapping[str, Any],
        params: SamplingParams,
        special: bool,
        cache_salt: str | None,
    ) -> EngineInput:
        if not isinstance(media, Mapping) or media.keys() != {"image"}:
            raise InvalidRequest('multi_modal_data is {"image": an image, or a list of them}')
        given = media["image"]
        if isinstance(given, list | tuple) and not given:
            return EngineInput(text, self.encode(text, special=special), params)
        several = given if isinstance(given, list | tuple) else [given]
        images = self._images.prepare(several, cache_salt)
        written = self._images.write(text, images)
        tokens = as_tokens(self.encode(written, special=special))
        return EngineInput(text, tokens, params, images=self._images.place(tokens, images))

    def process(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        special: bool = True,
        cache_salt: str | None = None,
    ) -> list[EngineInput]:
        """The inputs of prompts; `special` as in `encode`, `cache_salt` as in `encode_one`.

        Raises:
            InvalidRequest: any of them is unusable.
        """
        many = as_prompts(prompts)
        if isinstance(params, Sequence) and not isinstance(params, str):
            if len(params) != len(many):
                raise InvalidRequest(f"{len(params)} parameters for {len(many)} prompts")
            each = list(params)
        else:
            each = [self._default_params if params is None else params] * len(many)
        inputs: list[EngineInput] = []
        for prompt, one in zip(many, each, strict=True):
            with naming_prompt(len(inputs), len(many)):
                check_params(one)
                if one.stop_strings and self._tokenizer is None:
                    raise InvalidRequest("stop strings need a tokenizer, and this model has none")
                structured = one.structured_outputs
                grammar = None if structured is None else self._grammar_backend.compile(structured)
                given = self.encode_one(prompt, one, special, cache_salt)
                inputs.append(given._replace(grammar=grammar))
        return inputs

    def render(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        cache_salt: str | None,
        **how: Any,
    ) -> list[TokenisedText]:
        """The prompts of conversations; `how` as in `Tokenizer.render_chat`."""
        many = (
            [messages] if is_conversation(messages) else cast(Sequence[Sequence[Message]], messages)
        )
        return [self.turns.encode(one, cache_salt, **how) for one in many]

    def remember(self, prompts: list[TokenisedText], outputs: list[RequestOutput]) -> None:
        """Remember answers, so that conversations go on with the same tokens."""
        for prompt, output in zip(prompts, outputs, strict=True):
            for completion in output.outputs:
                self.turns.remember(prompt, completion.token_ids)


def is_conversation(given: object) -> TypeGuard[Sequence[Message]]:
    """Whether something is the messages of one conversation."""
    return isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)


@contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """Name the prompt in errors, if there are several."""
    try:
        yield
    except InvalidRequest as error:
        where = f"prompt {index}: " if count > 1 else ""
        raise type(error)(f"{where}{error}") from None


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """The prompts in a list; token ids alone are one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"prompts are strings, token ids or dicts, not {type(prompts).__name__}"
        )
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "iu":
        return [prompts] if len(prompts) else []
    many = cast(list[Prompt], list(prompts))
    if many and isinstance(many[0], int | np.integer):
        return [cast(TokensLike, many)]
    return many


def check_params(params: object) -> None:
    """Raise `InvalidRequest` for anything but sampling parameters."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(
            f"sampling_params are SamplingParams, not {type(params).__name__}: say, for example, "
            "SamplingParams(temperature=0, max_tokens=64)"
        )
