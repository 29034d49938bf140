"""How long a server takes to load, to begin and to decode beside processes that keep cores busy.

python -m radixcache.bench.probes.busy [MODEL] [--busy N ...]
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
from statistics import median

PROMPT, TOKENS, REPEATS = "The sea was calm, and the ship", 48, 3


def ask(port: int, number: int) -> tuple[float, float]:
    """Seconds to the first token over HTTP, and for each further one."""
    body = {"prompt": f"{number}. {PROMPT}", "max_tokens": TOKENS, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    head, start = {"Content-Type": "application/json"}, time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), head)
    times = [time.monotonic() for line in connection.getresponse() if line.startswith(b"data: {")]
    connection.close()
    return times[0] - start, (times[-1] - times[0]) / (TOKENS - 1)


def measure(model: list[str]) -> list[float]:
    """Milliseconds of a start, to a first token, and for each further one."""
    command, start = [sys.executable, "-m", "radixcache.runtime.cli", "serve"], time.monotonic()
    with subprocess.Popen(
        [*command, *model, "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        said = next(line for line in server.stderr if line.startswith("Serving"))
        loaded = time.monotonic() - start
        seen = [ask(int(said.rpartition(":")[2]), number) for number in range(REPEATS)]
        server.terminate()
        server.stderr.read()
    return [1000 * loaded, *(1000 * median(column) for column in zip(*seen, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="*", help="a folder or GGUF (the bundled one)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="processes (0 1 2)")
    args = parser.parse_args()
    quiet: list[float] = []
    for count in args.busy:
        spin = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(spin) for _ in range(count)]
        try:
            found = measure(args.model)
        finally:
            for other in others:
                other.kill()
                other.wait()
        quiet = quiet or found
        parts = zip(("start", "first token", "each further one"), found, quiet, strict=True)
        texts = [f"{name} {now:,.1f} ms ({now / first:.1f} times)" for name, now, first in parts]
        print(f"beside {count}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
