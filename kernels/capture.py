"""CUDA graphs of computations, which replay their launches without Python."""

from __future__ import annotations

from collections.abc import Callable

import torch

Compute = Callable[[], torch.Tensor]


class Capture:
    """Captures computations into CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # one for all: libraries keep memory for each

    def __call__(self, compute: Compute) -> Compute:
        # Run once outside of a graph, on another stream: libraries initialise in their first run.
        # It writes what the replay will write again.
        side, main = self._side, torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            compute()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device in the meantime.
            with torch.cuda.graph(
                graph, pool=self._memory, stream=side, capture_error_mode="thread_local"
            ):
                result = compute()
        except BaseException:  # an interrupt, too
            torch.cuda.set_stream(main)  # a capture that broke leaves its own
            self._memory = torch.cuda.graph_pool_handle()  # nothing may be left in the old one
            raise

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
