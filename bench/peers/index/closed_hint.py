"""What it is worth to know that a conversation is over: hits on trace T with and without."""

from __future__ import annotations

import argparse

from bench.peers.index.ours import Ours
from bench.peers.index.trace_t import Request, TraceT, replay_all


class Hinted(Ours):
    """Says with the last turn of a conversation that it was the last."""

    last = 0

    def finish(self, request: Request) -> None:
        super().finish(request)
        if request.num_tokens == self.last:
            whole = self.cache.acquire(self.texts[request.conversation])
            self.cache.release(whole, closed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for seed in args.seeds:
        trace = TraceT(seed=seed)
        rates = []
        for kind in (Ours, Hinted):
            ours = kind(trace.num_pages(args.page_size), args.page_size, trace.texts())
            if isinstance(ours, Hinted):
                ours.last = trace.system + trace.turns * trace.turn - 1
            rates.append(replay_all(trace, ours).rate)
            ours.cache.check()
        print(f"seed {seed}, page {args.page_size}: LRU {rates[0]:.4f}, closed {rates[1]:.4f}")


if __name__ == "__main__":
    main()
