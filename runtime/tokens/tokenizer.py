"""Converts text to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property, partial
from itertools import groupby
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

from radixcache.errors import ContextExceeded, InvalidRequest, ModelError, first_sentence
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.checkpoints.model_files import find_file, find_gguf, read_settings
from radixcache.runtime.tokens.fast_tokenizer import FastTokenizer, read_folder
from radixcache.runtime.tokens.generic_tools import describe_tools
from radixcache.runtime.tokens.spelling import spelling_of, without_prefix
from radixcache.runtime.tokens.tool_calls import check_tools, for_template, image_parts
from radixcache.runtime.tokens.tool_formats import (
    THINK,
    THOUGHT,
    ToolFormat,
    find_format,
    knows_tools,
)
from radixcache.runtime.tokens.turn_order import RoleOrder

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""A chat message: {"role": "user", "content": "..."}."""

_SHORT = 100_000
"""Length up to which any text is tokenised: spaces may vanish, unknown characters may merge."""

_LIGHT = ("llama", "mistral", "qwen2", "qwen3")

_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model"),
)
"""Every tokenizer has at least one of these files."""

_CONFIG = "tokenizer_config.json"

_ROLES = {"system", "developer", "user", "assistant", "tool"}

_RENDERING = {"conversation", "messages", "tools", "documents", "chat_template", "tokenize"} | {
    *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    "return_assistant_tokens_mask",
}
"""Arguments of `apply_chat_template`, which are no values of a template."""


class Tokenizer:
    """The tokenizer of a model folder or hub id, for any number of threads.

    Args:
        tokenizer: of transformers, or a `FastTokenizer`.
        max_tokens: a text that must have more tokens than this is refused before tokenisation.
    """

    def __init__(self, tokenizer: Any, max_tokens: float = inf) -> None:
        self._tokenizer = tokenizer
        self._max_tokens, self._vocab_size = max_tokens, 2**31
        self._longest = inf  # characters of a token
        self._one_at_a_time: AbstractContextManager[object] = Lock()
        if getattr(tokenizer, "is_fast", False):
            self._longest = max(map(len, tokenizer.get_vocab()), default=1)
            self._one_at_a_time = nullcontext()  # the tokenizers library is thread-safe
            tokenizer.encode("")  # transformers initialises it at the first call
        # For every generated token: transformers' wrapper takes three times as long as decoding.
        self._backend: Any = None
        if _decodes_plainly(tokenizer):
            self._backend = tokenizer.backend_tokenizer
        special = {index: token.content for index, token in self._added.items() if token.special}
        self.hidden = frozenset(index for index in special if special[index] not in self.marks)
        """The special tokens that are not shown as text."""
        self._shows_some = len(self.hidden) < len(special)
        self._token_bytes: dict[int, bytes] = {}
        self._has_told_tools = False

    @classmethod
    def load(cls, name_or_path: str, max_tokens: float = inf) -> Tokenizer | None:
        """The model's tokenizer, None if it has none. Never runs the model's code.

        Raises:
            ModelError: the tokenizer cannot be loaded.
        """
        try:
            if parts := find_gguf(name_or_path):
                found = _read_gguf(parts[0])
                return None if found is None else cls(found, max_tokens)
            if any(find_file(name_or_path, file) for file in _VOCABULARIES):
                return cls(_read(name_or_path), max_tokens)
            if not find_file(name_or_path, _CONFIG):  # transformers would make one up
                return None
            reason = "it has a tokenizer_config.json, and no vocabulary beside it"
        except Exception as error:  # a foreign file may raise anything
            reason = first_sentence(error)
        raise ModelError(f"the tokenizer of {name_or_path} does not load: {reason}")

    def limited(self, max_tokens: int, vocab_size: int | None = None) -> Tokenizer:
        """The same, but for its `max_tokens`; ids from `vocab_size` on stand for images."""
        found = copy(self)
        found._max_tokens, found._vocab_size = max_tokens, vocab_size or found._vocab_size
        return found

    @contextmanager
    def _reading(self, text: str) -> Iterator[None]:
        """Refuses a text that is too long, is no Unicode (as JSON may hold it), or that makes the
        tokenizer fail."""
        if len(text) > max(_SHORT, self._longest * self._max_tokens):
            problem = f"a text of {len(text)} characters cannot fit"
            raise ContextExceeded.of(self._max_tokens, problem)
        try:
            with self._one_at_a_time:
                yield
        except (MemoryError, RecursionError):
            raise
        except BaseException as error:  # the tokenizers library has no exception of its own
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest("the text has half a surrogate pair: no Unicode") from None
            reason = first_sentence(error)
            raise InvalidRequest(f"the model's tokenizer fails on the text: {reason}") from None

    @property
    def serialised(self) -> str | None:
        """The tokenizer as the tokenizers library writes it; None if it is of another library."""
        if not getattr(self._tokenizer, "is_fast", False):
            return None
        text: str = self._tokenizer.backend_tokenizer.to_str()
        return text

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds tokens that the model wants around it, such as BOS.

        Raises:
            InvalidRequest: `text` is no Unicode, or the tokenizer fails on it.
            ContextExceeded: it is longer than `max_tokens` can be.
        """
        with self._reading(text):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode(text, special=False)`, and the characters [start, end) of each token.

        For tokenizers with `delimiters` only.
        """
        with self._reading(text):
            found = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`; `special` keeps special tokens.

        Tokens that mark calls and thoughts are always kept.
        """
        text: str
        if self._shows_some and not special:
            ids, special = [index for index in ids if index not in self.hidden], True
        if self._backend is not None:
            text = self._backend.decode(ids, skip_special_tokens=not special)
            return text
        text = self._tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def show(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; an image is shown as [image]."""
        if max(ids, default=0) < self._vocab_size:
            return self.decode(ids, special=True)
        runs = ((of_image, [*run]) for of_image, run in groupby(ids, self._vocab_size.__le__))
        return "".join(
            "[image]" if of_image else self.decode(run, special=True) for of_image, run in runs
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text, perhaps a part of a character."""
        found = self._token_bytes.get(token)
        if found is None:
            found = self._token_bytes[token] = self._find_bytes(token)
        return found

    def token_text(self, token: int) -> str:
        """The text of one token; U+FFFD stands for a part of a character."""
        return self.token_bytes(token).decode(errors="replace")

    def _find_bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if self._spelling is not None and name is not None:
            return self._spelling(name)
        before = self.encode("a", special=False)[-1:]  # alone, some tokens lose a space
        return self.decode([*before, token], special=True)[len(self.decode(before)) :].encode()

    def vocabulary(self, size: int) -> tuple[list[bytes], list[int]]:
        """The `token_bytes` of `size` tokens by id, and the ids of those that are no text: special
        tokens, added ones like <this>, and ids without a token, which are called <[id]>.

        Raises:
            InvalidRequest: a token's bytes do not follow from its name, or there are more tokens.
        """
        if self._spelling is None:
            raise InvalidRequest(
                "structured output needs a tokenizer of the tokenizers library whose decoder is "
                "byte-level or has a byte fallback, and this model has another"
            )
        backend = self._tokenizer.backend_tokenizer
        names = {index: name for name, index in backend.get_vocab(False).items()}
        names |= {index: backend.id_to_token(index) for index in self.added}  # as they decode
        found = {index: self._spelling(name) for index, name in names.items()}
        if (highest := max(found, default=0)) >= size:
            raise InvalidRequest(
                f"structured output needs a logit for each token: the tokenizer has token "
                f"{highest:,}, and the model has {size:,} logits"
            )
        added = self._added.items()
        special = [i for i, one in added if one.special or re.fullmatch("<.*>", one.content)]
        texts = [found[i] if i in found else b"<[%d]>" % i for i in range(size)]
        return texts, special + [i for i in range(size) if i not in found]

    @cached_property
    def _spelling(self) -> Callable[[str], bytes] | None:
        """The bytes of a token by its name; None if they do not follow from it alone."""
        is_fast = getattr(self._tokenizer, "is_fast", False)
        return spelling_of(self._tokenizer.backend_tokenizer) if is_fast else None

    @cached_property
    def encode_within(self) -> Callable[[str], list[int]]:
        """Token ids of a text within a text: without the space that may be put before a text.

        For tokenizers with a `vocabulary` only.
        """
        added = [token for _, token in sorted(self._added.items())]
        backend = without_prefix(self._tokenizer.backend_tokenizer, added)
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def delimiters(self) -> dict[int, str]:
        """The added tokens before which tokenisation starts afresh: id to text.

        If `b` begins with a delimiter, ``encode(a + b)`` is ``encode(a) + encode(b)`` (without
        `special`): the tokenizers library takes added tokens out of the text, and then normalises
        and splits each piece between them alone. No delimiters are tokens

        - that are found in normalised text, which a normaliser may change at its ends;
        - that take the spaces before them (`lstrip`), or begin with one that `rstrip` could take;
        - that overlap with another added token, so that the text before decides which is found.

        There are none if some token must stand alone as a word (`single_word`), if special tokens
        are split like any text, or if the tokenizer is of another library.
        """
        if not getattr(self._tokenizer, "is_fast", False) or self._tokenizer.split_special_tokens:
            return {}
        backend = self._tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        if any(token.single_word for token in added.values()):
            return {}
        texts = [token.content for token in added.values()]
        tails = {text[at:] for text in texts for at in range(1, len(text))}
        joined = "\0".join(texts)

        def stands_apart(text: str) -> bool:
            """Whether no other token contains it, or ends with its beginning."""
            begins = (text[:length] for length in range(1, len(text) + 1))
            return joined.count(text) == 1 and tails.isdisjoint(begins)

        return {
            index: token.content
            for index, token in added.items()
            if not (token.normalized and backend.normalizer is not None)
            and not token.lstrip
            and not token.content[:1].isspace()
            and stands_apart(token.content)
        }

    @property
    def eos(self) -> int:
        """The token that its own settings call the end of a text; 0 if they call none so."""
        return getattr(self._tokenizer, "eos_token_id", None) or 0

    @property
    def info(self) -> dict[str, Any]:
        """Its description for clients, in transformers' names."""
        plain = self._tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        shown = {name: getattr(plain, name, None) for name in names}
        fast = isinstance(plain, FastTokenizer)
        kind = "TokenizersBackend" if fast else type(plain).__name__
        return {"tokenizer_class": kind, "vocab_size": len(plain), **shown}

    @cached_property
    def added(self) -> dict[int, str]:
        """The texts of the added tokens, by id."""
        return {index: token.content for index, token in self._added.items()}

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(getattr(self._tokenizer, "added_tokens_decoder", {}))

    def chat_template(self, tools: bool = False) -> str:
        """The chat template; a model may have another one for chats with tools."""
        if not self._templates:
            raise InvalidRequest(
                "the model has no chat template: complete a text, by generate or /v1/completions"
            )
        template: str = self._tokenizer.get_chat_template(tools=tools or None)
        return template

    def has_roles(self, *roles: str) -> bool:
        """Whether a chat template compares a message's role with all of these."""
        compared = r"\brole\W[^{{%}}]{{0,20}}['\"]{}['\"]"
        return all(re.search(compared.format(role), self._templates) for role in roles)

    @property
    def _templates(self) -> str:
        """All chat templates; "" if there are none."""
        templates = getattr(self._tokenizer, "chat_template", None) or ""
        return templates if isinstance(templates, str) else "\n".join(templates.values())

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls, if its chat template shows it."""
        return find_format(self._templates)

    @cached_property
    def marks(self) -> frozenset[str]:
        """The texts that mark calls and thoughts."""
        calls = self.tool_format
        return frozenset((THINK, THOUGHT)) | (calls.marks if calls else frozenset())

    @cached_property
    def reasons(self) -> bool:
        """Whether the model thinks before it answers."""
        return THOUGHT in self._templates

    @cached_property
    def _order(self) -> RoleOrder:
        """Which orders of roles the chat template takes."""
        return RoleOrder.find(partial(self._tokenizer.apply_chat_template, tokenize=False))

    @cached_property
    def _added_texts(self) -> tuple[dict[str, int], re.Pattern[str]]:
        """The added tokens by text, and a pattern that finds them, the longest first."""
        added = {text: index for index, text in self.added.items()}
        marks = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        return added, re.compile(f"({marks})")

    def spell(self, text: str) -> str:
        """`text` in Lark for llguidance, with added tokens as tokens."""
        added, marks = self._added_texts
        parts = [part for part in marks.split(text) if part]
        return " ".join(
            f"<[{added[part]}]>" if part in added else json.dumps(part, ensure_ascii=False)
            for part in parts or [""]
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        ask: bool = True,
        continue_final: bool = False,
        with_images: bool = False,
    ) -> str:
        """The text of a conversation, by the model's chat template.

        Args:
            tools: functions in OpenAI's format.
            template_kwargs: more values for the template.
            ask: end by asking for the assistant's next message.
            continue_final: end within the last message instead, so that it goes on.
            with_images: messages may have images, for which the template writes placeholders.

        Raises:
            InvalidRequest: there is no template, or it refuses the messages or the values.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest("a chat message has a 'role' and a 'content'")
        if not with_images and image_parts(messages):
            raise InvalidRequest("only text can be in these messages, and there are images")
        check_tools(tools)
        conversation = [for_template(message) for message in messages]
        template, values = self.chat_template(bool(tools)), dict(template_kwargs or {})
        if not knows_tools(self._templates):
            if tools and not self._has_told_tools:
                self._has_told_tools = True
                log.warning(
                    "the chat template of this model knows no tools: they are described in the "
                    f"{'system' if self._order.system else 'user'} message, and calls are read in "
                    "Hermes' form"
                )
            conversation, tools = describe_tools(conversation, tools), ()
        others = {message.get("role") for message in conversation} - _ROLES
        if not others:  # else the order is that of roles which only this template knows
            conversation = self._order.arrange(conversation)
        for role in others:
            # Some templates drop messages of unknown roles, and some write any role.
            if f"'{role}'" not in template and f'"{role}"' not in template:
                raise InvalidRequest(
                    f"no role is called {role!r}: say system, user, assistant or tool"
                )
        wanted = {"tools": tools, **values}
        wanted["tool_calls"] = any("tool_calls" in message for message in conversation)
        for name, value in wanted.items():
            if not value and name not in values:
                continue
            if name not in template or not re.search(rf"\b{re.escape(name)}\b", template):
                raise InvalidRequest(f"the chat template of this model takes no {name}")
        if taken := values.keys() & _RENDERING:
            raise InvalidRequest(f"{min(taken)} is no value of a chat template")
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation,
                tools=[*tools] or None,
                tokenize=False,
                add_generation_prompt=ask and not continue_final,
                continue_final_message=continue_final,
                **values,
            )
        except Exception as error:  # a template may raise anything
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return text


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether its class decodes as the tokenizers library does."""
    if isinstance(tokenizer, FastTokenizer):
        return True
    from transformers import PreTrainedTokenizerFast

    return getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode


def _read_gguf(path: str) -> Any:
    """The tokenizer in a GGUF file, None if there is none."""
    from radixcache.runtime.tokens.gguf_tokenizer import read_tokenizer

    file = GGUFFile(path)
    if file.get("tokenizer.ggml.model", str, "none") in ("none", "no_vocab"):
        return None
    return read_tokenizer(file)


def _read(name_or_path: str) -> Any:
    """The tokenizer that transformers' AutoTokenizer loads, by itself where that is the same.

    AutoTokenizer imports the class of the model's config, which may import nearly all of
    transformers and dominate the start. For `_LIGHT` families, a stand-in config with their name is
    enough; for two of them, a generic tokenizer class is used as it is.
    """
    settings = read_settings(name_or_path)
    if settings is None:
        from transformers import PreTrainedConfig

        settings, _ = PreTrainedConfig.get_config_dict(name_or_path, trust_remote_code=False)
    if not isinstance(settings, dict):
        raise ValueError("its config is no dictionary")
    file, family = find_file(name_or_path, _CONFIG), settings.get("model_type")
    declared = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    named = declared.get("tokenizer_class")
    plain = named in ("PreTrainedTokenizerFast", "TokenizersBackend")
    plain = plain and family in ("llama", "qwen3")
    if plain and (found := read_folder(Path(name_or_path), declared)) is not None:
        return found
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    if plain:
        return PreTrainedTokenizerFast.from_pretrained(name_or_path, trust_remote_code=False)
    from transformers import AutoTokenizer

    read = partial(AutoTokenizer.from_pretrained, name_or_path, trust_remote_code=False)
    if named is None or "auto_map" in declared or family not in _LIGHT:
        return read()
    config: Any = PreTrainedConfig()
    config.name_or_path, config.model_type = name_or_path, family
    return read(config=config)
