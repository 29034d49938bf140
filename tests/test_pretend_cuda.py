"""The pretended GPU forgives no more than a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pretend_cuda import Device, pretend_cuda


@pytest.fixture
def device() -> Iterator[Device]:
    with pretend_cuda() as device:
        yield device


def test_host_and_device_do_not_mix(device) -> None:
    a, host = torch.ones(3, device="cuda"), torch.ones(3)
    for mixing in (
        lambda: a + host,
        lambda: host.add_(a),
        lambda: torch.cat([a, host]),
        lambda: a.index_copy_(0, torch.arange(3), a),
        lambda: torch.nn.functional.embedding(host.long(), a[:, None]),
        lambda: host[a.long()],
        lambda: a.__setitem__(slice(0, 2), a[:2] * host[:2]),
        lambda: a.__setitem__(torch.arange(3, device="cuda"), host),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mixing()
    with pytest.raises(TypeError, match="numpy"):
        a.numpy()
    assert (a + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a scalar may


def test_pinned_memory_may_change_once_its_copy_has_run(device) -> None:
    pinned, a = torch.zeros(4).pin_memory(), torch.zeros(4, device="cuda")
    event = torch.cuda.Event()
    a.copy_(pinned, non_blocking=True)
    event.record()
    event.synchronize()
    pinned += 1
    event.record()
    a.copy_(pinned, non_blocking=True)
    event.synchronize()  # recorded before the copy
    pinned += 1
    with pytest.raises(AssertionError, match="overwritten before anybody waited"):
        torch.cuda.synchronize()


def test_a_capture_may_not_wait(device) -> None:
    a = torch.ones(3, device="cuda")
    for waiting in (
        lambda: a.sum().item(),
        lambda: a[a > 0],
        lambda: a + torch.tensor([1.0], device="cuda"),
        lambda: a[[0, 1]],
    ):
        with (
            pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            waiting()
    torch.cuda.synchronize()  # the capture is over
