"""What large and odd bodies cost others: the longest gap of a stream while four clients send them.

python -m radixcache.bench.probes.floods [KIND ...] [--seconds S]

A kind is an API and a body; without any, all are sent, one after the other. The sizes of the
server's memory are before, at most during, and after each.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

CLIENTS = 4
MOST = 16_000_000
"""Bytes of a body, just below what a server takes."""

SETTLING = 1.5
"""Seconds until memory is looked at again."""


def many(piece: str, most: int = MOST, count: int = 10**9) -> str:
    """Pieces, `{}` being their number, as many as there is room for."""
    count = min(count, most // (len(piece) + 6))
    if "{}" not in piece:
        return ",".join([piece] * count)
    return ",".join(piece.replace("{}", str(i)) for i in range(count))


# Values that stand in some field.
VALUES: dict[str, Callable[[], str]] = {
    "names": lambda: "{" + many('"name{}":1', 12_500_000) + "}",
    "most names": lambda: "{" + many('"name{}":1', count=95_000) + "}",
    "objects": lambda: "[" + many('{"a":1}') + "]",
    "most objects": lambda: "[" + many('{"a":1}', count=60_000) + "]",
    "lists": lambda: "[" + many("[]", count=190_000) + "]",
    "numbers": lambda: "[" + many("7", count=990_000) + "]",
    "texts": lambda: "[" + many('"a"', count=490_000) + "]",
    "text": lambda: '"' + "x" * (MOST - 1000) + '"',
    "wide text": lambda: '"' + "é" * (MOST // 2 - 1000) + '"',
    "escapes": lambda: '"' + r"\n" * (MOST // 2 - 1000) + '"',
    "deep": lambda: "[" * 50_000 + "]" * 50_000,
    "number": lambda: "1" * (MOST - 1000),
}
MESSAGE = '{"role":"user","content":"Hi"}'
# Bodies with a hole, by API.
PLACES = {
    "chat kwargs": ("/v1/chat/completions", '{"messages":[%s],"chat_template_kwargs":{"x":@}}'),
    "chat content": ("/v1/chat/completions", '{"messages":[{"role":"user","content":@}]}'),
    "completions": ("/v1/completions", '{"max_tokens":1,"prompt":@}'),
    "responses": ("/v1/responses", '{"input":@}'),
    "messages input": (
        "/v1/messages",
        '{"max_tokens":1,"messages":[{"role":"assistant","content":'
        '[{"type":"tool_use","id":"a","name":"b","input":{"x":@}}]}]}',
    ),
}


def kinds() -> dict[str, tuple[str, str, str]]:
    """Path, body with a hole and what fills it, by name."""
    return {
        f"{place}, {value}": (path, body.replace("%s", MESSAGE), value)
        for place, (path, body) in PLACES.items()
        for value in VALUES
    }


def flood(port: int, kind: str, until: float, status: Any) -> None:
    """Send it again and again from some clients; in a process of its own."""
    path, place, value = kinds()[kind]
    body = place.replace("@", VALUES[value]()).encode()
    head = {"Content-Type": "application/json"}

    def send() -> None:
        while time.time() < until:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("POST", path, body, head)
                status.value = connection.getresponse().status
            except OSError:
                status.value = -1
            finally:
                connection.close()

    threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Stream(threading.Thread):
    """A completion that never ends, and the longest gap between two of its chunks."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port, self.gap, self.count = port, 0.0, 0
        self.last = time.monotonic()

    def run(self) -> None:
        body = {"prompt": "| 1 | Nora", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            for line in connection.getresponse():
                if line.startswith(b"data"):
                    now = time.monotonic()
                    self.gap, self.last = max(self.gap, now - self.last), now
                    self.count += 1
            connection.close()


def megabytes(pid: int, name: str = "VmRSS") -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", help="names, or parts of them")
    parser.add_argument("--seconds", type=float, default=2.0, help="that each is sent for (2)")
    args = parser.parse_args()
    wanted = [k for k in kinds() if not args.kinds or any(part in k for part in args.kinds)]
    command = [sys.executable, "-m", "radixcache.runtime.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = next(line for line in server.stderr if line.startswith("Serving"))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        port = int(said.rpartition(":")[2])
        stream = Stream(port)
        stream.start()
        time.sleep(2)
        first, worst = megabytes(server.pid), 0.0
        context = get_context("spawn")
        for kind in wanted:
            status = context.Value("i", 0)
            before, stream.gap, count = megabytes(server.pid), 0.0, stream.count
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins anew
            start = time.time()
            until = start + args.seconds + 1
            process = context.Process(target=flood, args=(port, kind, until, status))
            process.start()
            process.join()
            gap, peak, took = stream.gap, megabytes(server.pid, "VmHWM"), time.time() - start
            rate = (stream.count - count) / took
            time.sleep(SETTLING)
            after, worst = megabytes(server.pid), max(worst, gap)
            print(
                f"{kind:32} {status.value:4}  gap {gap:5.2f} s  {rate:4.0f} chunks/s  "
                f"{before:5.0f} {peak:5.0f} {after:5.0f} MB", flush=True,
            )  # fmt: skip
        print(f"longest gap {worst:.2f} s; memory {first:.0f} to {megabytes(server.pid):.0f} MB")
        server.terminate()


if __name__ == "__main__":
    main()
