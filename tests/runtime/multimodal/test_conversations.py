"""Conversations about images: the tokens of transformers' whole model, and of no cache, whatever is
cached, cut into chunks or preempted; another image never hits."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from radixcache import LLM, AsyncLLM, Chat, InvalidRequest, SamplingParams
from radixcache.errors import ModelError
from radixcache.kernels import choose
from radixcache.runtime.multimodal.prompt_images import PromptImages
from radixcache.runtime.multimodal.tower import VisionTower
from tests.helpers.vlm_models import VOCAB_SIZE, write_vlm
from tests.runtime.multimodal.pictures import picture

NEW = 6
ROW = 260  # <|image_pad|>
TEXT = {"type": "text", "text": "What is it?"}
GREEDY = SamplingParams(
    temperature=0, max_tokens=NEW, ignore_eos=True, allowed_token_ids=[*range(256)]
)
NO_TEXT = [*range(256, VOCAB_SIZE)]
"""Tokens that are no bytes: a conversation that goes on would keep those without text."""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "rope_parameters": {
            **ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32,
        }
    },
}  # fmt: skip
FAMILIES = ("qwen3_vl", "qwen3_5", "mistral3", "gemma3", "gemma4", "qwen2_5_vl", "smolvlm")


def step(family: str) -> int:
    """Tokens of a step: few, but an image of Gemma 4, whose rows see each other, in one."""
    return 70 if family == "gemma4" else 16


Conversation = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@cache
def model(folder: Path, family: str) -> Path:
    return write_vlm(folder / family, family, **SETTINGS.get(family, {}))


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    settings = {"page_size": 4, "kv_cache_memory_bytes": "4MB", **settings}
    with LLM(path, **settings) as llm:
        yield llm
        llm.call(llm.engine.check)


class Whole:
    """transformers' whole model, which computes each prompt anew."""

    def __init__(self, path: Path, llm: LLM) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            path, attn_implementation="eager"
        )
        self.llm, self.processor = llm, llm.images._processor._processor
        self._known: dict[Any, list[int]] = {}

    def answer(self, messages: Conversation) -> tuple[list[int], list[int]]:
        """The prompt's tokens and those of the answer."""
        assert self.llm.tokenizer is not None
        images = [p["image"] for m in messages for p in m["content"] if p["type"] == "image"]
        text = self.llm.tokenizer.render_chat(messages, with_images=True)
        given = self.processor(
            text=[text],
            images=images or None,
            return_tensors="pt",
            add_special_tokens=False,
            padding=False,
        )
        prompt = given["input_ids"][0].tolist()
        key = tuple(prompt), tuple(image.tobytes() for image in images)
        if key not in self._known:
            with torch.inference_mode():
                found = self.model.generate(
                    **given, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                    suppress_tokens=NO_TEXT,
                )  # fmt: skip
            self._known[key] = found[0, len(prompt) :].tolist()
        return prompt, self._known[key]


def num_encoded(llm: LLM) -> int:
    assert llm.images.features is not None
    return llm.images.features.num_encoded


def altered(rng: random.Random, image: Image.Image) -> Image.Image:
    """The image, or one that differs by a pixel, or by a row or column of them."""
    kind, (width, height) = rng.randrange(4), image.size
    if kind == 0:
        return image
    if kind == 1:
        return image.resize((width + 1, height))
    if kind == 2:
        return image.resize((width, height - 1))
    copy = image.copy()
    copy.putpixel((rng.randrange(width), rng.randrange(height)), (255, 0, rng.randrange(256)))
    return copy


def say(rng: random.Random, images: list[Image.Image]) -> dict[str, Any]:
    """A user's message of texts and images in any order."""
    texts = [{"type": "text", "text": rng.choice(["Look: ", "What is it?", " and ", "Why "])}]
    content = [{"type": "image", "image": altered(rng, i)} for i in images] + texts
    rng.shuffle(content)
    return {"role": "user", "content": content}


def converse(path: Path, seed: int, count: int, whole: Whole | None, **settings: Any) -> Whole:
    """Several conversations at once, over a few images, each turn compared."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    pool = [picture(*size, numbers) for size in ((48, 64), (80, 40), (56, 56), (33, 96))]
    with engine(path, **settings) as llm, engine(path, cache="none") as plain:
        reference = whole or Whole(path, plain)
        conversations: list[Conversation] = [[] for _ in range(count)]
        for _ in range(3):
            for conversation in conversations:
                number = rng.choice([0, 1, 1, 2]) if conversation else rng.randint(1, 3)
                conversation.append(say(rng, rng.choices(pool, k=number)))
            if rng.random() < 0.3:  # the same text about other images
                twin = [dict(message) for message in rng.choice(conversations)]
                twin[0] = {**twin[0], "content": [
                    {**p, "image": rng.choice(pool)} if p["type"] == "image" else p
                    for p in twin[0]["content"]
                ]}  # fmt: skip
                conversations.append(twin)
            outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
            others = plain.chat(conversations, GREEDY, use_tqdm=False)
            for conversation, output, other in zip(conversations, outputs, others, strict=True):
                prompt, expected = reference.answer(conversation)
                assert output.prompt_token_ids == prompt
                assert output.outputs[0].token_ids == other.outputs[0].token_ids == expected
                # Not the model's, which would be tokenised otherwise than it was generated.
                answer = [{"type": "text", "text": rng.choice(["Yes.", "No, a cat"])}]
                conversation.append({"role": "assistant", "content": answer})
    return reference


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_get_the_tokens_of_the_whole_model(folder: Path, family: str) -> None:
    path = model(folder, family)
    converse(path, 1, 3, None, speculate="auto")
    converse(path, 2, 3, None, max_num_batched_tokens=step(family), kv_cache_memory_bytes="400KB")


OTHERS = ("internvl", "llava", "qwen3_5_moe", "glm4v")
MORE = ("idefics3", "llava_next", "llava_onevision", "qwen2_vl", "qwen3_vl_moe")


@pytest.mark.parametrize(
    "family", [*OTHERS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)]
)
def test_so_they_do_by_other_families(folder: Path, family: str) -> None:
    converse(model(folder, family), 7, 1, None, max_num_batched_tokens=24)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_many_more_conversations(folder: Path, family: str) -> None:
    path = model(folder, family)
    whole: Whole | None = None
    for seed in range(100, 116):
        kept: dict[str, Any] = {"kv_cache_memory_bytes": "400KB"} if seed % 2 else {}
        size = {"page_size": [1, 3, 16][seed % 3], "max_num_batched_tokens": step(family)}
        whole = converse(path, seed, 4, whole, **size, **kept)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4"])
def test_so_they_do_by_the_loop_that_runs_on_a_gpu(
    folder: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernels(dtype: torch.dtype) -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(choose, "make_native", no_kernels)
    converse(model(folder, family), 5, 2, None, max_num_batched_tokens=step(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_about_an_image_computes_its_new_tokens_alone(folder: Path, family: str):
    image = picture(48, 64, 3)
    with engine(model(folder, family)) as llm:
        first = say(random.Random(0), [])
        first["content"].insert(0, {"type": "image", "image": image})
        (output,) = llm.chat([first], GREEDY, use_tqdm=False)
        answer = {"role": "assistant", "content": output.outputs[0].text}
        (again,) = llm.chat([first, answer, say(random.Random(1), [])], GREEDY, use_tqdm=False)
        whole = len(output.prompt_token_ids)
        mark = len("[assistant]")  # before which a recurrent state is saved
        behind = mark if llm.engine.model.state_shapes else 1
        assert again.num_cached_tokens >= whole - behind
        assert num_encoded(llm) == 1
        other = image.copy()
        other.putpixel((9, 9), (1, 2, 3))
        first["content"][0]["image"] = other
        (third,) = llm.chat([first], GREEDY, use_tqdm=False)
        rows = third.prompt_token_ids.index(llm.images._processor.token)
        assert third.num_cached_tokens <= rows < whole / 2
        (salted,) = llm.chat([first], GREEDY, use_tqdm=False, cache_salt="another")
        assert salted.num_cached_tokens == 0
        assert salted.outputs[0].token_ids == third.outputs[0].token_ids
        assert num_encoded(llm) == 3


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_whole_blocks_of_images_are_found_by_what_they_show(folder: Path, family: str) -> None:
    converse(model(folder, family), 6, 2, None, cache="hash-block")


def test_two_users_of_one_image_encode_it_once_and_share_it(folder: Path) -> None:
    image = picture(64, 96, 8)
    message = {"role": "user", "content": [{"type": "image", "image": image}]}
    with engine(model(folder, "qwen3_vl")) as llm, ThreadPoolExecutor(4) as threads:
        ask = partial(llm.chat, [message], GREEDY, use_tqdm=False)
        answers = [future.result()[0] for future in [threads.submit(ask) for _ in range(4)]]
        assert num_encoded(llm) == 1
        assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
        assert llm.cache.stats.hit_tokens >= 3 * (len(answers[0].prompt_token_ids) - 1)
        salted = [threads.submit(ask, cache_salt=salt).result()[0] for salt in "ab"]
        assert [answer.num_cached_tokens for answer in salted] == [0, 0]


def test_a_hit_within_rows_that_see_each_other_ends_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others evict the end of a prompt, token by token."""
    full: Any = {"layer_types": ["full_attention"] * 4}  # with windows, a saved one would end a hit
    path, within = write_vlm(tmp_path / "full", "gemma3", **full), list[int]()
    resume = PromptImages.resume

    def spy(images: PromptImages, position: int) -> int:
        found = resume(images, position)
        within.extend([position] * (found < position))
        return found

    monkeypatch.setattr(PromptImages, "resume", spy)
    shown = [TEXT, {"type": "image", "image": picture(48, 64, 13)}]
    message: dict[str, Any] = {"role": "user", "content": shown}
    with engine(path, page_size=1, kv_cache_memory_bytes="100KB") as llm:
        room, expected = llm.engine.kv_pool.num_pages, None
        for more in range(8, 40):
            (output,) = llm.chat([message], GREEDY, use_tqdm=False)
            expected = expected or output.outputs[0].token_ids
            assert output.outputs[0].token_ids == expected
            other = [300 - more] * (room - len(output.prompt_token_ids) - NEW + more - 8)
            llm.generate([other[: room - 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len({*within}) == 3  # of four rows


def test_tasks_and_forks_see_the_same_images(folder: Path) -> None:
    message: dict[str, Any] = {
        "role": "user",
        "content": [{"type": "image", "image": picture(48, 64, 12)}, TEXT],
    }
    with engine(model(folder, "qwen3_vl")) as llm:
        chat = Chat(llm)
        asked = chat.ask(message["content"], GREEDY)
        (other,) = asyncio.run(AsyncLLM(llm).chat([message], GREEDY))
        assert other.outputs[0].token_ids == asked.outputs[0].token_ids
        assert other.num_cached_tokens == len(asked.prompt_token_ids)
        twin = chat.fork()
        answers = [one.ask("And?", GREEDY) for one in (chat, twin)]
        assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
        assert min(a.num_cached_tokens for a in answers) >= len(asked.prompt_token_ids) - 1
        assert num_encoded(llm) == 1
        chat.close()
        twin.close()


def test_no_time_tells_that_another_salt_has_sent_an_image(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decoded and encoded again."""
    image, decoded = picture(64, 64, 14), list[object]()
    part, row = {"type": "image", "image": image}, "<|image_pad|>"
    with engine(model(folder, "qwen3_vl")) as llm:
        process = llm.images._processor._process

        def note(source: Any) -> Any:
            decoded.append(source)
            return process(source)

        monkeypatch.setattr(llm.images._processor, "_process", note)
        for number, salt in enumerate((None, "a", "b"), 1):
            for _ in range(2):
                llm.chat([{"role": "user", "content": [part]}], GREEDY, cache_salt=salt)
                prompt: Any = {"prompt": row, "multi_modal_data": {"image": image}}
                llm.generate(prompt, GREEDY, cache_salt=salt)
            assert num_encoded(llm) == number and len(decoded) == 2 * number


def test_an_image_is_found_on_disk_after_a_restart(folder: Path, tmp_path: Path) -> None:
    image, asked = picture(64, 64, 9), []
    other = image.copy()
    other.putpixel((5, 7), (1, 2, 3))
    for shown, encoded in ((image, 1), (image, 0), (other, 1)):
        kept = {"kv_dir": tmp_path, "kv_dir_size": "4MB"}
        message = {"role": "user", "content": [{"type": "image", "image": shown}, TEXT]}
        with engine(model(folder, "qwen3_vl"), **kept) as llm:
            asked += llm.chat([message], GREEDY, use_tqdm=False)
            assert num_encoded(llm) == encoded
    first, second, third = asked
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 4
    assert third.num_cached_tokens <= first.prompt_token_ids.index(ROW)


@pytest.mark.parametrize("error", [ModelError("the tower fell"), MemoryError()], ids=repr)
def test_a_tower_that_fails_once_ends_each_answer_to_its_request_alone(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, calls = picture(64, 64, 12), list[object]()
    message = {"role": "user", "content": [{"type": "image", "image": image}, TEXT]}
    both: list[Conversation] = [[message], [{"role": "user", "content": "Hello"}]]

    def fail(tower: object, inputs: object) -> None:
        calls.append(inputs)
        raise error

    with engine(model(folder, "mistral3")) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(VisionTower, "encode", fail)
            failed, fine = llm.chat(both, SamplingParams(n=3, max_tokens=NEW), use_tqdm=False)
        assert failed.error == (str(error) or "MemoryError") and len(calls) == 1
        assert [answer.finish_reason for answer in failed.outputs] == ["error"] * 3
        assert fine.error is None
        (again,) = llm.chat([message], GREEDY, use_tqdm=False)
        assert again.error is None and len(again.outputs[0].token_ids) == NEW


@pytest.mark.parametrize("cache", ["radix", "hash-block", "none"])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4"])
def test_no_step_waits_for_the_tower(
    folder: Path, family: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for an image that comes again in a prompt, either, nor for several answers, nor where a
    hit is lowered to an image's start; whatever is kept."""
    image, threads = picture(96, 96, 13), set[str]()
    encode, several = VisionTower.encode, SamplingParams(temperature=0, max_tokens=2, n=3)

    def note(tower: VisionTower, inputs: Any) -> Any:
        threads.add(threading.current_thread().name.partition("_")[0])
        return encode(tower, inputs)

    monkeypatch.setattr(VisionTower, "encode", note)
    part = {"type": "image", "image": image}
    settings = {"cache": cache, "max_num_batched_tokens": step(family)}
    with engine(model(folder, family), **settings) as llm:
        assert llm.images.features is not None
        llm.images.features._max_bytes = 0
        for texts in ("ab", "ac", "dc", "da"):
            content = [part, {"type": "text", "text": texts[0] * 9}, part]
            content += [{"type": "text", "text": texts[1] * 70}, part]
            message = {"role": "user", "content": content}
            (output,) = llm.chat([message], several, use_tqdm=False)
            assert output.error is None
    assert threads == {"vision-tower"}


def test_what_an_image_cannot_have_is_refused(folder: Path) -> None:
    image = picture(64, 64, 11)
    part, row = {"type": "image", "image": image}, "<|image_pad|>"
    shown: Any = {"prompt": row, "multi_modal_data": {"image": image}}

    def say(*content: Any) -> Conversation:
        return [{"role": "user", "content": [*content]}]

    with engine(model(folder, "qwen3_vl")) as llm:
        for given, problem in (
            (lambda: llm.chat(say(part, {"type": "text", "text": row})), "1 image for 2 plac"),
            (lambda: llm.chat(say({"type": "image", "image": 7})), "not int"),
            (lambda: llm.chat(say({"type": "image", "url": "a.png"})), "path, bytes or a PIL"),
            (lambda: llm.chat(say({"type": "image_url", "image_url": "a.png"})), "path, bytes or"),
            (lambda: llm.chat(say({"type": "video", "video": b""})), "of type 'video'"),
            (lambda: llm.chat(say(part), SamplingParams(prompt_logprobs=1)), "text alone"),
            (lambda: llm.chat(say(*[part] * 65)), "at most 64 images"),
            (lambda: llm.generate({"prompt": row, "multi_modal_data": {"audio": 1}}), "image"),
            (lambda: llm.generate(shown | {"mm_processor_kwargs": {}}), "no 'mm_processor_kw"),
            (lambda: llm.generate(shown | {"prompt": [7]}), "not with token ids"),
            (lambda: llm.pin_prefix("a", shown), "not into a pinned prefix"),
            (lambda: llm.embed(shown), "without images"),
            (lambda: llm.generate([256, VOCAB_SIZE]), "outside the vocabulary"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                given()
        prompt: Any = {**shown, "prompt": f"See {row}!"}
        (one,), (other,) = llm.generate(prompt, GREEDY), llm.chat(say(part), GREEDY)
        assert one.prompt_token_ids.count(ROW) > 1
        assert other.prompt_token_ids.count(ROW) == one.prompt_token_ids.count(ROW)
        none: Any = {"prompt": "See!", "multi_modal_data": {"image": []}}
        assert llm.generate(none)[0].prompt_token_ids == llm.generate("See!")[0].prompt_token_ids
        assert "takes images" in llm.notes
        assert not llm.engine.has_work
