"""The pretended GPU forgives no more than a real one."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from tests.pretend_cuda import CUDA, Device, DeviceTensor, pretend_cuda


@pytest.fixture
def device() -> Iterator[Device]:
    with pretend_cuda() as device:
        yield device


def test_it_ends_and_leaves_torch_as_it_was() -> None:
    def state() -> list[object]:
        return [torch.Generator, torch.cuda.Event, torch.cuda.graph, torch.Tensor.pin_memory]

    before = state()
    with pretend_cuda():
        assert torch.cuda.is_available() and state() != before
        kept = torch.ones(3, device="cuda")
    assert state() == before
    with pytest.raises(AssertionError, match="no longer pretended"):
        kept + 1
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            torch.ones(3, device="cuda")


@pytest.mark.parametrize("inference", [False, True])
def test_it_computes_what_a_cpu_does(device, inference) -> None:
    with torch.inference_mode(inference):
        a = torch.arange(12.0, device="cuda").view(3, 4)
        assert a.device == CUDA and a.is_cuda and isinstance(a[1:], DeviceTensor)
        a[1:, :2] += 5
        expected = torch.arange(12.0).view(3, 4)
        expected[1:, :2] += 5
        assert torch.equal(a.cpu(), expected) and a.tolist() == expected.tolist()
        assert torch.equal((a @ a.T).softmax(-1).cpu(), (expected @ expected.T).softmax(-1))
        assert a[[2, 0]].cpu().equal(expected[[2, 0]]) and float(a.sum()) == expected.sum()


def test_a_module_moves_there_with_its_tied_weights(device) -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    both = torch.nn.Sequential(first, second)
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = both(x)
    moved = copy.deepcopy(both.to("cuda"))
    assert isinstance(first.weight, torch.nn.Parameter) and first.weight is second.weight
    for model in (both, moved):
        assert {p.device for p in model.parameters()} == {CUDA}
        torch.testing.assert_close(model(x.cuda()).cpu(), expected)


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


def test_it_counts_what_the_host_waits_for(device) -> None:
    a = torch.arange(4.0, device="cuda")
    pinned = torch.zeros(4, pin_memory=True)
    rows = torch.tensor([1, 0], device="cuda")
    device.waits.clear()
    a.copy_(pinned, non_blocking=True)
    a[rows], a[1:] = 2.0, a[:3].clone()
    torch.empty_like(a).exponential_(generator=torch.Generator("cuda"))
    assert not device.waits
    for waiting in (
        lambda: a[0].item(),
        lambda: a.tolist(),
        lambda: a.cpu(),
        lambda: bool((a > 0).any()),
        lambda: a[a > 0],
        lambda: a.nonzero(),
        lambda: a[[1, 0]],
        lambda: a[torch.tensor([1])],
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: a.copy_(torch.ones(4)),
        lambda: a.copy_(pinned),
        lambda: pinned.copy_(a),
        lambda: torch.cuda.synchronize(),
    ):
        device.waits.clear()
        waiting()
        assert device.waits == [0]


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


def test_a_copy_to_the_host_arrives_when_somebody_waited_for_it(device) -> None:
    a = torch.arange(3, device="cuda")
    found = a.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    a += 1
    a += 1
    assert found.tolist() == [-1, -1, -1]
    device.waits.clear()
    event.synchronize()
    assert found.tolist() == [0, 1, 2] and device.waits == [2]  # two additions may still run


def test_a_mask_at_an_odd_address_is_a_fault(device) -> None:
    masks = torch.zeros(8, 64, device="cuda")
    query = torch.ones(1, 1, 8, 16, device="cuda")
    keys = torch.ones(1, 1, 48, 16, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.inference_mode():
        attend(query, keys, keys, masks[:, 16:])
        with pytest.raises(RuntimeError, match="misaligned"):
            attend(query, keys, keys, masks[:, 15:-1])


def test_a_graph_replays_operations_on_the_same_memory(device) -> None:
    a, table = torch.zeros(3, device="cuda"), torch.eye(3, device="cuda")
    factor = 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = a * factor
        result = (table @ doubled.view(3, 1)).flatten()
        table[0] += 1
    assert result.isnan().all()
    factor = 100  # baked in
    a.copy_(torch.tensor([1.0, 2.0, 3.0]))
    table.copy_(torch.eye(3))
    graph.replay()
    assert result.tolist() == [2, 4, 6] and table[0].tolist() == [2, 1, 1]
    graph.replay()
    assert result.tolist() == [14, 4, 6]


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
