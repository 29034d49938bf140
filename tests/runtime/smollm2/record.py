"""Records what llama.cpp makes of some prompts with SmolLM2, for `test_smollm2.py`.

    .venv-llama-cpp/bin/python -m tests.runtime.smollm2.record MODEL.gguf

Of each prompt: its tokens, those that follow greedily, and by how much each was the likeliest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("llama_cpp.json")
PROMPTS = (
    "The capital of France is", "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ", "Water boils at", "The three primary colours are",
    "Question: What is 7 times 8?\nAnswer:", "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.", "The Great Wall of China was built", "1, 2, 3, 5, 8, 13,",
    "In 1969, Neil Armstrong", "La capitale de l'Italie est", "Fruits:\n- apple\n- banana\n-",
    "Photosynthesis is the process by which", "SELECT name, age FROM", "The opposite of hot is",
    "Shakespeare wrote", "To bake bread you need flour,", "The sun rises in the east and",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
)  # fmt: skip
LENGTH = 24


def main(path: str) -> None:
    import numpy as np
    from llama_cpp import Llama

    model: Any = Llama(path, n_ctx=256, logits_all=True, verbose=False)
    record = []
    for prompt in PROMPTS:
        tokens = model.tokenize(prompt.encode(), add_bos=False, special=True)
        model.reset()
        model.eval(tokens)
        answer, margins = [], []
        for _ in range(LENGTH):
            logits = model.scores[model.n_tokens - 1]
            second, first = np.argsort(logits)[-2:]
            answer.append(int(first))
            margins.append(round(float(logits[first] - logits[second]), 4))
            model.eval([answer[-1]])
        record.append({"prompt": prompt, "tokens": tokens, "answer": answer, "margins": margins})
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in record)
    RECORD.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
