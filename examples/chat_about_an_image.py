"""A conversation about an image: only its first question runs the vision tower.

    .venv/bin/python examples/chat_about_an_image.py MODEL IMAGE

MODEL is a folder or a name of the hub, such as Qwen/Qwen3-VL-2B-Instruct. The second question finds
the image in the cache, and so does a new conversation, since what differs comes behind the image (a
model with windows or recurrent layers may compute its tokens again, from the image's kept rows).
"""

import sys

from radixcache import LLM, Chat, RequestOutput, SamplingParams

if len(sys.argv) != 3:
    sys.exit("Say which model and which image: chat_about_an_image.py MODEL IMAGE")
llm = LLM(sys.argv[1], kv_cache_memory_bytes="256MiB")
params = SamplingParams(temperature=0, max_tokens=64)


def show(question: str, output: RequestOutput) -> None:
    prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens
    encoded, _, _ = llm.images.counts
    print(f"{prompt:6} {cached:7} {encoded:8}  {question}\n{'':25}{output.outputs[0].text}")


def about_the_image(question: str) -> list[dict[str, object]]:
    return [{"type": "image", "image": sys.argv[2]}, {"type": "text", "text": question}]


print("prompt  cached  encoded  question, answer")
chat = Chat(llm)
show("What is it?", chat.ask(about_the_image("What is it?"), params))
show("And in one word?", chat.ask("And in one word?", params))
show("Which colours has it?", Chat(llm).ask(about_the_image("Which colours has it?"), params))
