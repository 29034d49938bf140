"""A conversation about a document: each turn computes only what is new.

    .venv/bin/python examples/chat_over_a_document.py

The first question is computed together with the document. Every later turn finds the document and
all that was said since in the cache, and prefills its own words. The last question edits the one
before it: a fork of the conversation asks other words, and only what follows the last token that
both questions have in common is computed.
"""

from pathlib import Path

from radixcache import LLM, Chat, RequestOutput

DOCUMENT = (Path(__file__).parent / "people.md").read_text()


def show(question: str, output: RequestOutput) -> None:
    prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
    print(f"{prompt:6} {cached:7} {output.metrics.prefilled_tokens:10}  {question}")
    print(f"{'':27}{output.outputs[0].text}")


llm = LLM(kv_cache_memory_bytes="32MiB")  # the bundled model
chat = Chat(llm, system=DOCUMENT)

print("prompt  cached  prefilled  question, answer")
for question in (
    "What is the occupation of Petra Novak?",
    "And the email?",
    "How old is Mei Tanaka?",
):
    before = chat.fork()
    show(question, chat.ask(question))

edited = "How old is Milo Rossi?"
show(f"{edited} (edited)", before.ask(edited))

stats = llm.cache.stats
print(
    f"\n{stats.hit_tokens:,} of {stats.query_tokens:,} prompt tokens came from the cache: each turn"
)
print("sent the whole conversation and computed only what was new in it.")
