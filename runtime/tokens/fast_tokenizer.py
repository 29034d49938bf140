"""A tokenizer of the tokenizers library, without transformers, which takes a second to import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixcache.runtime.checkpoints import chat_template

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_INERT = {"backend", "clean_up_tokenization_spaces", "is_local", "model_max_length"}
_OTHERS = ("special_tokens_map.json", "added_tokens.json", "chat_template.json")


class FastTokenizer:
    """What `Tokenizer` uses of transformers' `PreTrainedTokenizerFast`, under the same names.

    Args:
        backend: the library's own tokenizer, which nothing else uses.
        templates: the chat template, or several by name.
        named: the texts of the tokens with a role, such as `eos_token`; those that the backend
            does not have are added.
    """

    is_fast, split_special_tokens = True, False

    def __init__(
        self, backend: Any, templates: str | dict[str, str] | None, named: Mapping[str, str]
    ) -> None:
        self.backend_tokenizer, self.chat_template, self._named = backend, templates, dict(named)
        from tokenizers import AddedToken

        backend.no_truncation()
        backend.no_padding()
        known = {token.content for token in self.added_tokens_decoder.values()}
        wanted = [text for text in dict.fromkeys(named.values()) if text not in known]
        backend.add_special_tokens([AddedToken(x, normalized=False) for x in wanted])

    def __getattr__(self, name: str) -> str | None:
        if name in _NAMED:
            return self._named.get(name)
        raise AttributeError(name)

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size(True)
        return size

    @property
    def eos_token_id(self) -> int | None:
        eos, token = self._named.get("eos_token"), None
        if eos is not None:
            token = self.backend_tokenizer.token_to_id(eos)
        return token

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self.backend_tokenizer.get_vocab(True)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        name: str | None = self.backend_tokenizer.id_to_token(token)
        return name

    def get_chat_template(self, tools: Any = None) -> str:
        templates = self.chat_template
        if isinstance(templates, dict):
            templates = (tools and templates.get("tool_use")) or templates.get("default")
        if templates is None:
            raise ValueError("the model has no default chat template")
        return templates

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **values: Any,
    ) -> str:
        assert not tokenize
        return chat_template.render(
            self.get_chat_template(tools),
            conversation,
            tools,
            ask=add_generation_prompt,
            continue_final=continue_final_message,
            values={**self._named, **values},
        )


def read_folder(folder: Path, declared: Mapping[str, Any]) -> FastTokenizer | None:
    """The tokenizer of a folder; None if it says more than is known here to make no difference.

    Args:
        declared: what tokenizer_config.json says.
    """
    file, template = folder / "tokenizer.json", folder / "chat_template.jinja"
    if not file.is_file() or any((folder / name).exists() for name in _OTHERS):
        return None
    if (folder / "additional_chat_templates").exists():
        return None
    rest = {
        name: value for name, value in declared.items() if value is not None and name not in _INERT
    }
    rest.pop("tokenizer_class", None)
    named = {name: rest.pop(name) for name in _NAMED if name in rest}
    templates = rest.pop("chat_template", None)
    if template.is_file():
        templates = template.read_text(encoding="utf-8")
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    added = {
        str(index): token.__getstate__()
        for index, token in backend.get_added_tokens_decoder().items()
    }
    again = rest.pop("added_tokens_decoder", {})
    if backend.padding is not None:  # whose token transformers makes the model's
        return None
    if rest or again not in ({}, added) or not isinstance(templates, str | None):
        return None
    special = {token["content"] for token in added.values() if token["special"]}
    if not all(isinstance(text, str) and text in special for text in named.values()):
        return None
    return FastTokenizer(backend, templates, named)
