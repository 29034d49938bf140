"""A model that says what a script tells it to: for all that lies between a client and an engine.

It speaks as Qwen3 does: turns in ChatML, tools and their calls in Hermes' format, thoughts between
`<think>` and `</think>`; in the bundled model's vocabulary and a few tokens more. Its KV is the
tokens themselves, and what it says next it works out from the tokens that its pages hold: a page
that is wrong shows as an answer that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

from radixcache import LLM
from radixcache.kernels.attention import LayerKind, PagedBatch
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.engine import build
from radixcache.runtime.model.generation import GenerationDefaults
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.paged_model import PagedModel
from tests.helpers.hash_model import read_rows

Script = Callable[[str], str | list[str]]
"""The text of a prompt, special tokens included, to the answer, `<tool_call>` and all; or to
several: the model says the first of them that it is let."""

START, END = "<|im_start|>", "<|im_end|>"
_ASKS = f"{START}assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"

_CERTAIN = 40.0
"""The logit of what comes next in the script, halved for each way to go on that is as good but for
a grammar; of tokens that say nothing, from 0 to 1."""
_CLOSING = ['"', "}", "]", "</tool_call>"]
"""What a guided answer that has left its script says, where its grammar lets it."""

CHAT_TEMPLATE = """\
{%- macro calls(message) -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '\\n' if message.content or not loop.first -}}
    {{- '<tool_call>\\n{"name": ' ~ call.function.name | tojson -}}
    {{- ', "arguments": ' ~ call.function.arguments | tojson ~ '}\\n</tool_call>' -}}
  {%- endfor -%}
{%- endmacro -%}
{%- set first = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if first or tools -%}
  {{- '<|im_start|>system\\n' ~ (first.content if first else '') -}}
  {%- if tools -%}
    {{- '\\n\\n# Tools\\n<tools>' -}}
    {%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor -%}
    {{- '\\n</tools>\\nCall one as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if first else messages) -%}
  {%- if message.role == 'tool' -%}
    {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user' -}}
    {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
    {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') ~ calls(message) -}}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def scripted_llm(script: Script, template: str = CHAT_TEMPLATE, **options: Any) -> LLM:
    """An `LLM` named "scripted" whose chat answers are `script`'s; `options` are those of `LLM`.

    The script is asked once for each prompt: the text up to where the assistant's last message
    begins. What has been said of the answer so far is not in it.
    """
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "scripted"
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        (folder / "model.safetensors").touch()
        model = ScriptedModel(tokenizer, script)
        with mock.patch.object(build, "load", return_value=model):
            return LLM(folder, **{"kv_cache_memory_bytes": "4MiB", **options})


def call(name: str, /, **arguments: Any) -> str:
    """The text of a tool call."""
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{told}\n</tool_call>"


def turns(prompt: str) -> list[tuple[str, str]]:
    """The (role, text) of each message of a prompt; tool results are in a user's message."""
    messages = (turn.split("\n", 1) for turn in prompt.split(START)[1:])
    return [(role, text.removesuffix("\n").removesuffix(END)) for role, text in messages]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The bundled model's, with the added tokens of Qwen3.

    Without those of its own for pieces of JSON: no grammar lets an added token stand for one.
    """
    state = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    state["added_tokens"] = [t for t in state["added_tokens"] if '"' not in t["content"]]
    backend = Tokenizer.from_str(json.dumps(state))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    turn_ends = [AddedToken(text, normalized=False, special=True) for text in (START, END)]
    names = ("think", "tool_call", "tool_response")
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    tokenizer.add_tokens([*turn_ends, *(AddedToken(t, normalized=False) for t in tags)])
    tokenizer.eos_token = END
    tokenizer.model_max_length = 1 << 20
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class ScriptedModel(PagedModel):
    """A `PagedModel` whose logits are all but certain of a script's next token."""

    layers_by = "a script"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script) -> None:
        end: Any = tokenizer.convert_tokens_to_ids(END)
        super().__init__(
            "qwen3",
            GenerationDefaults(eos_token_id=end, max_new_tokens=1024),
            torch.float32,
            torch.device("cpu"),
            [LayerKind(query_heads=1, kv_heads=1, head_dim=1, value_dim=1, scale=1.0)],
            vocab_size=len(tokenizer),
            max_context=1 << 16,
            eos_token_id=end,
            attention=TorchAttention(),
        )
        self.script = script
        self._tokenizer, self._end = tokenizer, end
        self._asks, self._no_thought = self._encode(_ASKS), self._encode(_NO_THOUGHT)
        self._closing = [i for text in _CLOSING for i in self._encode(text)]
        self._known: dict[bytes, list[list[int]]] = {}
        self._unsaid = np.random.default_rng(0).random(self.vocab_size).astype(np.float32)

    def forward(
        self,
        token_ids: NDArray[np.integer],
        batch: PagedBatch,
        logit_rows: NDArray[np.integer],
        pool: KVPool,
        states: object = (),
        unread: object = None,
        pooled: torch.Tensor | None = None,
        *images: object,
        **more: object,
    ) -> torch.Tensor:
        assert pooled is None, "it has words and no rows"
        keys, values = (pages.numpy()[..., 0, 0] for pages in pool.layers[0])
        for pages in (keys, values):  # whole numbers, which float32 holds; 0 is never written
            pages.reshape(-1)[batch.slots()] = np.asarray(token_ids) + 1
        logits = np.repeat(self._unsaid[None], len(logit_rows), 0)
        rows = [read_rows(batch, logit_rows, pages) for pages in (keys, values)]
        for out, tokens, same in zip(logits, *rows, strict=True):
            assert tokens.all() and (tokens == same).all(), "KV that nobody wrote for this row"
            self._say(tokens.astype(np.int32) - 1, out)
        return torch.from_numpy(logits)

    def _logits(self, *_: Any) -> torch.Tensor:
        raise NotImplementedError("`forward` is a scripted model's own")

    def _say(self, tokens: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Put the logits after these tokens into `out`; unasked, it says nothing."""
        prompt, said = self._split(tokens)
        answers = self._answers(prompt) if prompt is not None else [[]]
        ways = [token for answer in answers for token in self._next(answer, said)]
        if not ways:  # a grammar has led it away: what it wants is an end
            ways = [self._end]
            out[self._closing] += _CERTAIN / 2
        for rank, token in enumerate(dict.fromkeys(ways)):
            out[token] = _CERTAIN * 0.5**rank

    def _next(self, answer: list[int], said: list[int]) -> list[int]:
        """How an answer goes on after what was said of it; nothing, if it was another one."""
        if answer[: len(said)] == said:
            rest = answer[len(said) :]
        else:
            left = self._left(self._decode(answer), self._decode(said))
            if left is None:
                return []
            rest = self._encode(left)
        ways = [rest]
        if self._decode(rest[:1])[:1].isspace():  # which a grammar may not want
            ways.append(self._encode(self._decode(rest).lstrip()))
        return [[*way, self._end][0] for way in ways]

    def _split(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32] | None, list[int]]:
        """The tokens of a prompt that asks for an answer, and those of the answer so far."""
        starts = np.flatnonzero(tokens == self._asks[0])
        at = int(starts[-1]) + len(self._asks) if len(starts) else 0
        if not at or tokens[at - len(self._asks) : at].tolist() != self._asks:
            return None, []
        said = tokens[at:].tolist()
        if said[: len(self._no_thought)] == self._no_thought:
            at += len(self._no_thought)
        return tokens[:at], tokens[at:].tolist()

    def _answers(self, prompt: NDArray[np.int32]) -> list[list[int]]:
        key = prompt.tobytes()
        if key not in self._known:
            told = self.script(self._decode(prompt.tolist()))
            texts = [told] if isinstance(told, str) else told
            self._known[key] = [self._encode(text) for text in texts]
        return self._known[key]

    @staticmethod
    def _left(answer: str, said: str) -> str | None:
        """What is left to say, whatever the spaces in what was said; or None."""
        if answer.startswith(said):
            return answer[len(said) :]
        at = 0
        for character in "".join(said.split()):
            while answer[at : at + 1].isspace():
                at += 1
            if answer[at : at + 1] != character:
                return None
            at += 1
        return answer[at:].lstrip() if said[-1:].isspace() else answer[at:]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        return text
