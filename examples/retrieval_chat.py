"""A chat over a folder of documents, with one model in one process that embeds and answers.

    .venv/bin/python examples/retrieval_chat.py [FOLDER]

Every line of the folder's .md and .txt files is a passage. A language model has no vectors that it
was trained for, but the row from which it would name the subject of a text compares well: all
passages end in the same words. An embedding model (`LLM("Qwen/Qwen3-Embedding-0.6B")`) takes them
as they are, and the question with `instruction=`.
"""

import sys
from pathlib import Path

import numpy as np

from radixcache import LLM

ABOUT, FOUND = "\nThis is about", 3

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
files = sorted([*folder.glob("*.md"), *folder.glob("*.txt")])
lines = [line for file in files for line in file.read_text().splitlines() if line.strip()]
heads = [line for line in lines if line.startswith(("| ID", "|--"))]  # a table needs its head
passages = [line for line in lines if line not in heads]

llm = LLM(kv_cache_memory_bytes="32MiB")  # the bundled model, which knows tables of people
vectors = np.stack([one.embedding for one in llm.embed([text + ABOUT for text in passages])])

print("cached  computed  question, answer")
for question in (
    "What is the occupation of Petra Novak?",
    "How old is Mei Tanaka?",
    "How old is Mei Tanaka?",
):
    (asked,) = llm.embed(question + ABOUT)
    best = sorted(np.argsort(-(vectors @ asked.embedding))[:FOUND])  # in the documents' order
    system = "\n".join([*heads, *(passages[at] for at in best)])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    (output,) = llm.chat(messages)
    cached = asked.num_cached_tokens + output.num_cached_tokens
    computed = asked.prefilled_tokens + output.metrics.prefilled_tokens
    print(f"{cached:6}  {computed:8}  {question}\n{'':18}{output.outputs[0].text}")

again = llm.embed([text + ABOUT for text in passages])
print(f"\nEmbedding all {len(passages)} passages again computed", end=" ")
print(f"{sum(one.prefilled_tokens for one in again)} tokens.")
