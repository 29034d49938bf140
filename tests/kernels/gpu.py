"""A simulated GPU on which FlashInfer's own Python runs, over kernels of ours.

The package is the real one, which imports without CUDA (`make test-gpu` brings it). What its
wrappers refuse, copy and freeze is theirs. Its C++ begins behind functions like
`get_page_module`: there stand the kernels below, in `gpu_attention.py` and in `moe.py`, in plain
torch, with the arguments that the C++ takes. What the C++ checks is an assertion here, beside the
name of its file in flashinfer/data/csrc; where it would read garbage in silence, there is one too.

What a CPU hides is made visible: `plan()` copies out of a pinned buffer of the wrapper, which the
next `plan()` overwrites (`simulated_cuda.Copies`); a captured graph launches with the plan of its
capture; `kv_tokens_read` counts the tokens whose K/V would be loaded, once a query tile.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from radixcache.kernels.recurrence import Slots, Tokens
from radixcache.kernels.torch.recurrence import recur as loop
from tests.helpers.simulated_cuda import Copies, Device, DeviceTensor, simulated_cuda
from tests.kernels.gpu_attention import DTYPES, MLA, Attention, request_lens
from tests.kernels.moe import MoE

HEAD_DIMS = (64, 128, 256)
FA2_MLA = "mla._batch_mla._backends.fa2_backend"


class Gpu(NamedTuple):
    """A simulated device, FlashInfer there, our backend's module over it, and what is launched."""

    device: Device
    flashinfer: ModuleType
    backend: ModuleType
    kernels: Kernels


@contextmanager
def simulated_gpu(any_dtype: bool = True, index: int = 0) -> Iterator[Gpu]:
    """A GPU with FlashInfer; with `any_dtype`, in float32 and with heads of 16 too, which the real
    kernels do not have."""
    flashinfer = pytest.importorskip("flashinfer", reason="`make test-gpu` brings it")
    backend = importlib.import_module("radixcache.kernels.flashinfer.attention")
    names = "prefill decode page cascade norm rope activation sampling utils fused_moe.core".split()
    parts = {name: importlib.import_module(f"flashinfer.{name}") for name in [*names, FA2_MLA]}
    mla_backend = importlib.import_module("radixcache.kernels.flashinfer.mla")
    staged = importlib.import_module("flashinfer.jit.attention.modules")._BatchMLAModuleProxy
    with simulated_cuda(index) as device, ExitStack() as stack:
        kernels = Kernels(device, any_dtype)
        attention = kernels.attention
        for part, name, value in (
            ("prefill", "get_batch_prefill_module", kernels.prefill),
            ("decode", "get_batch_prefill_module", lambda _, *key: attention("prefill", *key)),
            ("decode", "get_batch_decode_module", lambda *key: attention("decode", *key)),
            (FA2_MLA, "get_batch_mla_module", lambda *key: staged(MLA(kernels, *key))),
            ("page", "get_page_module", lambda: kernels),
            ("cascade", "get_cascade_module", lambda: kernels),
            ("norm", "get_norm_module", lambda: kernels),
            ("norm", "_use_cuda_norm", lambda _: True),
            ("rope", "get_rope_module", lambda: kernels),
            ("activation", "get_act_and_mul_module", lambda _: kernels),
            ("sampling", "get_sampling_module", lambda: kernels),
            ("fused_moe.core", "gen_cutlass_fused_moe_sm90_module", lambda *_: kernels.moe),
            ("utils", "_cache_buf", {}),
            *((p, "device_support_pdl", lambda _: True) for p in parts),
        ):
            if hasattr(parts[part], name):
                stack.enter_context(patch.object(parts[part], name, value))
        if any_dtype:
            stack.enter_context(patch.object(backend, "DTYPES", (*DTYPES, torch.float32)))
            stack.enter_context(patch.object(backend, "HEAD_DIMS", (16, *HEAD_DIMS)))
        loaded = parts["fused_moe.core"].get_cutlass_fused_moe_module  # once in a process
        loaded.cache_clear()
        stack.callback(loaded.cache_clear)
        # Tests take either away, to see what happens.
        both = {one.__name__: one for one in (flashinfer, backend, mla_backend)}
        recurrence = SimpleNamespace(recur=kernels.recur)  # in place of Triton's
        both["radixcache.kernels.triton.recurrence"] = recurrence
        modules = stack.enter_context(pytest.MonkeyPatch.context())  # what is imported here stays
        for name, module in both.items():
            modules.setitem(sys.modules, name, module)
        # Zeroing more takes long.
        wrappers = importlib.import_module("radixcache.kernels.flashinfer.wrappers")
        stack.enter_context(patch.object(wrappers, "WORKSPACE", 17 << 20))
        yield Gpu(device, flashinfer, backend, kernels)


class Kernels:
    """What FlashInfer launches.

    Attributes:
        calls: how often each kernel ran, and each attention was planned, by name.
        kv_tokens_read: tokens whose K/V attention has loaded.
    """

    def __init__(self, device: Device, any_dtype: bool) -> None:
        self.device, self.any_dtype = device, any_dtype
        self.calls: Counter[str] = Counter()
        self.kv_tokens_read = 0
        self.moe = MoE(self)
        self.copies: dict[int, Copies] = {}
        self.frozen: dict[int, tuple[Any, ...]] = {}

    def prefill(self, version: str, *key: Any) -> Attention:
        if version != "fa2":
            raise RuntimeError(f"nvcc compiles no {version} here")
        return self.attention("prefill", *key)

    def attention(self, kind: str, q: Any, kv: Any, o: Any, index: Any, *key: Any) -> Attention:
        """The compiled module for these types and heads."""
        assert q == o and (self.any_dtype or q in DTYPES), f"no kernel for {q}, {kv}, {o}"
        assert kv in (q, torch.float8_e4m3fn), f"no kernel for {q}, {kv}, {o}"
        dim, value_dim = key[:2]
        assert dim == value_dim or kind == "prefill", "batch_decode.cu: one head_dim"
        assert self.any_dtype or {dim, value_dim} <= {*HEAD_DIMS}, f"no kernel for heads of {dim}"
        assert index == torch.int32, "the kernels would misread other indices"
        return Attention(self, kind, q, tuple(key), kv)

    def check(self, **tensors: torch.Tensor) -> None:
        """tvm_ffi_utils.h: CHECK_INPUT, which is CHECK_CUDA and CHECK_CONTIGUOUS."""
        for name, tensor in tensors.items():
            assert isinstance(tensor, DeviceTensor), f"{name} must be a CUDA tensor"
            assert tensor.is_contiguous(), f"{name} must be contiguous"

    def append_paged_kv_cache(
        self, key: Any, value: Any, owners: Any, positions: Any, k_pages: Any, v_pages: Any,
        indices: Any, indptr: Any, last_page_len: Any, layout: int,
    ) -> None:  # fmt: skip
        index = {"batch_indices": owners, "positions": positions, "kv_indices": indices,
                 "kv_indptr": indptr, "kv_last_page_len": last_page_len}  # fmt: skip
        self.check(**index)
        for name, array in index.items():  # the kernel gets their addresses alone
            assert array.dtype == torch.int32 and array.ndim == 1, f"{name} must be flat int32"
        assert layout == 0, "NHD"
        assert k_pages.stride() == v_pages.stride(), "page.cu: k_strides == v_strides"
        assert len(indptr) == len(last_page_len) + 1 and len(owners) == len(positions) == len(key)
        for rows in (key, value):
            assert rows.shape == (len(owners), *k_pages.shape[2:]) and rows.stride(-1) == 1
            assert rows.dtype == k_pages.dtype == v_pages.dtype, "bytes are copied, not converted"
        # A graph may read more page numbers than there were at its capture.
        memory = indices.memory
        length = memory.untyped_storage().nbytes() // 4 - memory.storage_offset()
        everything = DeviceTensor(memory.as_strided((length,), (1,)))
        arrays = (owners, positions, k_pages, v_pages, everything, indptr, last_page_len)
        self.device.launch(self.append, key, value, *arrays)

    def append(
        self, key: Any, value: Any, owners: Any, positions: Any, k_pages: Any, v_pages: Any,
        indices: Any, indptr: Any, last_page_len: Any,
    ) -> None:  # fmt: skip
        self.calls["append"] += 1
        page_size, starts = k_pages.shape[1], indptr.tolist()
        lens = request_lens(starts, last_page_len.tolist(), page_size)
        written: dict[tuple[int, int], int] = {}
        places = zip(owners.tolist(), positions.tolist(), strict=True)
        for row, (owner, position) in enumerate(places):
            assert 0 <= position < lens[owner], f"row {row}: no page holds position {position}"
            page = int(indices[starts[owner] + position // page_size])
            assert 0 <= page < len(k_pages), f"page {page} lies outside of the pool"
            slot = page, position % page_size
            # Which of two rows wins is not determined: both must stand for one token, or for one
            # that nobody reads, in the spare page.
            other = row if page == len(k_pages) - 1 else written.setdefault(slot, row)
            for rows in (key, value):
                same = torch.allclose(rows[row].float(), rows[other].float(), 0.02, 0.02)
                assert same, f"two rows with other K/V go to slot {slot}"
            k_pages[slot], v_pages[slot] = key[row], value[row]

    def recur(self, states: Any, tokens: Tokens, slots: Slots) -> Any:
        """`triton_recurrence.recur`, which gets addresses and the strides of rows."""
        self.check(states=states, **slots._asdict())
        for rows in tokens[:5]:
            assert rows.dtype == states.dtype == torch.float32 and rows.stride(-1) == 1
            assert rows.ndim == 2 or rows.stride(1) == rows.shape[2], "heads lie side by side"
        assert all(numbers.dtype == torch.int32 for numbers in slots)
        return self.device.launch(self.move_on, states, *tokens, *slots)

    def move_on(self, states: Any, *inputs: Any) -> Any:
        self.calls["recur"] += 1
        tokens, slots = Tokens(*inputs[:6]), Slots(*inputs[6:])
        starts, read, write, keeps = (numbers.tolist() for numbers in slots)
        assert starts[-1] == len(keeps) == len(tokens.value), "rows of nobody"
        spare = len(states) - 1
        written = [slot for slot in write + keeps if slot not in (-1, spare)]
        assert len(written) == len({*written}), f"two states go to one of the slots {written}"
        for before, after in zip(read, write, strict=True):
            assert before != spare, "the spare slot is read"
            assert before < 0 or before == after or before not in written, f"{before} is a race"
        return loop(states, tokens, slots)

    def merge_state_in_place(self, v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> None:
        self.check(v=v, s=s, v_other=v_other, s_other=s_other)  # cascade.cu
        assert v.shape == v_other.shape and s.shape == s_other.shape == v.shape[:2]
        assert s.dtype == s_other.dtype == torch.float32
        assert mask is None or (mask.shape == v.shape[:1] and mask.dtype == torch.uint8)
        threads = -(-v.shape[2] // max(8, v.shape[2] // 32)) * v.shape[1]
        assert threads <= 1024, "cascade.cuh: too many heads for one block of threads"
        self.device.launch(self.merge, v, s, v_other, s_other, mask)

    def merge(self, v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> None:
        self.calls["merge"] += 1
        merged = torch.ones(len(v), dtype=torch.bool) if mask is None else mask.bool()
        total = torch.logaddexp2(s.double(), s_other.double())
        reference = total.nan_to_num(neginf=0)
        own, other = (torch.exp2(side.double() - reference)[:, :, None] for side in (s, s_other))
        mixed = (v.double() * own + v_other.double() * other).to(v.dtype)
        v[merged], s[merged] = mixed[merged], total.float()[merged]

    def gemma_rmsnorm(self, out: Any, x: Any, weight: Any, eps: float, pdl: bool) -> None:
        assert x.ndim == 2  # norm.cu
        self.rmsnorm(out, x, weight.double().add(1).to(x.dtype), eps, pdl)

    def gemma_fused_add_rmsnorm(
        self, x: Any, residual: Any, weight: Any, eps: float, pdl: bool
    ) -> None:
        self.fused_add_rmsnorm(x, residual, weight.double().add(1).to(x.dtype), eps, pdl)

    def rmsnorm(self, out: Any, x: Any, weight: Any, eps: float, pdl: bool) -> None:
        assert x.ndim in (2, 3) and weight.shape == x.shape[-1:] and out.shape == x.shape  # norm.cu
        assert x.stride(-1) == out.stride(-1) == 1 and x.dtype == weight.dtype == out.dtype

        def rmsnorm(out: Any, x: Any, weight: Any) -> None:
            out.copy_(_normed(x, weight, eps))

        self.device.launch(rmsnorm, out, x, weight)

    def fused_add_rmsnorm(self, x: Any, residual: Any, weight: Any, eps: float, pdl: bool) -> None:
        assert x.ndim == 2 and x.shape == residual.shape and weight.shape == x.shape[1:]  # norm.cu
        assert x.stride(-1) == residual.stride(-1) == 1 and x.data_ptr() != residual.data_ptr()

        def fused_add_rmsnorm(x: Any, residual: Any, weight: Any) -> None:
            residual.add_(x)
            x.copy_(_normed(residual, weight, eps))

        self.device.launch(fused_add_rmsnorm, x, residual, weight)

    def silu_and_mul(self, out: Any, x: Any, pdl: bool) -> None:
        self.check(out=out, input=x)  # activation.cuh takes no strides
        assert x.dtype == out.dtype

        def silu_and_mul(out: Any, x: Any) -> None:
            gate, up = x.double().chunk(2, -1)
            out.copy_(gate * gate.sigmoid() * up)

        self.device.launch(silu_and_mul, out, x)

    def gelu_tanh_and_mul(self, out: Any, x: Any, pdl: bool) -> None:
        self.check(out=out, input=x)
        assert x.dtype == out.dtype

        def gelu_tanh_and_mul(out: Any, x: Any) -> None:
            gate, up = x.double().chunk(2, -1)
            out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)

        self.device.launch(gelu_tanh_and_mul, out, x)

    def apply_rope_pos_ids_cos_sin_cache(
        self, q: Any, k: Any, q_rope: Any, k_rope: Any, table: Any, positions: Any, interleave: bool
    ) -> None:
        self.check(cos_sin_cache=table, pos_ids=positions)  # rope.cu
        assert q.ndim == k.ndim == 3 and len(q) == len(k) == len(positions) and not interleave
        assert q.data_ptr() == q_rope.data_ptr() and k.data_ptr() == k_rope.data_ptr()
        assert table.dtype == torch.float32 and table.shape[1] <= q.shape[2] == k.shape[2]

        def rope(q: Any, k: Any, table: Any, positions: Any) -> None:
            assert ((positions >= 0) & (positions < len(table))).all(), "it reads past its table"
            cos, sin = table.double()[positions.long()][:, None].chunk(2, -1)
            for heads in (q[..., : table.shape[1]], k[..., : table.shape[1]]):
                low, high = heads.double().chunk(2, -1)
                heads.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))

        self.device.launch(rope, q, k, table, positions)

    def top_k_renorm_probs(
        self, probs: Any, top_k: Any, _: int, buffer: Any, is_deterministic: bool = False
    ) -> Any:
        self.check(probs=probs, top_k=top_k)  # renorm.cu
        assert is_deterministic, "sums would depend on the order of blocks"

        def top_k_renorm_probs(probs: Any, top_k: Any) -> Any:
            ordered = probs.sort(-1, descending=True).values
            last = top_k[:, None].long().clamp(max=probs.shape[1]) - 1
            return _renormalised(probs, ordered.gather(-1, last))

        return self.device.launch(top_k_renorm_probs, probs, top_k)

    def top_p_renorm_probs(
        self, probs: Any, top_p: Any, _: float, is_deterministic: bool, workspace: Any
    ) -> Any:
        self.check(probs=probs, top_p=top_p)  # renorm.cu
        assert top_p.dtype == torch.float32
        assert is_deterministic, "sums would depend on the order of blocks"

        def top_p_renorm_probs(probs: Any, top_p: Any) -> Any:
            ordered = probs.double().sort(-1, descending=True).values
            reached = ordered.cumsum(-1) >= top_p[:, None] * ordered.sum(-1, keepdim=True)
            last = torch.where(reached.any(-1), reached.int().argmax(-1), probs.shape[1] - 1)
            return _renormalised(probs, ordered.gather(-1, last[:, None]).float())

        return self.device.launch(top_p_renorm_probs, probs, top_p)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = x.double()
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _renormalised(probs: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(probs < least, 0)
    return kept / kept.sum(-1, keepdim=True)
