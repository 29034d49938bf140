"""A stand-in for the package `flashinfer`: what its wrappers promise, in plain torch on a CPU.

Tests put this module into ``sys.modules["flashinfer"]``. It follows the documentation and the
behaviour of 0.6.6 to 0.7.2 with the fa2 kernels and NHD pages, and is strict: where the real code
would read garbage in silence, an AssertionError says what is wrong; where the real code raises some
other error, it is an AssertionError here too. Options are keyword-only (in the real package they
move between versions). Nothing here is fast.

What a CPU hides is made visible:

- Copies to the device. On a GPU `plan()` copies host arrays asynchronously, out of the caller's
  pinned arrays and out of one pinned buffer of the wrapper. While such copies are in flight
  (`pretend_cuda.Copies`), a second `plan()` of the wrapper, or a change to an array that `plan()`
  was given, fails.
- CUDA graphs. In graph mode `run()` reads only the buffers given to the constructor, and what a
  captured graph has frozen may not change from plan to plan.
- Work. `kv_tokens_read` counts the tokens whose K/V the kernels would load, once per query tile.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from tests.pretend_cuda import Copies

__version__ = "0.7.2.post1"

# The real kernels take neither; tests switch them on to compare sharply or with little data.
ALLOW_FLOAT32 = False
ALLOW_ANY_HEAD_DIM = False

NUM_SMS = 132

# ("plan", wrapper), ("run", wrapper), and the other kernels by their names: ("append",), ...
calls: list[tuple[str, ...]] = []
kv_tokens_read = 0

_HEAD_DIMS = (64, 128, 256)
_DECODE_GROUPS = (1, 2, 3, 4, 8)  # 0.7.2 has 6 and 16 as well
_names = itertools.count()


def reset() -> None:
    """Forget calls, counts and copies in flight; the switches off, names from 0 again."""
    global ALLOW_FLOAT32, ALLOW_ANY_HEAD_DIM, kv_tokens_read, _names
    ALLOW_FLOAT32 = ALLOW_ANY_HEAD_DIM = False
    kv_tokens_read = 0
    _names = itertools.count()
    calls.clear()
    Copies.reset()


class _Wrapper:
    """What all wrappers share: their workspace, the rules of plan() and run(), graph mode."""

    kind = ""

    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        buffers: dict[str, torch.Tensor | None],
    ) -> None:
        self.name = f"{self.kind}-{next(_names)}"
        assert kv_layout == "NHD", "only NHD pages are emulated"
        assert backend == "fa2", f"pass backend='fa2': {backend!r} may take other kernels on Hopper"
        assert workspace.dtype == torch.uint8 and workspace.ndim == 1 and workspace.is_contiguous()
        assert workspace.data_ptr() % 16 == 0, "the workspace must be 16-byte aligned"
        self._workspace_bytes = workspace.numel()
        self._graph = use_cuda_graph
        self._buffers: dict[str, torch.Tensor] = {}
        for name, buffer in buffers.items():
            if use_cuda_graph:
                assert torch.is_tensor(buffer), f"graph mode needs the buffer {name}"
                self._buffers[name] = _index(name, buffer)
            else:
                assert buffer is None, f"{name} has no effect outside graph mode"
        self._arrays: dict[str, torch.Tensor] = {}  # what the kernels read
        self._planned: dict[str, torch.Tensor] = {}  # what plan() scheduled
        self._frozen: dict[str, object] = {}
        self._max_rows: int | None = None
        self._copies: Copies | None = None

    def _start_plan(
        self,
        host: dict[str, torch.Tensor],
        indices: torch.Tensor | None,
        unused: dict[str, torch.Tensor],
    ) -> None:
        """Take the index arrays: into the buffers in graph mode, as copies otherwise.

        `unused` arrays are copied to the device as well, but no fa2 kernel reads them.
        """
        calls.append(("plan", self.name))
        assert self._copies is None or not self._copies.in_flight, (
            f"plan() of {self.name} while the copies of its last plan() are in flight: "
            "the pinned buffer is overwritten (record an Event after plan(), synchronize it first)"
        )
        for name, array in host.items():
            _index(name, array)
        if self._graph:
            for name, array in host.items():
                buffer = self._buffers[name]
                assert len(array) == len(buffer), (
                    f"graph mode has fixed the length of {name} at {len(buffer)}, not {len(array)}"
                )
                buffer.copy_(array)
            if indices is not None:
                buffer = self._buffers["indices"]
                assert len(_index("indices", indices)) <= len(buffer), (
                    f"{len(indices)} page indices do not fit the buffer of {len(buffer)}"
                )
                buffer[: len(indices)].copy_(indices)
            self._arrays = self._buffers
        else:
            self._arrays = {name: array.clone() for name, array in host.items()}
            if indices is not None:  # on the device already: kept, not copied
                self._arrays["indices"] = _index("indices", indices)
        self._planned = {name: array.clone() for name, array in host.items()}
        self._copies = Copies(f"{self.name}.plan()", host | unused)

    def _check_splits(self, fixed_split_size: int | None, disable_split_kv: bool) -> None:
        # What a graph launches would follow the lengths; 0.6.6 masks padding blocks only if split.
        assert not self._graph or not (fixed_split_size or disable_split_kv), (
            "fixed_split_size and disable_split_kv are not safe with CUDA graphs"
        )

    def _schedule(self, problem: _Problem, offsets: list[int], **scalars: int) -> None:
        """Choose the query tile; in graph mode, one for any batch of as many rows."""
        rows, batch, tiles = offsets[-1], len(offsets) - 1, 0
        if self._graph:
            if self._max_rows is None:
                self._max_rows, self._frozen = rows, {**problem.scalars(), **scalars}
            assert rows <= self._max_rows, (
                f"graph mode was first planned with {self._max_rows} query rows; {rows} are more"
            )
            for name, value in {**problem.scalars(), **scalars}.items():
                assert value == self._frozen[name], (
                    f"a captured graph has {name}={self._frozen[name]} baked in; "
                    f"this plan() has {value}"
                )
            self._tile = problem.tile((self._max_rows - batch + 1) % 2**32 * problem.group)
            tiles = -(-self._max_rows * problem.group // self._tile) + batch - 1
        else:
            self._tile = problem.tile(rows * problem.group // batch)
        longest = max(end - start for start, end in itertools.pairwise(offsets))
        assert problem.causal or problem.window < 0 or longest <= self._tile, (
            "a window without causal: split KV covers window_left and one query tile of keys only"
        )
        problem.check_workspace(self._workspace_bytes, tiles, self._tile)

    def _start_run(self) -> None:
        calls.append(("run", self.name))
        assert self._copies is not None, f"run() of {self.name} before plan()"
        if self._copies.in_flight:
            self._copies.check("between plan() and run()")
        for name in self._planned:
            if name.endswith("indptr"):
                assert torch.equal(self._arrays[name], self._planned[name]), (
                    f"{name} of {self.name} is not what plan() wrote: another plan() shares it"
                )


def _index(name: str, array: Any) -> torch.Tensor:
    assert isinstance(array, torch.Tensor), f"{name} must be a tensor, not {type(array).__name__}"
    assert array.dtype == torch.int32, f"{name} must be int32; the kernels would misread others"
    assert array.ndim == 1 and array.is_contiguous(), f"{name} must be flat and contiguous"
    return array


def _indptr(name: str, array: torch.Tensor) -> list[int]:
    offsets = [int(x) for x in array]
    assert len(offsets) > 1, "a plan needs at least one request"
    assert offsets[0] == 0 and offsets == sorted(offsets), f"{name} must ascend from 0: {offsets}"
    return offsets


class _Problem:
    """The scalars of one plan(), checked, and the attention itself."""

    def __init__(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None,
        causal: bool,
        pos_encoding_mode: str,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: str | torch.dtype,
        kv_data_type: str | torch.dtype | None,
        o_data_type: str | torch.dtype | None,
    ) -> None:
        assert num_qo_heads % num_kv_heads == 0, "query heads must be a multiple of KV heads"
        assert pos_encoding_mode == "NONE", "positions inside the kernels are not emulated"
        self.heads = num_qo_heads, num_kv_heads
        self.group = num_qo_heads // num_kv_heads
        self.head_dims = head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo
        for dim in self.head_dims:
            assert ALLOW_ANY_HEAD_DIM or dim in _HEAD_DIMS, f"no kernel has head_dim {dim}"
        self.causal = causal
        self.scale = 1 / math.sqrt(head_dim_qk) if sm_scale is None else float(sm_scale)
        assert window_left >= -1, "-1 is the only negative window_left with a meaning"
        self.window = window_left
        assert logits_soft_cap is None or logits_soft_cap >= 0
        self.cap = float(logits_soft_cap or 0)
        self.q_dtype = _dtype(q_data_type)
        self.kv_dtype = self.q_dtype if kv_data_type is None else _dtype(kv_data_type)
        o_dtype = self.q_dtype if o_data_type is None else _dtype(o_data_type)
        assert self.q_dtype == self.kv_dtype == o_dtype, "mixed dtypes are not emulated"

    def scalars(self) -> dict[str, object]:
        return vars(self).copy()

    def tile(self, packed_rows: int) -> int:
        """Packed rows (rows times group) of a query tile, as fa2 chooses on sm_80 and later."""
        if packed_rows > 64 and self.head_dims[1] < 256:
            return 128
        return 64 if packed_rows > 16 else 16

    def check_workspace(self, available: int, padded_tiles: int, tile: int) -> None:
        """Partial outputs of split KV, float32: 0.6.6's formula, the larger of the versions'."""
        heads, kv_heads = self.heads
        row = heads * (self.head_dims[1] + 1) * 4
        splits = 2 * NUM_SMS // kv_heads
        need = row * max(splits * 128, max(splits, padded_tiles) * tile)
        assert available >= need, f"this plan may need {need} bytes of workspace, not {available}"

    def check_tensors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, tensor, dtype, heads, dim in (
            ("q", q, self.q_dtype, self.heads[0], self.head_dims[0]),
            ("k", k, self.kv_dtype, self.heads[1], self.head_dims[0]),
            ("v", v, self.kv_dtype, self.heads[1], self.head_dims[1]),
        ):
            assert tensor.dtype == dtype, (
                f"{name} is {tensor.dtype} but plan() said {dtype} (its default is float16)"
            )
            assert tensor.shape[-2:] == (heads, dim), (
                f"{name} has {tuple(tensor.shape[-2:])} heads and dim; plan() said {(heads, dim)}"
            )
            assert tensor.stride(-1) == 1, f"the last dimension of {name} must be contiguous"

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One request: q [m, Hq, D], k and v [n, Hkv, D] -> out [m, Hq, Dv], lse [m, Hq] base 2."""
        read = slice(0 if self.window < 0 else max(0, len(k) - len(q) - self.window), None)
        assert not len(q) or not (k[read].isnan().any() or v[read].isnan().any()), (
            "the kernel reads K/V that is NaN: a slot that was not appended to before run()"
        )
        visible = self.visible(len(q), len(k))  # [m, n]
        keys = k.double().nan_to_num().repeat_interleave(self.group, dim=1)
        values = v.double().nan_to_num().repeat_interleave(self.group, dim=1)
        scores = torch.einsum("mhd,nhd->mhn", q.double(), keys) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        scores = scores.masked_fill(~visible[:, None, :], -math.inf)
        lse = torch.logsumexp(scores, dim=-1)  # -inf where nothing is visible
        weights = torch.exp(scores - lse.nan_to_num(neginf=0)[:, :, None])
        return torch.einsum("mhn,nhd->mhd", weights, values), lse / math.log(2)

    def visible(self, queries: int, keys: int) -> torch.Tensor:
        """[queries, keys]: the keys that a row sees; the last row stands at the last key."""
        position = torch.arange(keys - queries, keys)[:, None]
        key = torch.arange(keys)[None, :]
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if self.causal:
            seen &= key <= position
        if self.window >= 0:
            seen &= key >= position - self.window
        return seen

    def count_kv(self, queries: int, keys: int, tile: int) -> None:
        """Add what the query tiles of one request load."""
        global kv_tokens_read
        for start in range(0, queries * self.group, tile):
            rows = range(
                start // self.group, -(-min(start + tile, queries * self.group) // self.group)
            )
            end = min(keys, keys - queries + rows[-1] + 1) if self.causal else keys
            begin = 0 if self.window < 0 else keys - queries + rows[0] - self.window
            kv_tokens_read += max(0, end - max(0, begin))


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    resolved = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    allowed = [torch.float16, torch.bfloat16] + [torch.float32] * ALLOW_FLOAT32
    assert resolved in allowed, f"the kernels have no {resolved}"
    return resolved


def _results(
    problem: _Problem, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check or allocate the outputs. What no kernel writes stays NaN."""
    shape = (*q.shape[:2], problem.head_dims[1])
    if out is None:
        out = torch.full(shape, torch.nan, dtype=problem.q_dtype)
    if lse is None:
        lse = torch.full(q.shape[:2], torch.nan, dtype=torch.float32)
    assert out.shape == shape, f"out has shape {tuple(out.shape)}, not {shape}"
    assert out.dtype == problem.q_dtype, f"out is {out.dtype}, not {problem.q_dtype}"
    assert out.is_contiguous(), "out must be contiguous: the kernels ignore its strides"
    assert lse.shape == q.shape[:2], f"lse has shape {tuple(lse.shape)}, not {tuple(q.shape[:2])}"
    assert lse.dtype == torch.float32 and lse.is_contiguous(), "lse must be contiguous float32"
    return out, lse


def _check_pages(k: torch.Tensor, v: torch.Tensor, page_size: int | None = None) -> None:
    assert k.ndim == v.ndim == 4, "pages are [num_pages, page_size, num_kv_heads, head_dim]"
    assert k.shape == v.shape and k.stride() == v.stride(), "0.6.6 wants K and V of equal strides"
    assert page_size in (None, k.shape[1]), f"pages of {k.shape[1]} slots; plan() said {page_size}"


class _PagedWrapper(_Wrapper):
    """The part of prefill and decode that knows page tables: qo_indptr, indptr, indices, last."""

    def _plan_pages(
        self,
        problem: _Problem,
        qo_indptr: torch.Tensor,
        host: dict[str, torch.Tensor],
        indices: torch.Tensor,
        page_size: int,
        seq_lens: torch.Tensor | None,
    ) -> None:
        self._start_plan(host, indices, {} if seq_lens is None else {"seq_lens": seq_lens})
        self._problem, self._page_size = problem, page_size
        offsets, pages = _indptr("qo_indptr", qo_indptr), _indptr("indptr", host["indptr"])
        last = [int(n) for n in host["last_page_len"]]
        assert len(offsets) == len(pages) == len(last) + 1, "the arrays disagree on the batch size"
        assert len(indices) >= pages[-1], f"indptr ends at {pages[-1]}, indices at {len(indices)}"
        for request, n in enumerate(last):
            empty = pages[request] == pages[request + 1]
            # A request without pages has no keys whatever its last_page_len; but get_seq_lens,
            # which other backends schedule by, adds last_page_len, so only 0 is safe.
            assert n == 0 if empty else 1 <= n <= page_size, (
                f"request {request} has {pages[request + 1] - pages[request]} pages "
                f"and last_page_len {n}"
            )
        lens = _kv_lens(pages, last, page_size)
        if seq_lens is not None:
            assert _index("seq_lens", seq_lens).tolist() == lens, (
                f"seq_lens {seq_lens.tolist()}; the pages say {lens}"
            )
        self._schedule(problem, offsets, page_size=page_size)

    def _run_pages(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        qo_indptr: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        tile: int,
    ) -> Any:  # out, or (out, lse)
        problem = self._problem
        k_pages, v_pages = (
            paged_kv_cache.unbind(1) if torch.is_tensor(paged_kv_cache) else paged_kv_cache
        )
        _check_pages(k_pages, v_pages, self._page_size)
        problem.check_tensors(q, k_pages, v_pages)
        offsets = _indptr("qo_indptr", qo_indptr)
        assert q.ndim == 3 and len(q) == offsets[-1], f"q has {len(q)} rows, plan() {offsets[-1]}"
        out, lse = _results(problem, q, out, lse)
        pages = _indptr("indptr", self._arrays["indptr"])
        lens = _kv_lens(pages, self._arrays["last_page_len"].tolist(), self._page_size)
        indices = self._arrays["indices"]
        for request, length in enumerate(lens):
            table = indices[pages[request] : pages[request + 1]].long()
            assert ((table >= 0) & (table < len(k_pages))).all(), (
                f"request {request} names pages outside the pool of {len(k_pages)}"
            )
            k, v = (side[table].flatten(0, 1)[:length] for side in (k_pages, v_pages))
            rows = slice(offsets[request], offsets[request + 1])
            result, result_lse = problem.attend(q[rows], k, v)
            out[rows], lse[rows] = result.to(out.dtype), result_lse.float()
            problem.count_kv(len(q[rows]), length, tile)
        return (out, lse) if return_lse else out


def _kv_lens(pages: list[int], last: list[int], page_size: int) -> list[int]:
    """Tokens of each request; 0 without pages, as the kernels have it."""
    counts = [end - start for start, end in itertools.pairwise(pages)]
    return [(c - 1) * page_size + n if c else 0 for c, n in zip(counts, last, strict=True)]


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Any number of query rows per request, over pages."""

    kind = "prefill"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr": qo_indptr_buf,
            "indptr": paged_kv_indptr_buf,
            "indices": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert not use_fp16_qk_reduction, "float16 scores are not emulated"
        self._check_splits(fixed_split_size, disable_split_kv)
        problem = _Problem(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
        )
        host = {
            "qo_indptr": qo_indptr,
            "indptr": paged_kv_indptr,
            "last_page_len": paged_kv_last_page_len,
        }
        self._plan_pages(problem, qo_indptr, host, paged_kv_indices, page_size, seq_lens)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # out, or (out, lse)
        self._start_run()
        indptr = self._arrays["qo_indptr"]
        return self._run_pages(q, paged_kv_cache, indptr, out, lse, return_lse, self._tile)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """One query row per request, over pages."""

    kind = "decode"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        *,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "indptr": paged_kv_indptr_buffer,
            "indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert q_data_type is not None, "q_data_type=None needs the deprecated data_type"
        problem = _Problem(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=None,
            causal=False,  # one row sees all its keys
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
        )
        if not self._tensor_cores:
            assert problem.group in _DECODE_GROUPS, (
                f"decode without tensor cores has no kernel for groups of {problem.group}"
            )
            assert not fixed_split_size and not disable_split_kv, "tensor cores only"
        self._check_splits(fixed_split_size, disable_split_kv)
        rows = torch.arange(len(indptr), dtype=torch.int32)
        host = {"indptr": indptr, "last_page_len": last_page_len}
        self._plan_pages(problem, rows, host, indices, page_size, seq_lens)
        if self._graph and not self._tensor_cores:
            # The scheduler counts no block for a request without pages, then adds one: it may
            # plan more blocks than the graph launches.
            assert (torch.diff(indptr) > 0).all(), (
                "decode without tensor cores in graph mode: give padding requests one dummy page"
            )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # out, or (out, lse)
        self._start_run()
        rows = torch.arange(len(self._arrays["indptr"]), dtype=torch.int32)
        tile = self._tile if self._tensor_cores else self._problem.group
        return self._run_pages(q, paged_kv_cache, rows, out, lse, return_lse, tile)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Any number of query rows per request, over keys and values that lie side by side."""

    kind = "ragged"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {"qo_indptr": qo_indptr_buf, "kv_indptr": kv_indptr_buf}
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        head_dim_vo: int | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert not use_fp16_qk_reduction, "float16 scores are not emulated"
        self._check_splits(fixed_split_size, disable_split_kv)
        problem = _Problem(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
        )
        self._start_plan({"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}, None, {})
        self._problem = problem
        offsets, keys = _indptr("qo_indptr", qo_indptr), _indptr("kv_indptr", kv_indptr)
        assert len(keys) == len(offsets), "the arrays disagree on the batch size"
        self._schedule(problem, offsets)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:  # out, or (out, lse)
        self._start_run()
        self._problem.check_tensors(q, k, v)
        offsets = _indptr("qo_indptr", self._arrays["qo_indptr"])
        keys = _indptr("kv_indptr", self._arrays["kv_indptr"])
        assert q.ndim == k.ndim == v.ndim == 3
        assert len(q) == offsets[-1], f"q has {len(q)} rows, plan() {offsets[-1]}"
        assert len(k) == len(v) == keys[-1], f"k has {len(k)} rows, v {len(v)}, plan() {keys[-1]}"
        out, lse = _results(self._problem, q, out, lse)
        for request in range(len(keys) - 1):
            rows = slice(offsets[request], offsets[request + 1])
            seen = slice(keys[request], keys[request + 1])
            result, result_lse = self._problem.attend(q[rows], k[seen], v[seen])
            out[rows], lse[rows] = result.to(out.dtype), result_lse.float()
            self._problem.count_kv(len(q[rows]), len(k[seen]), self._tile)
        return (out, lse) if return_lse else out


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write each row to the slot of its position in its request; the tables include the rows."""
    calls.append(("append",))
    assert kv_layout == "NHD", "only NHD pages are emulated"
    k_pages, v_pages = (
        paged_kv_cache.unbind(1) if torch.is_tensor(paged_kv_cache) else paged_kv_cache
    )
    _check_pages(k_pages, v_pages)
    for name, index in (
        ("batch_indices", batch_indices),
        ("positions", positions),
        ("kv_indices", kv_indices),
        ("kv_indptr", kv_indptr),
        ("kv_last_page_len", kv_last_page_len),
    ):
        _index(name, index)
    for name, rows in (("append_key", append_key), ("append_value", append_value)):
        assert rows.dtype == k_pages.dtype == v_pages.dtype == _dtype(rows.dtype), (
            f"{name} is {rows.dtype}, the pages {k_pages.dtype}: bytes are copied, not converted"
        )
        assert rows.shape == (len(batch_indices), *k_pages.shape[2:]), (
            f"{name} has shape {tuple(rows.shape)}"
        )
        assert rows.stride(-1) == 1, f"the last dimension of {name} must be contiguous"
    assert len(batch_indices) == len(positions)
    page_size = k_pages.shape[1]
    pages = _indptr("kv_indptr", kv_indptr)
    lens = _kv_lens(pages, kv_last_page_len.tolist(), page_size)
    written: dict[tuple[int, int], int] = {}
    for row, (request, position) in enumerate(
        zip(batch_indices.tolist(), positions.tolist(), strict=True)
    ):
        assert 0 <= request < len(lens) and 0 <= position < lens[request], (
            f"row {row}: the tables do not hold position {position} of request {request}"
        )
        page = int(kv_indices[pages[request] + position // page_size])
        assert 0 <= page < len(k_pages), f"page {page} lies outside the pool of {len(k_pages)}"
        slot = page, position % page_size
        # Which of two rows wins is not determined: both must stand for one token.
        other = written.setdefault(slot, row)
        for rows in (append_key, append_value) if other != row else ():
            assert torch.allclose(rows[row].float(), rows[other].float(), rtol=0.02, atol=0.02), (
                f"two rows with other K/V are appended to slot {slot}"
            )
        k_pages[slot], v_pages[slot] = append_key[row], append_value[row]


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge attention over two sets of keys, as if it had been one; v [n, H, D], s [n, H] base 2.

    An empty set has s = -inf (about -5e4 in 0.6.6) and zeros; two of them merge to an empty one.
    """
    calls.append(("merge",))
    assert v.ndim == 3 and v.shape == v_other.shape and v.dtype == v_other.dtype == _dtype(v.dtype)
    assert s.shape == s_other.shape == v.shape[:2]
    assert s.dtype == s_other.dtype == torch.float32, "s must be float32: a copy would be updated"
    for tensor in (v, s, v_other, s_other):
        assert tensor.is_contiguous(), "merge_state_in_place() takes contiguous tensors"
    merged = torch.ones(len(v), dtype=torch.bool)
    if mask is not None:  # read as bytes; rows with 0 stay as they are
        assert mask.shape == (len(v),) and mask.dtype in (torch.bool, torch.uint8)
        merged = mask.bool()
    threads = -(-v.shape[2] // max(8, v.shape[2] // 32)) * v.shape[1]
    assert threads <= 1024, f"{v.shape[1]} heads of {v.shape[2]} are too many for one thread block"
    total = torch.logaddexp2(s.double(), s_other.double())
    reference = total.nan_to_num(neginf=0)
    weight, weight_other = (torch.exp2(side.double() - reference) for side in (s, s_other))
    mixed = v.double() * weight[:, :, None] + v_other.double() * weight_other[:, :, None]
    v[merged] = mixed.to(v.dtype)[merged]
    s[merged] = total.float()[merged]


def top_k_renorm_probs(
    probs: torch.Tensor, top_k: torch.Tensor, is_deterministic: bool = False
) -> torch.Tensor:
    """The k likeliest tokens of each row, and all that are as likely as the last of them."""
    calls.append(("top_k",))
    _check_filter(probs, top_k, torch.int32, is_deterministic)
    assert (top_k > 0).all()
    ordered = probs.sort(-1, descending=True).values
    least = ordered.gather(-1, top_k[:, None].long().clamp(max=probs.shape[1]) - 1)
    return _renormalised(probs, least)


def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool = False
) -> torch.Tensor:
    """The likeliest tokens that reach p of a row's sum, and all that are as likely as the last."""
    calls.append(("top_p",))
    _check_filter(probs, top_p, torch.float32, is_deterministic)
    assert ((top_p > 0) & (top_p <= 1)).all()
    ordered = probs.double().sort(-1, descending=True).values
    reached = ordered.cumsum(-1) >= top_p[:, None] * ordered.sum(-1, keepdim=True)
    last = torch.where(reached.any(-1), reached.int().argmax(-1), probs.shape[1] - 1)
    return _renormalised(probs, ordered.gather(-1, last[:, None]).float())


def _check_filter(
    probs: torch.Tensor, limits: torch.Tensor, dtype: torch.dtype, is_deterministic: bool
) -> None:
    assert probs.ndim == 2 and probs.dtype == torch.float32 and probs.is_contiguous()
    assert limits.shape == probs.shape[:1] and limits.is_contiguous()
    assert limits.dtype == dtype, f"{limits.dtype} would be converted in another launch"
    assert is_deterministic, "sums would depend on the order of blocks"


def _renormalised(probs: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(probs < least, 0)
    return kept / kept.sum(-1, keepdim=True)


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Of rows [n, d], or of each head [n, heads, d]; `out` may be `x`."""
    calls.append(("rmsnorm",))
    assert x.ndim in (2, 3) and weight.shape == x.shape[-1:]
    assert x.dtype == weight.dtype == _dtype(x.dtype), "one dtype for all"
    out = torch.empty_like(x) if out is None else out
    assert x.stride(-1) == out.stride(-1) == 1 and out.shape == x.shape
    return out.copy_(_normed(x, weight, eps))


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    """The residual gets the sum, x its norm."""
    calls.append(("fused_add_rmsnorm",))
    assert x.ndim == 2 and x.shape == residual.shape and weight.shape == x.shape[1:]
    assert x.dtype == residual.dtype == weight.dtype == _dtype(x.dtype)
    assert x.stride(-1) == residual.stride(-1) == 1
    assert x.data_ptr() != residual.data_ptr()
    residual.add_(x)
    x.copy_(_normed(residual, weight, eps))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = x.double()
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    calls.append(("silu_and_mul",))
    assert x.is_contiguous() and out.is_contiguous(), "the kernel ignores strides"
    assert x.dtype == out.dtype == _dtype(x.dtype)
    assert x.shape[-1] * x.itemsize % 16 == 0, "rows of a multiple of 16 bytes"
    gate, up = x.double().chunk(2, -1)
    return out.copy_(gate * gate.sigmoid() * up)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """query, key [n, heads * head_size]; the table [positions, cosines and then sines]."""
    calls.append(("rope",))
    assert (is_neox and head_size in _HEAD_DIMS) or ALLOW_ANY_HEAD_DIM
    assert cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous()
    assert cos_sin_cache.shape[1] == head_size, "all of a head is turned"
    assert positions.dtype == torch.int64 and positions.shape == query.shape[:1] == key.shape[:1]
    assert ((positions >= 0) & (positions < len(cos_sin_cache))).all(), "it reads past its table"
    cos, sin = cos_sin_cache.double()[positions][:, None].chunk(2, -1)
    for flat in (query, key):
        assert flat.stride(-1) == 1 and flat.dtype == _dtype(flat.dtype)
        heads = flat.view(len(flat), -1, head_size)
        low, high = heads.double().chunk(2, -1)
        heads.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))
