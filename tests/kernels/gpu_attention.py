"""The attention modules of FlashInfer's C++, for the GPU of `gpu.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers.simulated_cuda import Copies, DeviceTensor

if TYPE_CHECKING:
    from tests.kernels.gpu import Kernels

NUM_SMS = 132
DTYPES = (torch.float16, torch.bfloat16)
DECODE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # utils.cuh: DISPATCH_GQA_GROUP_SIZE


class Attention(SimpleNamespace):
    """A compiled module of batch_prefill.cu or batch_decode.cu, by dtype and head sizes."""

    def __init__(
        self, kernels: Kernels, kind: str, dtype: Any, key: tuple[Any, ...], kv: Any = None
    ) -> None:
        super().__init__(kernels=kernels, kind=kind, dtype=dtype, head_dim=key[0], value_dim=key[1])
        self.kv_dtype = kv or dtype

    def plan(self, workspace: Any, ints: Any, pinned: Any, *rest: Any) -> list[int]:
        """The plan; what `run` gets of it is the size of the query tile, in packed rows."""
        own = self.kernels
        own.check(float_workspace=workspace, int_workspace=ints)
        assert own.device.capturing is None, "plan() in a capture"
        assert own.device.is_pinned(pinned), "the wrapper's int workspace is not pinned"
        address = pinned.data_ptr()
        assert address not in own.copies or not own.copies[address].in_flight, (
            "plan() while the copies of its last plan() are in flight: the pinned buffer is "
            "overwritten (record an Event after plan(), synchronize it first)"
        )
        own.copies[address] = Copies("plan()", {})
        own.calls[f"plan {self.kind}"] += 1
        if self.kind == "decode":
            indptr, batch, heads, kv_heads, page_size, graph, *_ = rest
            rows, arrays = batch, {"indptr": indptr}
            group = heads // kv_heads
            assert group in DECODE_GROUPS, f"no decode kernel for groups of {group}"
            empty = bool((torch.diff(indptr) <= 0).any())
            assert not graph or not empty, "a padding request wants a dummy page"
            tile = group
            frozen: tuple[Any, ...] = (batch, heads, kv_heads, page_size)
        else:
            qo, indptr, lens, rows, batch, heads, kv_heads, page_size, graph, *_ = rest
            causal, window, split_size, no_split = rest[11:15]
            assert int(qo[-1]) <= rows, "more query rows than the graph was planned for"
            assert not graph or (split_size in (None, -1) and not no_split), "not safe in graphs"
            arrays, group = (
                {"qo_indptr": qo, "kv_indptr": indptr, "kv_lens": lens},
                heads // kv_heads,
            )
            mean = ((rows - batch + 1) % 2**32 if graph else rows // batch) * group
            # utils.cuh: FA2DetermineCtaTileQ
            tile = 128 if mean > 64 and self.value_dim < 256 else 64 if mean > 16 else 16
            longest = int(torch.diff(qo).max()) if batch else 0
            assert causal or window < 0 or longest <= tile, (
                "a window without causal: split KV covers window_left and one query tile of keys"
            )
            # scheduler.cuh: partial outputs of split KV, float32.
            padded = -(-rows * group // tile) + batch - 1 if graph else 0
            splits = 2 * NUM_SMS // kv_heads
            need = heads * (self.value_dim + 1) * 4 * max(splits * 128, max(splits, padded) * tile)
            assert workspace.numel() >= need, f"the workspace is short of {need} bytes"
            frozen = (tile, batch, heads, kv_heads, page_size, causal, window)
        for name, array in arrays.items():
            assert not isinstance(array, DeviceTensor), f"{name} must be on the host"
            assert array.dtype == torch.int32 and array.is_contiguous(), f"{name} must be int32"
            assert name == "kv_lens" or (torch.diff(array) >= 0).all(), f"{name} must ascend"
        if graph:
            before = own.frozen.setdefault(address, frozen)
            assert frozen == before, f"a captured graph has {before} baked in, not {frozen}"
        return [tile, *[0] * 14]

    def _shape(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        own = self.kernels
        own.check(out=out, **({} if lse is None else {"lse": lse}))
        for tensor, dim in ((q, self.head_dim), (k, self.head_dim), (v, self.value_dim)):
            planned = self.dtype if tensor is q else self.kv_dtype
            assert isinstance(tensor, DeviceTensor) and tensor.dtype == planned, "plan()'s dtype"
            assert tensor.shape[-1] == dim and tensor.stride(-1) == 1
        assert out.dtype == self.dtype and out.shape == (*q.shape[:2], self.value_dim)
        assert lse is None or (lse.shape == q.shape[:2] and lse.dtype == torch.float32)

    def paged_run(
        self, workspace: Any, ints: Any, info: list[int], q: Any, k_pages: Any, v_pages: Any,
        qo_indptr: Any, indptr: Any, indices: Any, last: Any, out: Any, lse: Any, mask_mode: int,
        layout: int, window: int, pdl: bool, *rest: Any,
    ) -> None:  # fmt: skip
        self._shape(q, k_pages, v_pages, out, lse)
        self._pages(k_pages, v_pages, indptr, indices, last)
        self.kernels.check(qo_indptr=qo_indptr)
        options = (mask_mode == 1, window, *rest[6:8], info[0], "paged")
        args = (q, k_pages, v_pages, qo_indptr, indptr, indices, last, out, lse)
        self.kernels.device.launch(self.attend, *args, *options)

    def ragged_run(
        self, workspace: Any, ints: Any, info: list[int], q: Any, k: Any, v: Any, qo_indptr: Any,
        kv_indptr: Any, out: Any, lse: Any, mask_mode: int, layout: int, window: int, pdl: bool,
        *rest: Any,
    ) -> None:  # fmt: skip
        self._shape(q, k, v, out, lse)
        assert self.kv_dtype == self.dtype, "a prompt attends over what a hit would not"
        self.kernels.check(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        options = (mask_mode == 1, window, *rest[6:8], info[0], "ragged")
        args = (q, k, v, qo_indptr, kv_indptr, None, None, out, lse)
        self.kernels.device.launch(self.attend, *args, *options)

    def run(
        self, workspace: Any, ints: Any, info: list[int], q: Any, k_pages: Any, v_pages: Any,
        indptr: Any, indices: Any, last: Any, out: Any, lse: Any, layout: int, window: int,
        pdl: bool, alibi: Any, cap: float, scale: float, *rest: Any,
    ) -> None:  # fmt: skip
        self._shape(q, k_pages, v_pages, out, lse)
        self._pages(k_pages, v_pages, indptr, indices, last)
        options = (True, window, cap, scale, info[0], "decode")
        args = (q, k_pages, v_pages, None, indptr, indices, last, out, lse)
        self.kernels.device.launch(self.attend, *args, *options)

    def _pages(self, k_pages: Any, v_pages: Any, indptr: Any, indices: Any, last: Any) -> None:
        self.kernels.check(indptr=indptr, indices=indices, last_page_len=last)
        assert k_pages.stride() == v_pages.stride(), "batch_decode.cu: k_strides == v_strides"

    def attend(
        self, q: Any, keys: Any, values: Any, qo_indptr: Any, indptr: Any, indices: Any, last: Any,
        out: Any, lse: Any, causal: bool, window: int, cap: float, scale: float, tile: int,
        name: str,
    ) -> None:  # fmt: skip
        """Each request's rows over its keys: of its pages, or, without `indices`, its own rows."""
        self.kernels.calls[name] += 1
        starts = indptr.tolist()
        rows = list(range(len(starts))) if qo_indptr is None else qo_indptr.tolist()
        if indices is not None:
            lens = request_lens(starts, last.tolist(), keys.shape[1])
        for owner in range(len(starts) - 1):
            own = slice(rows[owner], rows[owner + 1])
            mine = slice(starts[owner], starts[owner + 1])
            k, v = keys[mine], values[mine]
            if indices is not None:
                table = indices[mine].long()
                assert ((table >= 0) & (table < len(keys))).all(), "pages outside of the pool"
                k, v = (side[table].flatten(0, 1)[: lens[owner]] for side in (keys, values))
            k, v = (x.double() if x.itemsize == 1 else x for x in (k, v))
            result, sums = self._attend(q[own], k, v, causal, window, cap, scale)
            out[own] = result.to(out.dtype)
            if lse is not None:
                lse[own] = sums.float()
            self._count(len(q[own]), len(k), q.shape[1] // keys.shape[-2], causal, window, tile)

    def _attend(
        self, q: Any, k: Any, v: Any, causal: bool, window: int, cap: float, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [m, Hq, D], k and v [n, Hkv, D] -> out [m, Hq, Dv], lse [m, Hq] of base 2."""
        read = slice(0 if window < 0 else max(0, len(k) - len(q) - window), None)
        assert not len(q) or not (k[read].isnan().any() or v[read].isnan().any()), (
            "the kernel reads K/V that is NaN: a slot that was not appended to before run()"
        )
        position = torch.arange(len(k) - len(q), len(k))[:, None]
        key = torch.arange(len(k))[None]
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if causal:
            seen &= key <= position
        if window >= 0:
            seen &= key >= position - window
        group = q.shape[1] // k.shape[1]
        k, v = (side.double().nan_to_num().repeat_interleave(group, dim=1) for side in (k, v))
        scores = torch.einsum("mhd,nhd->mhn", q.double(), k) * scale
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen[:, None, :], -math.inf)
        lse = torch.logsumexp(scores, dim=-1)  # -inf where nothing is seen
        weights = torch.exp(scores - lse.nan_to_num(neginf=0)[:, :, None])
        return torch.einsum("mhn,nhd->mhd", weights, v), lse / math.log(2)

    def _count(
        self, queries: int, keys: int, group: int, causal: bool, window: int, tile: int
    ) -> None:
        """Add what the query tiles of one request load."""
        for start in range(0, queries * group, tile):
            first, last = start // group, (min(start + tile, queries * group) - 1) // group
            end = min(keys, keys - queries + last + 1) if causal else keys
            begin = 0 if window < 0 else max(0, keys - queries + first - window)
            self.kernels.kv_tokens_read += max(0, end - begin)


class MLA(Attention):
    """A compiled module of batch_mla_plan.cu and batch_mla_run.cu. What is planned lies in the
    int workspace, of which a captured launch knows the address alone."""

    def __init__(self, kernels: Kernels, backend: str, q: Any, kv: Any, o: Any, *key: Any) -> None:
        assert backend == "fa2" and q == kv == o and q in DTYPES, f"no kernel for {q}, {kv}, {o}"
        assert key[:3] == (torch.int32, 512, 64), f"no kernel for {key}"
        super().__init__(kernels, "mla", q, key[1:])

    def plan(
        self, workspace: Any, ints: Any, pinned: Any, qo: Any, indptr: Any, lens: Any, heads: int,
        dim: int, causal: bool,
    ) -> Any:  # fmt: skip
        self.kernels.check(float_workspace=workspace, int_workspace=ints)
        assert self.kernels.device.capturing is None, "plan() in a capture"
        self.kernels.calls["plan mla"] += 1
        for array in (qo, indptr, lens):
            assert not isinstance(array, DeviceTensor) and array.dtype == torch.int32
        assert causal and dim == self.head_dim and len(qo) == len(indptr) == len(lens) + 1
        cluster = 2 if int(qo[-1]) * heads // len(lens) > 64 else 1  # scheduler.cuh: MLAPlan
        need = 2 * (NUM_SMS // cluster) * 64 * cluster * (2 * dim + 4)
        assert workspace.numel() >= need, f"the workspace is short of {need} bytes"
        work = torch.cat([torch.tensor([len(lens), cluster, heads]), qo, indptr, lens]).int()
        pinned.view(torch.int32)[: len(work)] = work
        return [cluster, heads], 4 * len(work)

    def run(  # type: ignore[override]
        self, workspace: Any, ints: Any, info: Any, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any,
        indices: Any, out: Any, lse: Any, mask_mode: int, heads: int, page_size: int, scale: float,
        base_e: bool, *rest: Any,
    ) -> None:  # fmt: skip
        self.kernels.check(int_workspace=ints, kv_indices=indices, out=out, lse=lse)
        for tensor, dim in ((q_nope, 512), (q_pe, 64), (ckv, 512), (kpe, 64), (out, 512)):
            assert isinstance(tensor, DeviceTensor) and tensor.dtype == self.dtype, "plan()'s dtype"
            assert tensor.ndim == 3 and tensor.shape[2] == dim and tensor.stride(2) == 1
        assert ckv.shape[1] == kpe.shape[1] == page_size, f"page_size {page_size} was planned"
        assert q_nope.shape[1] == heads == info[1], f"{info[1]} heads were planned"
        assert mask_mode == 1 and not base_e and rest == (1.0, 1.0, None)
        args = (ints, q_nope, q_pe, ckv, kpe, indices, out, lse)
        self.kernels.device.launch(self.attend_latents, *args, scale, info)

    def attend_latents(
        self, ints: Any, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, indices: Any, out: Any,
        lse: Any, scale: float, info: list[int],
    ) -> None:  # fmt: skip
        batch, *planned = ints.view(torch.int32)[:3].tolist()
        assert planned == info, f"a captured graph has {info} baked in, not {planned}"
        work = ints.view(torch.int32)[3 : 5 + 3 * batch].split([batch + 1, batch + 1, batch])
        qo_indptr, indptr, lens = work
        query, keys = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1)[:, :, None]
        last, tile = (lens - 1) % ckv.shape[1] + 1, 64 * info[0]
        self.attend(
            query, keys, ckv[:, :, None], qo_indptr, indptr, indices, last, out, lse, True, -1, 0,
            scale, tile, "mla",
        )  # fmt: skip


def request_lens(starts: Sequence[int], last: Sequence[int], page_size: int) -> list[int]:
    """Tokens of each request; 0 without pages, as the kernels have it."""
    lens = []
    for first, end, used in zip(starts, starts[1:], last, strict=False):
        assert end == first or 1 <= used <= page_size, f"last_page_len {used} of {page_size}"
        lens.append((end - first - 1) * page_size + used if end > first else 0)
    return lens
