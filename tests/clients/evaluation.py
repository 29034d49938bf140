"""A task of lm-eval: which answer is likelier, and what is said. Read by the server's side, too."""

from __future__ import annotations

from typing import Any

TABLE = "| Name | Age |\n|---|---|\n| Mei Tanaka | 64 |\n| Milo Rossi | 56 |\n"
QUESTIONS = [
    (f"{TABLE}Question: How old is {name}? Your answer:", [f"The age of {name} is {age}.", other])
    for name, age, other in [
        ("Mei Tanaka", 64, "I do not know 🙂"),
        ("Milo Rossi", 56, "Zoë says 漢字."),
        ("Mei Tanaka", 56, "The age of Milo Rossi is 56."),
    ]
]
STOP = "."
MAX_TOKENS = 24


def task(kind: str, file: str) -> dict[str, Any]:
    """The configuration of a task over a file of {"question", "choices"}."""
    common = {
        "task": kind,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": file}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "output_type": kind,
    }
    if kind == "multiple_choice":
        more: dict[str, Any] = {"doc_to_choice": "{{choices}}", "doc_to_target": 0}
        return {**common, **more, "metric_list": [{"metric": "acc"}]}
    generation = {"until": [STOP], "max_gen_toks": MAX_TOKENS, "temperature": 0}
    more = {"doc_to_target": "{{choices[0]}}", "generation_kwargs": generation}
    return {**common, **more, "metric_list": [{"metric": "exact_match"}]}
