"""The stock OpenAI client against the server: usage says how much of a prompt was cached.

    make serve                                      # in another terminal
    .venv/bin/pip install openai
    .venv/bin/python examples/openai_client.py      # an address other than port 8000 may follow

The client sends the whole conversation with every turn, as all OpenAI clients do. The server
answers the second turn from what it has kept of the first.
"""

import sys
from pathlib import Path

from openai import APIConnectionError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

DOCUMENT = (Path(__file__).parent / "people.md").read_text()
address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

client = OpenAI(base_url=f"{address}/v1", api_key="none")
try:
    client.with_options(max_retries=0).models.list()
except APIConnectionError:
    sys.exit(f"There is no server at {address}: start `make serve` in another terminal.")
messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": DOCUMENT}]

for question in ("Which country is Omar Haddad from?", "What about Nina Wolf?"):
    messages.append({"role": "user", "content": question})
    answer = ""
    print(f"{question}\n  ", end="")
    stream = client.chat.completions.create(
        model="tabletalk", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices:
            text = chunk.choices[0].delta.content or ""
            answer += text
            print(text, end="", flush=True)
        if chunk.usage and (details := chunk.usage.prompt_tokens_details):  # in the last chunk
            print(f"\n  {details.cached_tokens} of {chunk.usage.prompt_tokens} tokens were cached")
    messages.append({"role": "assistant", "content": answer})

print(f"\nOpen {address} in a browser to see the tree that this conversation has left.")
