"""Processor time that a request and a streamed token take: a plain server, and an ingress with one
replica behind it, in turns. Needs Ray.

Of the ingress, by process: its own, the replica's, and Ray's others, which take some when nothing
is asked as well; that is measured first, and taken off.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from radixcache.runtime.server.listener import listen

Seconds = dict[str, float]
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200, help="of one token, a round (200)")
    parser.add_argument("--tokens", type=int, default=400, help="of a stream, 4 a round (400)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    args = parser.parse_args()
    small = {"prompt": "The table of people says that", "max_tokens": 1}
    long = {**small, "max_tokens": args.tokens, "ignore_eos": True, "stream": True}
    with _server() as plain, _server("--replicas", "1") as ingress:
        servers = {"plain": plain, "ingress": ingress}
        found: dict[tuple[str, str], list[Seconds]] = {}
        for number in range(args.rounds + 1):  # the first one warms up
            for name, server in servers.items():
                idle = server.rest(2)
                for what, body, count in (("request", small, args.requests), ("token", long, 4)):
                    units = count if what == "request" else count * args.tokens
                    spent = server.ask(body, count, idle)
                    each = {part: 1e3 * seconds / units for part, seconds in spent.items()}
                    if number:
                        found.setdefault((what, name), []).append(each)
    for (what, name), rounds in found.items():
        total = sorted(sum(each.values()) for each in rounds)
        parts = {part: median(each[part] for each in rounds) for part in sorted(rounds[0])}
        print(
            f"{what:8} {name:8} {median(total):6.2f} ms ({total[0]:.2f} to {total[-1]:.2f}):",
            end="",
        )
        print(*(f" {part} {value:.2f}" for part, value in parts.items()))


class _Server:
    def __init__(self, port: int, process: int) -> None:
        self._port, self._process = port, process

    def rest(self, seconds: float) -> Seconds:
        """What a second takes in which nothing is asked."""
        before = self._spent()
        time.sleep(seconds)
        return {part: (spent - before[part]) / seconds for part, spent in self._spent().items()}

    def ask(self, body: dict[str, object], count: int, idle: Seconds) -> Seconds:
        """What `count` answers take, one after the other, beyond what idling takes."""
        before, start = self._spent(), time.monotonic()
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
            content = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), content)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            connection.close()
        elapsed = time.monotonic() - start
        after = self._spent()
        return {part: after[part] - before[part] - idle[part] * elapsed for part in after}

    def _spent(self) -> Seconds:
        """Of the process and of those that it has started, so far."""
        found = {pid: (parent, name, seconds) for pid, parent, name, seconds in _processes()}
        spent = dict.fromkeys(("server", "replica", "Ray"), 0.0)
        for pid, (_, name, seconds) in found.items():
            above = pid
            while above != self._process and above in found:
                above = found[above][0]
            if above == self._process:
                other = "replica" if "ServeReplica" in name else "Ray"
                spent["server" if pid == self._process else other] += seconds
        return spent


def _processes() -> Iterator[tuple[int, int, str, float]]:
    """Process, parent, command line, and seconds of processor time."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes().decode(errors="replace")
            seconds = (int(fields[11]) + int(fields[12])) / _TICKS
            yield int(folder.name), int(fields[1]), name, seconds


@contextmanager
def _server(*flags: str) -> Iterator[_Server]:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "radixcache", "serve", "--port", str(port), *flags]
    process = subprocess.Popen(command)
    try:
        for _ in range(600):
            with suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            assert process.poll() is None, "the server did not start"
            time.sleep(0.2)
        yield _Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
