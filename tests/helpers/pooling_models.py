"""Tiny random checkpoints that embed or score, as Qwen3's and sentence-transformers' are written,
and what transformers makes of their texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import (
    AddedToken,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.helpers.models import EOS, tiny_model

YES, NO = 258, 259
JUDGE_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
PAIR_TEMPLATE = (
    "I: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('find') }} "
    "Q: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
    "D: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}!"
)


def embedding_model(folder: Path, pooling: Any = None, **options: Any) -> Path:
    """As Qwen3-Embedding is: tied, names without "model.", and EOS behind each text."""
    tiny_model("qwen3", folder, tie_word_embeddings=True, **options)
    stored = load_file(folder / "model.safetensors")
    stored.pop("lm_head.weight", None)
    named = {name.removeprefix("model."): x for name, x in stored.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = processors.TemplateProcessing("$A </s>", "$A $B </s>", [("</s>", EOS)])
    tokenizer.backend_tokenizer.post_processor = ends
    tokenizer.save_pretrained(folder)
    write_modules(
        folder, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    )
    (folder / "1_Pooling").mkdir()
    said = pooling or {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(said))
    return folder


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    written = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(written))


def judging_model(folder: Path, template: str = JUDGE_TEMPLATE, **options: Any) -> Path:
    """A language model with a token for yes and one for no."""
    tiny_model("qwen3", folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("yes", "no")])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def classifying_model(folder: Path, labels: int = 1) -> Path:
    """As a reward model is: a head of `labels` behind the last token."""
    judging_model(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=labels, pad_token_id=0
    )
    torch.nn.init.normal_(model.score.weight, 0, 0.2)
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def rows(folder: Path, tokens: list[list[int]]) -> list[Any]:
    """Each text's last row behind the last norm, by transformers, text by text."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    return [model(torch.tensor([ids])).last_hidden_state[0, -1].double().numpy() for ids in tokens]


def normalized(row: Any, dimensions: int | None = None) -> Any:
    """sentence-transformers' rule."""
    return row[:dimensions] / np.linalg.norm(row[:dimensions])


@torch.inference_mode()
def probabilities_of_yes(folder: Path, tokens: list[list[int]]) -> list[float]:
    """softmax(no, yes)[yes] of the next token, as Qwen3-Reranker's card has it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = [model(torch.tensor([ids])).logits[0, -1, [NO, YES]] for ids in tokens]
    return [float(pair.double().softmax(0)[1]) for pair in logits]
