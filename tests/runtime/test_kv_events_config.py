"""Where KV events are published, and what is refused: settings, places, and requests."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from radixcache import LLM, PagePool, RadixCache
from radixcache.errors import InvalidRequest, MissingDependency
from radixcache.runtime.cli import main
from radixcache.runtime.kv_events.config import KVEventsConfig
from tests.runtime.kv_consumer import ask, heard, opened, publishing, store


def refusal(given: Any, page_size: int = 16, caches: bool = True) -> str:
    with pytest.raises(InvalidRequest) as refused:
        KVEventsConfig.asked(given, page_size, caches)
    assert "\n" not in str(refused.value)
    return str(refused.value)


ON = '{"enable_kv_cache_events": true}'


def test_what_is_asked_for_is_read_or_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    for nothing in (None, "{}", {"publisher": "zmq"}, '{"enable_kv_cache_events": false}'):
        assert KVEventsConfig.asked(nothing, 1, False) is None
    null = {"enable_kv_cache_events": True, "publisher": "null"}
    assert KVEventsConfig.asked(null, 16, True) is None
    assert KVEventsConfig.asked(ON, 16, True) == KVEventsConfig(True)
    assert "'port'" in refusal('{"port": 1}') and "replay_endpoint" in refusal('{"port": 1}')
    assert "`int`" in refusal({"hwm": "many"}) and "hwm" in refusal({"hwm": "many"})
    assert "publisher" in refusal({"publisher": "kafka"})
    assert "max_queue_size of KV events must be from 1" in refusal({"max_queue_size": 0})
    assert "from 0 to 1,000,000,000" in refusal({"buffer_steps": -1})
    assert "from 0 to 1,000,000,000" in refusal({"buffer_steps": (1 << 31) - 1})
    texts = ("", "{", "[]", "3", '"a"', "[" * 100_000, "\ud800")
    for broken in (*texts, {"topic": "\ud800"}, {"hwm": object()}):
        assert "configuration of KV events" in refusal(broken), broken
    assert "block size" in refusal(ON, page_size=1)
    assert "block size" in refusal(ON, caches=False)
    with pytest.raises(InvalidRequest, match="they need a cache"):
        LLM("no-such-model", page_size=1, kv_events_config=ON)  # before a model is looked for
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingDependency, match=r"KV events need zmq: .*'\.\[kv-events\]'"):
        KVEventsConfig.asked(ON, 16, True)
    assert KVEventsConfig.asked(None, 16, True) is None


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize(
    "place",
    [
        "nowhere", "tcp://*", "smoke://a", "tcp://*:port", "tcp://*:-1", "tcp://a\0b:1",
        "ipc:///no/x/y", "tcp://*:99999",  # ZeroMQ would bind 34463
    ],
)  # fmt: skip
def test_a_place_that_makes_no_sense_is_named(name: str, place: str):
    cache = RadixCache(PagePool(16, 4))
    with (
        pytest.raises(InvalidRequest, match="KV events cannot be at "),
        publishing(cache, **{name: place}),
    ):
        pass
    assert not cache.events


def wait_until_nobody_listens(file: Path) -> None:
    """ZeroMQ lets go of a closed socket's file in a thread of its own, in its own time."""
    end = time.monotonic() + 30
    while True:
        with socket.socket(socket.AF_UNIX) as other:
            if other.connect_ex(str(file)):
                return
        assert time.monotonic() < end, "it still listens"
        time.sleep(0.005)


def test_a_file_that_another_publisher_listens_at_is_taken(tmp_path: Path):
    place, cache = f"ipc://{tmp_path}/e", RadixCache(PagePool(16, 4))
    with pytest.raises(InvalidRequest, match="already in use"):
        publishing(cache, endpoint=place, replay_endpoint=place).__enter__()
    wait_until_nobody_listens(tmp_path / "e")
    with publishing(cache, endpoint=place):
        for name in ("endpoint", "replay_endpoint"):
            with pytest.raises(InvalidRequest, match="already in use"):
                publishing(cache, **{name: place}).__enter__()
    wait_until_nobody_listens(tmp_path / "e")
    with publishing(cache, endpoint=place):  # what is left of one that has ended is no publisher
        pass


def test_a_place_that_is_taken_ends_serve(capsys: pytest.CaptureFixture[str]):
    with opened(zmq.ROUTER) as other:
        other.bind("tcp://127.0.0.1:0")
        taken = other.getsockopt_string(zmq.LAST_ENDPOINT)
        config = {"enable_kv_cache_events": True, "endpoint": "ipc://*", "replay_endpoint": taken}
        flags = ["serve", "--port", "0", "--kv-cache-memory-bytes", "8MiB"]
        assert main([*flags, "--kv-events-config", json.dumps(config)]) == 2
    error = capsys.readouterr().err
    assert f"KV events cannot be at '{taken}': Address already in use" in error
    assert main(["serve", "--kv-events-config", '{"port": 1}']) == 2
    assert "--kv-events-config: KV events have no 'port'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "frames",
    [
        (b"",), (b"\x00" * 8,), (b"", b""), (b"", b"\x00"), (b"", b"\x00" * 9),
        (b"", b"\xff" * 8),  # -1, or later than all
        (b"", (1 << 63).to_bytes(8, "big")), (b"", bytes(8), b"", b""), (b"x", b"y", b"z"),
        tuple(b"%d" % i for i in range(100)),
    ],
)  # fmt: skip
def test_a_request_of_garbage_gets_an_end_and_nothing_else(frames: tuple[bytes, ...]):
    cache = RadixCache(PagePool(16, 4))
    with publishing(cache) as publisher:
        store(cache, [*range(8)])
        assert len(heard(publisher).held) == 2
        assert ask(str(publisher.replay_endpoint), *frames) == []
        assert len(heard(publisher).held) == 2


def test_who_sends_too_much_is_disconnected():
    cache = RadixCache(PagePool(16, 4))
    with publishing(cache, replay_endpoint="tcp://127.0.0.1:0") as publisher:
        with opened(zmq.DEALER) as client:
            client.connect(str(publisher.replay_endpoint))
            client.send_multipart((b"", b"x" * 100_000))
            assert not client.poll(50)
        store(cache, [*range(8)])
        assert len(heard(publisher).held) == 2
