"""lm-eval, with the server's own tokenizer: scores and texts are those of `LLM`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.evaluation import QUESTIONS, task

KINDS = "multiple_choice", "generate_until"


@pytest.mark.parametrize("tokenized", [True, False])
def test_scores_and_texts_are_those_of_the_runtime(
    served: dict[str, Any], tmp_path: Path, monkeypatch: Any, tokenized: bool
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lm_eval = pytest.importorskip("lm_eval")
    file = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": q, "choices": c}) for q, c in QUESTIONS]
    file.write_text("\n".join(lines), encoding="utf-8")
    arguments = {
        "model": "tabletalk",
        "base_url": f"{served['bundled']}/v1/completions",
        "tokenizer_backend": "auto",
        "tokenized_requests": tokenized,
        "max_length": 2048,
    }
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[task(kind, str(file)) for kind in KINDS],
        bootstrap_iters=0,
    )["samples"]
    for sample in found["multiple_choice"]:
        own = served["scores"][sample["doc_id"]]
        for ((told, is_greedy),), wanted in zip(sample["resps"], own, strict=True):
            assert [pytest.approx(told, abs=1e-3), is_greedy] == wanted
    texts = {sample["doc_id"]: sample["resps"][0][0] for sample in found["generate_until"]}
    assert [text for _, text in sorted(texts.items())] == served["texts"]
