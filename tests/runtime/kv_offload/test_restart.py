"""An `LLM` with a folder for its KV is ended and started anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGTERM, alarm
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from radixcache import LLM, CacheStats, InvalidRequest, LeaseError, SamplingParams
from radixcache.runtime.kv_offload import disk, fingerprint, session
from radixcache.runtime.kv_offload.files import LOCK, contents, lock_folder
from tests.helpers.models import tiny_model
from tests.helpers.tiers import in_a_process
from tests.runtime.server import http
from tests.runtime.server.live import live
from tests.runtime.server.processes import forked

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
TABLE = "| name | age |\n|---|---|\n" + "".join(f"| Person {i} | {i} |\n" for i in range(60))


def open_llm(folder: Path, model: Any = None, **more: Any) -> LLM:
    settings = {"kv_dir": folder, "kv_dir_size": "30MB", "kv_cache_memory_bytes": "30MB"} | more
    return LLM(model, **settings)


def ask(llm: LLM, prompt: Any, salt: str | None = None) -> tuple[Any, int, int]:
    """Tokens with their log-probabilities; tokens that were hit, and that were loaded."""
    before = llm.cache.stats.loaded_tokens
    (output,) = llm.generate(prompt, GREEDY, cache_salt=salt)
    completion = output.outputs[0]
    loaded = llm.cache.stats.loaded_tokens - before
    return (completion.token_ids, completion.logprobs), output.num_cached_tokens, loaded


def test_conversations_and_prefixes_go_on_to_the_token(tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.2, seed=5, max_tokens=20)
    messages: list[Any] = [{"role": "user", "content": TABLE + "Say something."}]
    with open_llm(tmp_path) as llm:
        (first,) = llm.chat(messages, params)
        llm.pin_prefix("table", TABLE)
        llm.pin_prefix("short", "Once", lifetime=0.001)
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And more?"},
    ]
    with open_llm(tmp_path) as llm:
        assert [prefix.name for prefix in llm.prefixes.list()] == ["table"]
        assert llm.engine.lifetime_stats == CacheStats(), "nobody has asked anything"
        with pytest.raises(LeaseError, match="before a reset, unpin 'table'"):
            llm.reset_prefix_cache()
        (second,) = llm.chat(messages, params)
        said = len(first.prompt_token_ids) + len(first.outputs[0].token_ids)
        assert second.num_cached_tokens >= said - 2, "the end of the turn, and the last token"
    with open_llm(tmp_path) as llm:
        messages[0] = {"role": "user", "content": "Something else."}
        (third,) = llm.chat(messages, params)
        assert third.num_cached_tokens < 20


def test_a_folder_of_another_kv_dtype_is_not_read(tmp_path: Path, caplog) -> None:
    """float16 and bfloat16 have pages of equal bytes: only the folder's name tells them apart."""
    answers: dict[str, Any] = {}
    for name in ("float16", "float16", "bfloat16", "bfloat16", "int8", "int8", "auto", "auto"):
        with open_llm(tmp_path, kv_cache_dtype=name) as llm:
            answer, hit, loaded = ask(llm, TABLE + "Who?")
            assert bool(hit) == bool(loaded) == (name in answers)
            assert answers.setdefault(name, answer)[0] == answer[0]
    assert "are removed, of tabletalk in float32, KV in float16, pages of 16" in caplog.text


def test_what_is_salted_stays_off_the_disk(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        ask(llm, TABLE, "mine")
        llm.chat([{"role": "user", "content": "a secret"}], cache_salt="mine")
    files = [path for path in tmp_path.rglob("*") if path.name != "pages.kv" and path.is_file()]
    assert len(files) == 2 and not any(b"secret" in path.read_bytes() for path in files)
    with open_llm(tmp_path) as llm:
        assert llm.offload is not None and not len(llm.offload.tiers[0])
        assert ask(llm, TABLE)[1:] == (0, 0)


def test_what_is_on_disk_and_what_was_loaded_is_explained(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        ask(llm, TABLE)
    with open_llm(tmp_path) as llm:
        length, offload = len(llm.encode(TABLE)), llm.offload
        assert offload is not None and offload.disk is not None
        told = llm.explain(TABLE + "Who?")
        assert told.misses[0].reason == "on_disk" and len(told.misses[0]) == length
        assert f"on disk: {length:,} tokens from token 0 on, which are loaded" in str(told)
        assert ask(llm, TABLE + "Who?")[2] == length
        assert llm.explainer.missed_tokens["on_disk"] == 0, "they were loaded"
        llm.call(lambda: llm.cache.evict(llm.cache.pool.num_pages))
        offload.disk.flush()
        for _ in range(200):  # outweigh what was measured
            offload.loads.computing.note(10**6, 1e-6)
        assert "loading them takes" in llm.explain(TABLE + "Who?").misses[0].describe()
        assert ask(llm, TABLE + "Who?")[2] == 0
        assert llm.explainer.missed_tokens["on_disk"] >= length


def test_a_reset_forgets_the_disk_too(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm:
        ask(llm, TABLE)
    with open_llm(tmp_path) as llm:
        llm.chat([{"role": "user", "content": "a secret"}], GREEDY)
        llm.reset_prefix_cache()
        turns = llm.inputs.conversations
        assert turns is not None and not turns.history.texts()
        assert ask(llm, TABLE)[1] == 0
        llm.reset_prefix_cache()
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    pages = {path.name: path.read_bytes() for path in left}.pop("pages.kv")
    assert len(left) == 3 and pages and not any(pages), "a lock, a manifest, and nothing"
    assert not any(b"secret" in path.read_bytes() for path in left)


def test_a_server_that_is_stopped_keeps_all(tmp_path: Path) -> None:
    flags = ("--kv-dir", str(tmp_path / "kv"), "--kv-dir-size", "30MB")
    folders = [tmp_path / name for name in ("first", "killed", "last")]
    for folder in folders:
        folder.mkdir()
    with forked(folders[0], *flags) as (running, url):
        body = {"input": TABLE + "Who is 7?", "max_output_tokens": 8, "temperature": 0}
        first, gone = (http.post(f"{url}/v1/responses", json=body).json() for _ in range(2))
        assert http.delete(f"{url}/v1/responses/{gone['id']}").status_code == 200
        rules = {"name": "rules", "messages": [{"role": "system", "content": "Be short."}]}
        assert http.post(f"{url}/v1/prefixes", json=rules).status_code == 200
        running.send_signal(SIGTERM)
        assert running.wait(30) in (0, -SIGTERM)
    (kept,) = contents(tmp_path / "kv")
    assert kept.responses == 1 and kept.prefixes == ["rules"]
    with forked(folders[1], *flags) as (running, url):
        body |= {"previous_response_id": first["id"]}
        then = http.post(f"{url}/v1/responses", json=body).json()
        assert http.get(f"{url}/v1/responses/{then['id']}").json() == then
        (kept,) = contents(tmp_path / "kv")
        assert kept.responses == 2, "while it runs, too"
        running.kill()
        running.wait(30)
    with forked(folders[2], *flags) as (_, url):
        assert http.get(f"{url}/v1/responses/{gone['id']}").status_code == 404
        for one in (first, then):
            assert http.get(f"{url}/v1/responses/{one['id']}").json() == one
        assert http.post(f"{url}/v1/prefixes", json=rules).status_code == 200, "the same again"
        chat = {"prefix": "rules", "messages": [{"role": "user", "content": "Who?"}]}
        chatted = http.post(f"{url}/v1/chat/completions", json={**chat, "max_tokens": 1})
        assert chatted.status_code == 200, chatted.text
        more = {"input": "And 8?", "previous_response_id": first["id"], "max_output_tokens": 1}
        answer = http.post(f"{url}/v1/responses", json={**more, "explain": True}).json()
        usage, loaded = answer["usage"], answer["radixcache"]["explanation"][0]
        cached = usage["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["total_tokens"] - 2, "the end of the turn, and the last"
        recent = http.get(f"{url}/v1/cache").json()["recent"]
        (asked,) = [request for request in recent if request["loaded_tokens"] == cached]
        assert [loaded[name] for name in ("reason", "start", "end")] == ["loaded", 0, cached]
        assert loaded["text"].startswith(f"loaded from disk: {cached:,} tokens, ")
        assert 0 < asked["load_seconds"] < asked["ttft"]


def change_one_weight(model: Path) -> dict[str, Any]:
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "layers.1" in name and weights[name].ndim == 2)
    weights[name].view(-1)[-1] += 0.01
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return {}


def change_rope(model: Path) -> dict[str, Any]:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 12_345.0}
    (model / "config.json").write_text(json.dumps(config))
    return {}


OTHERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "one weight": change_one_weight,
    "rope": change_rope,
    "dtype": lambda _: {"dtype": "bfloat16"},
    "page size": lambda _: {"page_size": 8},
    "format": lambda _: {},  # of another radixcache
}


@pytest.mark.parametrize("other", OTHERS)
def test_kv_of_anything_else_is_not_found(
    tmp_path: Path, other: str, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model("llama", tmp_path / "model"), [[*range(1, 90)]]
    folder = tmp_path / "kv"
    with open_llm(folder, model) as llm:
        ask(llm, prompt)
    with open_llm(folder, model) as llm:
        assert ask(llm, prompt)[2] == 88, "the same is found"
    settings = OTHERS[other](model)
    with LLM(model, **settings) as llm:
        wanted = ask(llm, prompt)[0]
    if other == "format":
        monkeypatch.setattr(fingerprint, "FORMAT", fingerprint.FORMAT + 1)
    with open_llm(folder, model, **settings) as llm:
        assert ask(llm, prompt) == (wanted, 0, 0)
    assert ("another radixcache or another machine wrote them" in caplog.text) != bool(settings)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1, "the others' pages go"


def test_a_fork_leaves_the_folder_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has none of the threads that write: to wait for them would be for ever."""
    monkeypatch.setattr(disk, "MAX_QUEUED_BYTES", 1)
    with open_llm(tmp_path) as llm:
        ask(llm, TABLE)

        def close() -> None:
            alarm(60)
            llm.close()

        assert in_a_process(close) == 0
        with pytest.raises(InvalidRequest, match="in use by another process"):
            open_llm(tmp_path)
    with open_llm(tmp_path) as llm:
        assert ask(llm, TABLE)[2] > 500


def test_responses_that_could_come_back_though_deleted_are_not_there(tmp_path: Path) -> None:
    with open_llm(tmp_path) as llm, live(llm) as server:
        body = {"input": "Who is 7?", "max_output_tokens": 4, "temperature": 0}
        kept = "/v1/responses/" + server.post("/v1/responses", body).json()["id"]
        assert server.get(kept).status_code == 200
    for manifest, status in (("on", 404), ("off", 200)):
        with open_llm(tmp_path) as llm:
            assert llm.offload is not None and llm.offload.disk is not None
            index, pragma = llm.offload.disk._index, f"pragma query_only = {manifest}"
            llm.offload.disk._on_thread(partial(index.execute, pragma))
            with live(llm) as server:
                assert server.get(kept).status_code == status


def test_a_close_that_is_cut_off_gives_the_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(tmp_path)
    ask(llm, TABLE)
    with monkeypatch.context() as patched:
        patched.setattr(session, "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.close()
    open_llm(tmp_path).close()


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for settings, message in (
        ({"cache": "hash-block"}, "kv_dir is for cache='radix', not 'hash-block'"),
        ({"kv_dir": ""}, "kv_dir is the name of a folder"),
        ({"kv_dir": None}, "kv_dir_size is the size of a kv_dir: name one"),
        ({"kv_dir": None, "kv_dir_size": "10GB"}, "kv_dir_size is the size of a kv_dir"),
        ({"kv_dir": __file__}, "cannot be used: it is a file"),
        ({"kv_dir_size": "1kB"}, "holds no page"),
        ({"kv_dir_size": "900TB"}, "cannot hold .* smaller kv_dir_size"),
        ({"kv_dir_size": "much"}, "kv_dir_size must be an amount"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            open_llm(tmp_path, **settings)
    other = tmp_path / "other"
    other.mkdir()
    for left in (
        ".snapshot/hourly.0",
        "lost+found/x",
        "emptied/a/b",
    ):  # by file systems, and by users
        (other / left).mkdir(parents=True)
    for finder in (other, other / "emptied/a"):
        (finder / ".DS_Store").touch()
    open_llm(other).close()
    (other / LOCK).unlink()
    for place in (other / "emptied/a/b", other):
        (place / "notes.txt").touch()
        with pytest.raises(InvalidRequest, match="holds other files: name an empty folder"):
            open_llm(other)
        (place / "notes.txt").unlink()
    lock = lock_folder(tmp_path)
    with pytest.raises(InvalidRequest, match="in use by another process"):
        open_llm(tmp_path)
    os.close(lock)
    open_llm(tmp_path).close()
