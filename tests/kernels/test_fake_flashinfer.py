"""The stand-in for flashinfer against formulas written out in loops, and against the package."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import fake_flashinfer as fake
from tests.pretend_cuda import Event

WORKSPACE = torch.empty(64 << 20, dtype=torch.uint8)
SHARP: dict[str, Any] = {"q_data_type": torch.float32, "kv_data_type": torch.float32}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    fake.reset()
    fake.ALLOW_FLOAT32 = fake.ALLOW_ANY_HEAD_DIM = True
    yield
    fake.reset()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr(counts: list[int]) -> torch.Tensor:
    return ints(0, *np.cumsum(counts).tolist())


class Pool:
    """Random pages that hold `lens[i]` tokens of request i; all other slots are NaN."""

    def __init__(self, seed: int, lens: list[int], page_size: int, kv_heads: int, dim: int) -> None:
        print("seed", seed)
        self.rng = np.random.default_rng(seed)
        self.lens, self.page_size = lens, page_size
        counts = [-(-n // page_size) for n in lens]
        order = [int(page) for page in self.rng.permutation(sum(counts) + 2)]
        self.tables = [[order.pop() for _ in range(n)] for n in counts]
        shape = (sum(counts) + 2, page_size, kv_heads, dim)
        self.k, self.v = torch.full(shape, math.nan), torch.full(shape, math.nan)
        for table, n in zip(self.tables, lens, strict=True):
            for i in range(n):
                slot = table[i // page_size], i % page_size
                self.k[slot], self.v[slot] = self.randn(kv_heads, dim), self.randn(kv_heads, dim)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))

    @property
    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """indptr, indices, last_page_len."""
        last = [n - (len(t) - 1) * self.page_size if t else 0 for t, n in self.requests]
        pages = [page for table in self.tables for page in table]
        return indptr([len(table) for table in self.tables]), ints(*pages), ints(*last)

    @property
    def requests(self) -> list[tuple[list[int], int]]:
        return list(zip(self.tables, self.lens, strict=True))

    def tokens(self, request: int) -> tuple[np.ndarray, np.ndarray]:
        """[n, kv_heads, dim] keys and values of a request, gathered slot by slot."""
        table, n = self.requests[request]
        slots = [(table[i // self.page_size], i % self.page_size) for i in range(n)]
        shape = (n, *self.k.shape[2:])
        return tuple(  # type: ignore[return-value]
            np.array([side[slot].double().numpy() for slot in slots]).reshape(shape)
            for side in (self.k, self.v)
        )


def brute(
    q: torch.Tensor,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool,
    scale: float,
    window: int = -1,
    cap: float = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention one row, head and key at a time: out [m, Hq, D] and base-2 lse [m, Hq]."""
    rows, heads, _ = q.shape
    group = heads // k.shape[1]
    out, lse = np.zeros((rows, heads, v.shape[2])), np.full((rows, heads), -np.inf)
    for row in range(rows):
        position = len(k) - rows + row
        for head in range(heads):
            total, mixed = 0.0, np.zeros(v.shape[2])
            for key in range(len(k)):
                if (causal and key > position) or (0 <= window < position - key):
                    continue
                score = scale * float(q[row, head].double().numpy() @ k[key, head // group])
                if cap:
                    score = cap * math.tanh(score / cap)
                total += math.exp(score)
                mixed += math.exp(score) * v[key, head // group]
            if total:
                out[row, head], lse[row, head] = mixed / total, math.log2(total)
    return out, lse


def same(actual: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=1e-5, atol=1e-5)


def prefill(pool: Pool, query_lens: list[int], heads: int, **options: Any) -> Any:
    """A planned prefill wrapper and its queries."""
    wrapper = fake.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    kv_heads, dim = pool.k.shape[2:]
    options = {**SHARP, **options}
    wrapper.plan(indptr(query_lens), *pool.arrays, heads, kv_heads, dim, pool.page_size, **options)
    return wrapper, pool.randn(sum(query_lens), heads, dim)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "causal", "window", "cap"),
    [
        (2, 2, True, -1, 0.0),
        (4, 2, True, 0, 0.0),
        (6, 2, True, 3, 2.0),
        (4, 1, False, -1, 0.0),
        (4, 2, False, 5, 0.0),
        (4, 4, False, -1, 1.5),
    ],
)
def test_prefill_over_pages_is_attention_aligned_at_the_bottom_right(
    seed: int, page_size: int, heads: int, kv_heads: int, causal: bool, window: int, cap: float
) -> None:
    # A suffix, a fresh prompt, a decode, no rows, no keys, neither, more rows than keys.
    query_lens, lens = [5, 9, 1, 0, 2, 0, 4], [17, 9, 12, 6, 0, 0, 2]
    pool = Pool(seed, lens, page_size, kv_heads, 8)
    options = {"causal": causal, "window_left": window, "logits_soft_cap": cap, "sm_scale": 0.4}
    wrapper, q = prefill(pool, query_lens, heads, **options)
    out, lse = wrapper.run(q, (pool.k, pool.v), return_lse=True)
    row = 0
    for request, n in enumerate(query_lens):
        expected, expected_lse = brute(
            q[row : row + n],
            *pool.tokens(request),
            causal=causal,
            scale=0.4,
            window=window,
            cap=cap,
        )
        same(out[row : row + n], expected)
        same(lse[row : row + n], expected_lse)
        row += n


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize(("page_size", "window", "cap"), [(1, -1, 0.0), (4, 2, 0.0), (16, -1, 3.0)])
def test_decode_attends_with_one_row_per_request(
    tensor_cores: bool, page_size: int, window: int, cap: float
) -> None:
    pool = Pool(7, [13, 0, 1, 16, 33], page_size, 2, 8)
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
    )
    options = {**SHARP, "window_left": window, "logits_soft_cap": cap}
    wrapper.plan(*pool.arrays, 4, 2, 8, page_size, seq_lens=ints(*pool.lens), **options)
    q = pool.randn(5, 4, 8)
    out, lse = torch.empty_like(q), torch.empty(5, 4)
    returned = wrapper.run(q, (pool.k, pool.v), out=out, lse=lse, return_lse=True)
    assert returned[0] is out and returned[1] is lse
    for request in range(5):
        expected, expected_lse = brute(
            q[request : request + 1],
            *pool.tokens(request),
            causal=True,
            scale=8**-0.5,
            window=window,
            cap=cap,
        )
        same(out[request : request + 1], expected)
        same(lse[request : request + 1], expected_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_prefill_takes_values_of_another_width(causal: bool) -> None:
    rng = np.random.default_rng(3)
    query_lens, lens, heads, kv_heads = [3, 0, 4], [3, 2, 9], 4, 2
    q, k, v = (
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        for shape in ((7, heads, 8), (14, kv_heads, 8), (14, kv_heads, 4))
    )
    wrapper = fake.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, backend="fa2")
    shape = {"head_dim_qk": 8, "head_dim_vo": 4, "causal": causal, **SHARP}
    wrapper.plan(indptr(query_lens), indptr(lens), heads, kv_heads, **shape)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    row = key = 0
    for m, n in zip(query_lens, lens, strict=True):
        keys, values = (side[key : key + n].double().numpy() for side in (k, v))
        expected, expected_lse = brute(q[row : row + m], keys, values, causal=causal, scale=8**-0.5)
        same(out[row : row + m], expected)
        same(lse[row : row + m], expected_lse)
        row, key = row + m, key + n


@pytest.mark.parametrize("cut", [0, 1, 5, 16])  # of 16 pages; 0 and 16 leave one side empty
def test_the_merged_states_of_two_halves_are_the_state_of_the_whole(cut: int) -> None:
    pool = Pool(cut, [61], 4, 2, 8)
    whole, q = prefill(pool, [6], 4)
    expected, expected_lse = whole.run(q, (pool.k, pool.v), return_lse=True)
    states = []
    for part, n in ((slice(0, cut), min(61, 4 * cut)), (slice(cut, 16), max(0, 61 - 4 * cut))):
        half = Pool(cut, [n], 4, 2, 8)
        half.k, half.v, half.tables = pool.k, pool.v, [pool.tables[0][part]]
        wrapper, _ = prefill(half, [6], 4)
        states.append(wrapper.run(q, (pool.k, pool.v), return_lse=True))
    (out, lse), (other, other_lse) = states
    fake.merge_state_in_place(out, lse, other, other_lse)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_two_empty_states_merge_to_an_empty_one() -> None:
    v, s = torch.zeros(1, 2, 4), torch.full((1, 2), -torch.inf)
    fake.merge_state_in_place(v, s, v.clone(), s.clone())
    assert v.eq(0).all() and s.eq(-torch.inf).all()


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "message"),
    [
        (2, 8, torch.float16, "must be float32"),
        (64, 256, torch.float32, "too many"),
    ],
)
def test_merge_refuses(heads: int, dim: int, dtype: torch.dtype, message: str) -> None:
    v, s = torch.zeros(1, heads, dim), torch.zeros(1, heads, dtype=dtype)
    with pytest.raises(AssertionError, match=message):
        fake.merge_state_in_place(v, s, v.clone(), s.clone())


def test_appended_rows_land_in_the_slots_of_their_positions() -> None:
    pool = Pool(5, [7, 3, 8], 4, 2, 8)
    k, v = torch.full_like(pool.k, math.nan), torch.full_like(pool.v, math.nan)
    tokens = [pool.tokens(request) for request in range(3)]
    rows = [(request, i) for request, n in enumerate(pool.lens) for i in range(n)]
    key, value = (
        torch.from_numpy(np.stack([tokens[r][side][i] for r, i in rows])).float() for side in (0, 1)
    )
    batch, positions = ints(*(r for r, _ in rows)), ints(*(i for _, i in rows))
    pages, indices, last = pool.arrays
    fake.append_paged_kv_cache(key, value, batch, positions, (k, v), indices, pages, last)
    for mine, theirs in ((k, pool.k), (v, pool.v)):
        assert torch.equal(mine.nan_to_num(99), theirs.nan_to_num(99))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": ints(6, 7)}, "row 1: the tables do not hold position 7 of request 0"),
        ({"positions": ints(6, -1)}, "position -1"),
        (
            {"positions": ints(6, 6), "append_key": torch.eye(2)[:, :, None] + torch.zeros(8)},
            "two rows with other K/V",
        ),
        ({"batch_indices": ints(0, 1)}, "of request 1"),
        ({"kv_indices": ints(0, 9)}, "page 9 lies outside"),
        ({"append_key": torch.zeros(2, 2, 8, dtype=torch.float16)}, "not converted"),
        ({"append_value": torch.zeros(2, 1, 8)}, "append_value has shape"),
    ],
)
def test_append_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "append_key": torch.zeros(2, 2, 8),
        "append_value": torch.zeros(2, 2, 8),
        "batch_indices": ints(0, 0),
        "positions": ints(5, 6),
        "paged_kv_cache": (torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)),
        "kv_indices": ints(2, 0),
        "kv_indptr": ints(0, 2),
        "kv_last_page_len": ints(3),
    }
    fake.append_paged_kv_cache(**arguments)
    fake.append_paged_kv_cache(**{**arguments, "positions": ints(6, 6)})  # one token, twice
    with pytest.raises(AssertionError, match=message):
        fake.append_paged_kv_cache(**{**arguments, **change})


def graph_decode(pages: int = 8) -> tuple[fake.BatchDecodeWithPagedKVCacheWrapper, torch.Tensor]:
    """A decode wrapper in graph mode for two requests, and its buffer of page indices."""
    indices = ints(*([0] * pages))
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=ints(0, 0, 0),
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=ints(0, 0),
        backend="fa2",
    )
    return wrapper, indices


def replan(wrapper: Any, pool: Pool, **options: Any) -> None:
    """plan(), and wait until its copies have landed."""
    kv_heads, dim = pool.k.shape[2:]
    wrapper.plan(*pool.arrays, 4, kv_heads, dim, pool.page_size, **{**SHARP, **options})
    event = Event()
    event.record()
    event.synchronize()


def test_graph_mode_reads_the_buffers_that_it_was_given() -> None:
    wrapper, indices = graph_decode()
    pool = Pool(1, [9, 14], 4, 2, 8)
    replan(wrapper, pool)
    assert indices.tolist()[:7] == pool.arrays[1].tolist()
    q = pool.randn(2, 4, 8)
    before = wrapper.run(q, (pool.k, pool.v))
    indices[[0, 1]] = indices[[1, 0]]  # two full pages: only the order of keys changes
    torch.testing.assert_close(wrapper.run(q, (pool.k, pool.v)), before)
    indices[0] = indices[3]
    assert not torch.allclose(wrapper.run(q, (pool.k, pool.v))[0], before[0])


def test_eager_mode_keeps_the_lengths_but_not_the_page_indices() -> None:
    pool = Pool(1, [9, 14], 4, 2, 8)
    pages, indices, last = pool.arrays
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    wrapper.plan(pages, indices, last, 4, 2, 8, 4, **SHARP)
    event = Event()
    event.record()
    event.synchronize()
    q = pool.randn(2, 4, 8)
    before = wrapper.run(q, (pool.k, pool.v))
    pages[1], last[0] = 0, 4  # copied to the device
    assert torch.equal(wrapper.run(q, (pool.k, pool.v)), before)
    indices[0] = indices[3]  # lay there already
    assert not torch.allclose(wrapper.run(q, (pool.k, pool.v))[0], before[0])


def test_a_tile_of_queries_reads_its_keys_once() -> None:
    pool = Pool(2, [40], 4, 2, 8)
    wrapper, q = prefill(pool, [32], 4)
    wrapper.run(q, (pool.k, pool.v))
    assert fake.kv_tokens_read == 40  # 64 packed rows are one tile
    fake.kv_tokens_read = 0
    shared = Pool(2, [40] * 32, 4, 2, 8)
    shared.k, shared.v, shared.tables = pool.k, pool.v, pool.tables * 32
    decode = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    decode.plan(*shared.arrays, 4, 2, 8, 4, **SHARP)
    decode.run(q, (pool.k, pool.v))
    assert fake.kv_tokens_read == 32 * 40


def test_causal_tiles_read_up_to_their_last_row_and_from_their_window() -> None:
    pool = Pool(2, [200], 4, 2, 8)
    wrapper, q = prefill(pool, [130], 4, causal=True)
    wrapper.run(q, (pool.k, pool.v))
    assert fake.kv_tokens_read == (70 + 64) + (70 + 128) + 200  # 128 packed rows a tile
    fake.kv_tokens_read = 0
    wrapper, q = prefill(pool, [130], 4, causal=True, window_left=10)
    wrapper.run(q, (pool.k, pool.v))
    assert fake.kv_tokens_read == 74 + 74 + 12


def run_after(change: Callable[[Pool, Any], object], **options: Any) -> None:
    """A prefill of two requests whose pool or wrapper is changed between plan() and run()."""
    pool = Pool(4, [9, 5], 4, 2, 8)
    wrapper, q = prefill(pool, [3, 1], 4, **options)
    changed = change(pool, wrapper)
    wrapper.run(changed if isinstance(changed, torch.Tensor) else q, (pool.k, pool.v))


def test_run_after_plan_is_sound() -> None:
    run_after(lambda pool, wrapper: None)


def test_the_default_dtype_is_float16() -> None:
    fake.ALLOW_FLOAT32 = False
    with pytest.raises(AssertionError, match=r"q is torch.float32 but plan\(\) said torch.float16"):
        run_after(lambda pool, wrapper: None, q_data_type="float16", kv_data_type=None)


def test_float32_and_odd_head_dims_have_no_kernel() -> None:
    fake.reset()
    with pytest.raises(AssertionError, match="head_dim 8"):
        run_after(lambda pool, wrapper: None, q_data_type="bfloat16", kv_data_type="bfloat16")
    fake.ALLOW_ANY_HEAD_DIM = True
    with pytest.raises(AssertionError, match="float32"):
        run_after(lambda pool, wrapper: None)


def test_unwritten_slots_are_not_read_silently() -> None:
    def forget(pool: Pool, wrapper: Any) -> None:
        pool.v[pool.tables[0][2], 0] = math.nan  # the last token of request 0

    with pytest.raises(AssertionError, match="not appended"):
        run_after(forget)


def test_a_window_over_many_rows_must_be_causal() -> None:
    with pytest.raises(AssertionError, match="a window without causal"):
        prefill(Pool(2, [200], 4, 2, 8), [130], 4, window_left=10)


def test_every_row_must_belong_to_a_request() -> None:
    with pytest.raises(AssertionError, match="q has 5 rows"):
        run_after(lambda pool, wrapper: pool.randn(5, 4, 8))


def test_a_host_array_may_not_change_while_its_copy_is_in_flight() -> None:
    pool = Pool(4, [9, 5], 4, 2, 8)
    pages, indices, last = pool.arrays
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    wrapper.plan(pages, indices, last, 4, 2, 8, 4, **SHARP)
    last[0] += 1
    with pytest.raises(AssertionError, match=r"last_page_len of decode-0.plan\(\) was over"):
        wrapper.run(pool.randn(2, 4, 8), (pool.k, pool.v))


def test_two_plans_of_a_wrapper_need_an_event_between_them() -> None:
    pool = Pool(4, [9, 5], 4, 2, 8)
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    other = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    early, event = Event(), Event()
    early.record()
    wrapper.plan(*pool.arrays, 4, 2, 8, 4, **SHARP)
    other.plan(*pool.arrays, 4, 2, 8, 4, **SHARP)
    wrapper.run(pool.randn(2, 4, 8), (pool.k, pool.v))
    early.synchronize()  # recorded before the plan: proves nothing about it
    with pytest.raises(AssertionError, match="in flight"):
        wrapper.plan(*pool.arrays, 4, 2, 8, 4, **SHARP)
    event.record()
    event.synchronize()
    wrapper.plan(*pool.arrays, 4, 2, 8, 4, **SHARP)
    assert fake.calls == [
        ("plan", "decode-0"),
        ("plan", "decode-1"),
        ("run", "decode-0"),
        ("plan", "decode-0"),
        ("plan", "decode-0"),
    ]


@pytest.mark.parametrize(
    ("lens", "options", "message"),
    [
        ([9, 14, 1], {}, "fixed the length of indptr at 3"),
        ([9, 30], {}, "do not fit the buffer of 8"),
        ([9, 14], {"window_left": 3}, "window=-1 baked in"),
        ([9, 14], {"sm_scale": 0.1}, "scale="),
        ([9, 14], {"fixed_split_size": 2}, "not safe with CUDA graphs"),
        ([9, 14], {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}, "q_dtype="),
    ],
)
def test_what_a_graph_has_frozen_may_not_change(
    lens: list[int], options: dict[str, Any], message: str
) -> None:
    wrapper, _ = graph_decode()
    replan(wrapper, Pool(1, [5, 2], 4, 2, 8))
    replan(wrapper, Pool(1, [17, 11], 4, 2, 8))
    with pytest.raises(AssertionError, match=message):
        replan(wrapper, Pool(1, lens, 4, 2, 8), **options)


def test_the_first_plan_fixes_the_most_rows_of_a_graph() -> None:
    pool = Pool(1, [9, 14], 4, 2, 8)
    wrapper = fake.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE,
        use_cuda_graph=True,
        qo_indptr_buf=ints(0, 0, 0),
        paged_kv_indptr_buf=ints(0, 0, 0),
        paged_kv_indices_buf=ints(*([0] * 8)),
        paged_kv_last_page_len_buf=ints(0, 0),
        backend="fa2",
    )
    for rows in ([3, 4], [0, 7], [1, 1]):
        wrapper.plan(indptr(rows), *pool.arrays, 4, 2, 8, 4, **SHARP)
        event = Event()
        event.record()
        event.synchronize()
    with pytest.raises(AssertionError, match="first planned with 7 query rows; 8 are more"):
        wrapper.plan(indptr([4, 4]), *pool.arrays, 4, 2, 8, 4, **SHARP)


def test_a_shared_buffer_shows() -> None:
    wrapper, _ = graph_decode()
    pool = Pool(1, [9, 14], 4, 2, 8)
    replan(wrapper, pool)
    wrapper._buffers["indptr"][1] += 1
    with pytest.raises(AssertionError, match="another plan"):
        wrapper.run(pool.randn(2, 4, 8), (pool.k, pool.v))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": torch.tensor([0, 3, 5])}, "must be int32"),
        ({"indptr": ints(0, 3, 2)}, "must ascend"),
        ({"indptr": ints(0, 3, 3)}, "request 1 has 0 pages and last_page_len 1"),
        ({"last_page_len": ints(1, 0)}, "request 1 has 2 pages and last_page_len 0"),
        ({"last_page_len": ints(1, 5)}, "last_page_len 5"),
        ({"indices": ints(0, 1)}, "indptr ends at 5"),
        ({"seq_lens": ints(9, 6)}, "the pages say"),
        ({"num_qo_heads": 10}, "groups of 5"),
        ({"num_qo_heads": 5}, "multiple"),
        ({"num_qo_heads": 64, "num_kv_heads": 8, "head_dim": 256}, "bytes of workspace"),
    ],
)
def test_plan_refuses(change: dict[str, Any], message: str) -> None:
    pages, indices, last = Pool(4, [9, 5], 4, 2, 8).arrays
    arguments = {"indptr": pages, "indices": indices, "last_page_len": last, **SHARP}
    shape = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    with pytest.raises(AssertionError, match=message):
        wrapper.plan(**{**arguments, **shape, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.empty(2, 4, 4)}, "out has shape"),
        ({"out": torch.empty(2, 4, 8, dtype=torch.float16)}, "out is torch.float16"),
        ({"out": torch.empty(4, 2, 8).transpose(0, 1)}, "contiguous"),
        ({"lse": torch.empty(2, 4, dtype=torch.float64)}, "float32"),
        ({"q": torch.empty(3, 4, 8)}, "q has 3 rows"),
        ({"q": torch.empty(2, 8, 8)}, "q has .8, 8. heads and dim"),
    ],
)
def test_run_refuses(change: dict[str, Any], message: str) -> None:
    pool = Pool(4, [9, 5], 4, 2, 8)
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    with pytest.raises(AssertionError, match="before plan"):
        wrapper.run(pool.randn(2, 4, 8), (pool.k, pool.v))
    wrapper.plan(*pool.arrays, 4, 2, 8, 4, **SHARP)
    with pytest.raises(AssertionError, match=message):
        wrapper.run(**{"q": pool.randn(2, 4, 8), "paged_kv_cache": (pool.k, pool.v), **change})


def test_graph_decode_without_tensor_cores_needs_a_page_per_request() -> None:
    wrapper, _ = graph_decode()
    replan(wrapper, Pool(1, [5, 0], 4, 2, 8))  # with tensor cores: fine
    wrapper._tensor_cores = False
    with pytest.raises(AssertionError, match="dummy page"):
        replan(wrapper, Pool(1, [5, 0], 4, 2, 8))


@pytest.mark.parametrize(
    "name",
    [
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "BatchDecodeWithPagedKVCacheWrapper.run",
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "BatchPrefillWithRaggedKVCacheWrapper.__init__",
        "BatchPrefillWithRaggedKVCacheWrapper.plan",
        "BatchPrefillWithRaggedKVCacheWrapper.run",
        "append_paged_kv_cache",
        "merge_state_in_place",
    ],
)
def test_the_package_takes_every_argument_that_the_stand_in_takes(name: str) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    import flashinfer

    mine, theirs = (_signature(module, name) for module in (fake, flashinfer))
    order = [parameter for parameter in theirs if parameter in mine]
    positional = [p.name for p in mine.values() if p.kind is not p.KEYWORD_ONLY]
    assert order[: len(positional)] == positional
    for parameter in mine.values():
        real = theirs[parameter.name]
        assert real.default == parameter.default, parameter.name
        stricter = parameter.kind is parameter.KEYWORD_ONLY
        assert stricter or real.kind is parameter.kind, parameter.name


def _signature(module: Any, name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a function or method by name."""
    parameters = inspect.signature(attrgetter(name)(module)).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        # 0.7.2's decode plan() hands its options to this method.
        decode = module.BatchDecodeWithPagedKVCacheWrapper
        parameters = inspect.signature(decode._plan_impl).parameters
    return dict(parameters)
