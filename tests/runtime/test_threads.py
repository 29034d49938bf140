"""One `LLM`, many threads or tasks: each answer is that of the request alone; nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from radixcache import LLM, AsyncLLM, Chat, InvalidRequest, SamplingParams, WrongThread
from radixcache.errors import EngineFailed, EngineStopped
from radixcache.runtime.engine.input_processor import EngineInput
from radixcache.runtime.engine.stream import Stream

SEED = 20_261_122
GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, page_size=4, kv_cache_memory_bytes="1MiB", max_num_batched_tokens=64) as llm:
        yield llm
        llm.call(llm.engine.check)
        assert not llm.engine.has_work and not llm.worker._streams


def in_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, range(count)))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0)


def words(rng: random.Random) -> str:
    """One of few beginnings, and an end of its own: half of it is cached, or somebody's."""
    stem = "".join(random.Random(rng.randrange(4)).choices("abcd", k=24))
    return stem + "".join(rng.choices("abcd", k=rng.randint(1, 12)))


@pytest.mark.parametrize("calls", [12, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_threads_share_one_llm_with_aborts_and_edits_between(path: Path, llm: LLM, calls: int):
    print("seed", SEED)
    plans = []
    for thread in range(8):
        rng = random.Random(SEED + thread)
        plans.append([(words(rng), rng.randint(1, 8), rng.random()) for _ in range(calls)])
    with LLM(path, page_size=4, kv_cache_memory_bytes="1MiB", cache="none") as alone:
        flat = [(text, SamplingParams(0.0, max_tokens=n)) for p in plans for text, n, _ in p]
        wanted = alone.generate([t for t, _ in flat], [p for _, p in flat], use_tqdm=False)
    expected = iter(wanted)
    answers = {(t, c): next(expected).outputs[0].token_ids for t in range(8) for c in range(calls)}

    def run(thread: int) -> None:
        for call, (text, length, kind) in enumerate(plans[thread]):
            params = SamplingParams(temperature=0, max_tokens=length)
            if kind < 0.2:  # read one token and leave
                stream = llm.stream(text, LONG)
                next(stream)
                stream.close()
            if kind < 0.5:
                *_, output = llm.stream(text, params)
            else:
                (output,) = llm.generate(text, params)
            assert output.outputs[0].token_ids == answers[thread, call], (thread, call)

    in_threads(8, run)


def test_requests_of_threads_are_batched_and_a_short_one_waits_for_no_long_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = llm.engine.runner.run, iter(range(1000))

    def wait_for_the_short_one(*args: Any) -> Any:
        if next(steps) == 2:
            wait_until(lambda: not llm.worker._commands.empty())
        return run(*args)

    monkeypatch.setattr(llm.engine.runner, "run", wait_for_the_short_one)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(llm.generate, "long", LONG)
        wait_until(lambda: llm.engine.has_work)
        llm.generate("short", SamplingParams(temperature=0, max_tokens=2))
        assert not long.done()
        assert len(long.result()[0].outputs[0].token_ids) == 120
    assert llm.worker.num_steps < 150


def test_two_chats_in_two_threads_and_one_in_two(path: Path, llm: LLM) -> None:
    questions = ["one", "two", "three"]

    def talk(system: str) -> list[str]:
        chat = Chat(llm, system=system)
        return [chat.ask(question, GREEDY).outputs[0].text for question in questions]

    alone = [talk("a"), talk("b")]
    llm.reset_prefix_cache()
    assert in_threads(2, lambda i: talk("ab"[i])) == alone

    shared = Chat(llm, system="s")
    in_threads(2, lambda i: [shared.ask(f"{i}{question}", GREEDY) for question in questions])
    roles = [message["role"] for message in shared.messages]
    assert roles == ["system", *["user", "assistant"] * 6]  # no turn within another
    asked = [m["content"] for m in shared.messages if m["role"] == "user"]
    for thread in "01":
        assert [q[1:] for q in asked if q[0] == thread] == questions


def test_a_turn_within_a_turn_of_the_same_thread_is_refused(llm: LLM) -> None:
    chat = Chat(llm)
    stream = chat.stream("first", GREEDY)
    next(stream)
    with pytest.raises(InvalidRequest, match="the turn before is not over"):
        chat.ask("second", GREEDY)
    stream.close()
    assert chat.messages == []
    chat.ask("second", GREEDY)


def test_a_closed_llm_says_so_to_who_waits_and_to_who_comes(path: Path) -> None:
    llm = LLM(path, kv_cache_memory_bytes="1MiB")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, "x", LONG)
        wait_until(lambda: llm.engine.has_work)
        llm.close()
        with pytest.raises(EngineStopped):
            waiting.result()
    llm.close()
    for call in (
        lambda: llm.generate("x", GREEDY),
        llm.reset_prefix_cache,
        lambda: llm.explain("x"),
    ):
        with pytest.raises(EngineStopped, match="the engine has stopped"):
            call()


def test_an_llm_that_nobody_holds_ends_its_thread_and_frees_its_memory(path: Path) -> None:
    llm = LLM(path, kv_cache_memory_bytes="1MiB")
    llm.generate("x", GREEDY)
    thread, engine = llm.worker._thread, weakref.ref(llm.engine)
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


def test_steps_that_fail_again_and_again_fail_their_requests_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wanted,) = llm.generate("fine", GREEDY)
    run = llm.engine.runner.run

    def fail(chunks: Any, *rest: Any) -> Any:
        if any(chunk.sequence.request.prompt == "poison" for chunk in chunks):
            raise RuntimeError("planted")
        return run(chunks, *rest)

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    with pytest.raises(EngineFailed, match="planted"):
        llm.generate("poison", GREEDY)
    (again,) = llm.generate("fine", GREEDY)
    assert again.outputs[0].token_ids == wanted.outputs[0].token_ids


@pytest.mark.parametrize("place", ["schedule", "run", "finish"])
def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_aborted_after_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (wanted,) = llm.generate("fine", LONG)
    engine = llm.engine
    owners = {
        "schedule": engine.scheduler, "run": engine.runner, "finish": engine.output_processor
    }  # fmt: skip
    owner = owners[place]
    inner, collected, left = getattr(owner, place), [], [llm.stream("left", LONG)]
    next(left[0])

    def collect(*args: Any) -> Any:
        result = inner(*args)
        collected.extend(left)
        left.clear()
        del collected[:]  # its finalizer runs here
        with pytest.raises(WrongThread, match="in the middle of a step"):
            llm.call(lambda: None)
        return result

    failed = []
    monkeypatch.setattr(owner, place, collect)
    monkeypatch.setattr(llm.engine, "_recover", lambda: failed.append(place))
    (output,) = llm.generate("fine", LONG)
    assert not failed and not llm.call(lambda: llm.engine.has_work)
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_what_a_function_raises_is_its_callers(llm: LLM, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("planted")

    with pytest.raises(error, match="planted"):
        llm.call(fail)
    with pytest.raises(RuntimeError, match="raised StopIteration"):  # or a task waits for ever
        asyncio.run(asyncio.wait_for(AsyncLLM(llm).call(lambda: next(iter(()))), 20))
    with pytest.raises(WrongThread, match="cannot wait for an answer"):
        llm.call(lambda: llm.generate("x", GREEDY))
    assert llm.call(lambda: llm.call(lambda: 7)) == 7
    assert llm.generate("x", GREEDY)[0].finished


def test_a_process_that_was_forked_off_says_that_it_has_no_engine(llm: LLM) -> None:
    llm.generate("x", GREEDY)
    child = os.fork()
    if not child:
        try:
            signal.alarm(20)
            llm.generate("x", GREEDY)
        except EngineStopped:
            llm.close()
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert llm.generate("x", GREEDY)[0].finished


def test_an_interrupt_while_a_model_is_loaded_ends_its_thread_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon thread within torch as the interpreter ends would abort the process."""
    loading: list[threading.Thread] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        loading.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        for _ in range(3000):
            time.sleep(0.01)

    monkeypatch.setattr("radixcache.runtime.engine.build.load_model", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            LLM(path, kv_cache_memory_bytes="1MiB", device="cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    loading[0].join(20)
    assert not loading[0].is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_fails_keeps_no_other_from_its_end(path: Path) -> None:
    class Bad(Stream):
        def put(self, news: Any) -> None:
            raise MemoryError

    with LLM(path, kv_cache_memory_bytes="1MiB") as llm, ThreadPoolExecutor(1) as pool:
        llm.worker.submit(
            Bad(), lambda: llm.add([EngineInput(None, [1, 2], SamplingParams(max_tokens=3))])
        )
        waiting = pool.submit(llm.generate, "x", LONG)
        with pytest.raises((EngineFailed, EngineStopped)):
            waiting.result(20)


def test_an_abort_that_fails_is_tried_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drop, failures = llm.cache.pool.drop, iter(range(1))

    def fail(pages: Any) -> int:
        if next(failures, None) is not None:
            raise MemoryError("planted")
        return drop(pages)

    stream = llm.stream("x", LONG)
    next(stream)
    monkeypatch.setattr(llm.cache.pool, "drop", fail)
    stream.close()
    wait_until(lambda: not llm.engine.has_work)
    assert next(failures, None) is None, "nothing failed"


def test_tasks_get_the_answers_of_threads(llm: LLM) -> None:
    rng = random.Random(SEED)
    texts = [words(rng) for _ in range(12)]
    wanted = [output.outputs[0] for output in llm.generate(texts, GREEDY, use_tqdm=False)]

    async def stream(model: AsyncLLM, text: str) -> tuple[list[int], str]:
        pieces, output = [], None
        async for output in model.stream(text, GREEDY):
            pieces.append(output.outputs[0].new_text)
        assert output is not None and output.finished
        return output.outputs[0].token_ids, "".join(pieces)

    async def run() -> None:
        model = AsyncLLM(llm)
        await model.check_health()
        streams = [stream(model, text) for text in texts]
        generating = asyncio.create_task(model.generate(texts, GREEDY))
        apart = await asyncio.gather(*streams)
        together = await generating
        assert [output.outputs[0].token_ids for output in together] == [w.token_ids for w in wanted]
        assert apart == [(w.token_ids, w.text) for w in wanted]
        (chat,) = await model.chat([{"role": "user", "content": "hello"}], GREEDY)
        assert chat.outputs == llm.chat([{"role": "user", "content": "hello"}], GREEDY)[0].outputs
        await model.pin_prefix("p", texts[0])
        (named,) = await model.generate("ab", GREEDY, prefix="p")
        assert named.num_cached_tokens >= len(texts[0])
        assert "cached" in str(await model.explain(texts[0]))
        await model.unpin_prefix("p")
        await model.reset_prefix_cache()
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await model.generate({"prompt_token_ids": []})

    asyncio.run(run())
    asyncio.run(run())  # another loop is as good
    with pytest.raises(InvalidRequest, match="page_size would change nothing"):
        AsyncLLM(llm, page_size=4)


def test_a_task_that_is_cancelled_and_a_stream_that_is_left_abort(llm: LLM) -> None:
    async def run() -> None:
        model = AsyncLLM(llm)
        task = asyncio.create_task(model.generate(["a", "b"], LONG))
        async with aclosing(model.stream("c", LONG)) as stream:
            async for output in stream:
                if len(output.outputs[0].token_ids) >= 3:
                    break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not llm.engine.has_work

    asyncio.run(run())


def test_a_loop_hears_of_a_step_once_however_many_of_its_tasks_listen(llm: LLM) -> None:
    async def run() -> None:
        model, loop = AsyncLLM(llm), asyncio.get_running_loop()
        call, heard, before = loop.call_soon_threadsafe, list[str](), llm.worker.num_steps

        def count(function: Any, *args: Any, **more: Any) -> Any:
            heard.append(function.__name__)
            return call(function, *args, **more)

        async def read(text: str) -> list[Any]:
            return [output async for output in model.stream(text, GREEDY)]

        setattr(loop, "call_soon_threadsafe", count)  # noqa: B010 (mypy minds the other way)
        assert all(await asyncio.gather(*map(read, "abcdefgh")))
        assert 0 < heard.count("_deliver") <= llm.worker.num_steps - before

    asyncio.run(run())


def test_the_end_of_the_engine_is_told_to_every_task(path: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(path, kv_cache_memory_bytes="1MiB") as model:
            tasks = [asyncio.create_task(model.generate(text, LONG)) for text in "abc"]
            while not model.llm.engine.has_work:
                await asyncio.sleep(0)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineStopped] * 3
        with pytest.raises(EngineStopped):
            await model.check_health()

    asyncio.run(run())
