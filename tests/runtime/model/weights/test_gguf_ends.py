"""Answers of a GGUF file's model end where the file says so in any way."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.model.gguf.config import generation_config_of
from tests.helpers.gguf.files import gguf_bytes

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def ends(path: Any, rows: list[tuple[str, int]], **keys: Any) -> list[str]:
    """The texts of the tokens that end an answer; the first is the file's `eos_token_id`."""
    told = {"tokens": [text for text, _ in rows], "token_type": [kind for _, kind in rows]}
    keys = {f"tokenizer.{key.replace('__', '.')}": value for key, value in keys.items()}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in told.items()} | keys
    path.write_bytes(gguf_bytes({"tokenizer.ggml.eos_token_id": 0, **metadata}))
    found = generation_config_of(GGUFFile(path)).eos_token_id
    return [rows[token][0] for token in found]


@pytest.mark.parametrize(
    ("rows", "template", "added"),
    [
        ([("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)], None, ["<|im_end|>"]),
        ([("<|eot_id|>", CONTROL), ("<|eom_id|>", CONTROL)], None, ["<|eot_id|>", "<|eom_id|>"]),
        ([("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL)], None, ["<end_of_turn>"]),
        (
            [("<|end_of_text|>", CONTROL), ("<|end|>", CONTROL)],
            None,
            ["<|end_of_text|>", "<|end|>"],
        ),
        # What only the template says.
        ([("<|fin|>", CONTROL)], CHATML.replace("<|im_end|>", " <|fin|>"), ["<|fin|>"]),
        ([("<|im_end|>", USER_DEFINED)], CHATML, ["<|im_end|>"]),
        ([("[/A", CONTROL), ("[/A]", CONTROL)], CHATML.replace("<|im_end|>", "[/A]"), ["[/A]"]),
        ([("</s>", NORMAL), ("[END]", CONTROL)], CHATML.replace("<|im_end|>", "[END]"), ["[END]"]),
        # What ends nothing.
        ([("<|im_end|>", NORMAL)], CHATML, []),
        ([("<|im_end|>", USER_DEFINED)], None, []),
        ([("<|im_start|>", CONTROL), ("<|user|>", CONTROL)], None, []),
        ([("[/A]", CONTROL)], CHATML.replace("<|im_end|>", "\n[/A"), []),
        ([("<|im_end|>", USER_DEFINED)], "{{ raise_exception('no') }}" + CHATML, []),
        ([("<|im_end|>", USER_DEFINED)], "{% for %}", []),
        ([("<|im_end|>", USER_DEFINED)], "{{ messages | length }}", []),
        ([("", CONTROL)], "{{ messages[1].content }}", []),
    ],
)
def test_answers_end_with(tmp_path, caplog, rows, template, added):
    caplog.set_level(logging.INFO, "radixcache")
    keys = {} if template is None else {"chat_template": template}
    found = ends(tmp_path / "model.gguf", [("<|base|>", CONTROL), *rows], **keys)
    assert found == ["<|base|>", *added]
    assert [", ".join(added) in record.message for record in caplog.records] == [True] * bool(added)


def test_ids_that_a_file_names_come_first_and_once(tmp_path):
    rows = [("<|base|>", CONTROL), ("<|im_end|>", CONTROL), ("<|eot|>", CONTROL)]
    keys = {"ggml__eot_token_id": 2, "ggml__eom_token_id": 1, "chat_template": CHATML}
    assert ends(tmp_path / "model.gguf", rows, **keys) == ["<|base|>", "<|eot|>", "<|im_end|>"]


def test_the_template_is_given_the_texts_of_its_tokens(tmp_path):
    template = "{{ bos_token }}{{ messages[1].content }}{{ eos_token }}"
    rows = [("[E]", CONTROL), ("[B]", CONTROL)]
    keys = {"ggml__bos_token_id": 1, "chat_template": template}
    assert ends(tmp_path / "model.gguf", rows, **keys) == ["[E]"]
