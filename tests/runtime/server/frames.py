"""How smoothly the page runs beside a server at work: `python -m tests.runtime.server.frames`.

A browser looks at a tree of so many nodes, five times a second as while an answer is coming, and
clients keep so many requests running. Times between frames are those of `requestAnimationFrame`.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from itertools import islice
from pathlib import Path

import numpy as np

from radixcache.runtime.server.http import static
from tests.forks import open_nursery
from tests.runtime.server import http
from tests.runtime.server.browser import browser
from tests.runtime.server.test_lifecycle import forked
from tests.runtime.server.trees import fill, prompts

RECORD = """
const [seconds, done] = arguments;
(async () => {
  const cache = await import("./cache.js");
  cache.hurry(true);
  cache.refresh();
  performance.clearResourceTimings();
  const frames = [];
  const begin = performance.now();
  const note = (now) => {
    frames.push(now);
    if (now < begin + 1000 * seconds) return requestAnimationFrame(note);
    const loads = performance.getEntriesByType("resource");
    const looks = loads.filter((load) => load.name.includes("v1/cache?"));
    const count = (selector) => document.querySelectorAll(selector).length;
    done({ frames, looks: looks.map((look) => [look.duration, look.decodedBodySize]),
      drawn: count(".node"), used: count(".used") });
  };
  requestAnimationFrame(note);
})();
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    open_nursery()
    over = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        forked(Path(folder), "--kv-cache-memory-bytes", "768MiB") as (_, url),
        browser(Path(folder) / "profile") as page,
    ):
        nodes = fill(url, args.nodes)

        def keep_busy(client: int) -> None:
            for prompt in islice(prompts(0), client, None, args.requests):
                if over.is_set():
                    return
                body = {"prompt": f"{prompt} {client}", "max_tokens": 100, "ignore_eos": True}
                http.post(f"{url}/v1/completions", json=body, timeout=60)

        clients = [threading.Thread(target=keep_busy, args=[n]) for n in range(args.requests)]
        motion = {"name": "prefers-reduced-motion", "value": "no-preference"}
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [motion]})
        page.driver.set_script_timeout(args.seconds + 60)
        page.open(url)
        try:
            for client in clients:
                client.start()
            page.until(lambda: page.all(".node.used"))
            seen = page.driver.execute_async_script(RECORD, args.seconds)
        finally:
            over.set()
            for client in clients:
                client.join()
    gaps = np.diff(seen["frames"])
    looks = np.array([look for look in seen["looks"] if look[1]])
    size = sum((static.FOLDER / name).stat().st_size for name, _ in static.FILES.values())
    print(f"{nodes:,} nodes, {seen['drawn']} drawn, {seen['used']} of them in use")
    middle, high = np.percentile(gaps, [50, 99])
    print(f"{len(gaps)} frames: median {middle:.1f} ms, p99 {high:.1f} ms")
    took, length = np.median(looks, axis=0)
    print(f"the page's files: {size:,} bytes")
    print(f"{len(looks)} answers of /v1/cache: median {length:,.0f} bytes, {took:.0f} ms")


if __name__ == "__main__":
    main()
