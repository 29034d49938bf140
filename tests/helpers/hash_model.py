"""A model whose next token is a hash of every token before it, as its KV pages hold them.

One wrong, missing or misplaced token in the pages changes everything that follows, and a forward
pass costs next to nothing: for tests that need many runs, with an independent answer for each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache import HashBlockCache, PagePool, RadixCache
from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.draw import MultiStep
from radixcache.kernels.native.library import problem
from radixcache.pages import Pages
from radixcache.runtime.engine.build import choose_logits_cache, choose_planner
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.model.kv_pool import WindowLayout
from radixcache.runtime.model.paged_model import Unread
from radixcache.runtime.spec_decode.proposer import DraftProposer
from radixcache.states.left_pages import LeftPages
from tests.helpers.engines import CACHES
from tests.helpers.multi_step import decode_by_steps

VOCAB = 29
Ints = NDArray[np.integer]


def logits_after(tokens: Ints, vocab: int = VOCAB) -> NDArray[np.float32]:
    """[vocab] of the token that comes after all of `tokens`."""
    seed = crc32(np.asarray(tokens, np.int64).tobytes())
    return (np.random.default_rng(seed).random(vocab) * 4).astype(np.float32)


class HashPool:
    """Pages whose KV is the tokens themselves; a slot that nobody has written holds -1.

    A recurrent state is the checksum of all tokens before; at first, of some that nobody has sent.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_states: int = 0,
        windows: WindowLayout | None = None,
    ) -> None:
        self.states, self.windows = [-7] * num_states, windows
        self.num_pages, self.page_size, self.spare_page = num_pages, page_size, num_pages
        most = max(page_size, windows.page_size if windows else 0)
        self.pages = np.full((num_pages + 1, most), -1, np.int64)
        self.slots = self.pages[:, :page_size]
        self.window_slots = self.pages[:, : windows.page_size] if windows else self.slots
        self._handed_out = list[int]()

    def note_handed_out(self, pages: Ints) -> None:
        """What these pages held before must not matter, but to the copies that come next."""
        self._handed_out += pages.tolist()

    def spoil(self) -> None:
        """Spoil the pages that were handed out since the last time, but for those written since."""
        self.pages[self._handed_out] = -9
        self._handed_out.clear()

    @property
    def page_bytes(self) -> int:
        return 8 * self.pages.shape[1]

    def read_pages(self, pages: Ints) -> torch.Tensor:
        return torch.from_numpy(self.pages[pages]).view(torch.uint8)

    def write_pages(self, pages: Ints, rows: torch.Tensor) -> None:
        self.pages[pages] = rows.contiguous().view(torch.int64).numpy()
        written = {*pages.tolist()}
        self._handed_out = [page for page in self._handed_out if page not in written]

    def copy(self, *copies: Sequence[tuple[int, int, int]]) -> None:
        both = [copy for same in copies for copy in same]
        read = [self.pages[source, :count].copy() for source, _, count in both]
        self.spoil()
        for (_, target, count), slots in zip(both, read, strict=True):
            self.pages[target, :count] = slots


class SpoilingPool(PagePool):
    """Lets a `HashPool` know which pages it hands out."""

    def __init__(self, kv_pool: HashPool) -> None:
        super().__init__(kv_pool.num_pages, kv_pool.page_size)
        self._kv_pool = kv_pool

    def allocate(self, count: int) -> Any:
        pages = super().allocate(count)
        self._kv_pool.note_handed_out(pages)
        return pages


class HashModel:
    """As much of `PagedModel` as an engine needs."""

    state_shapes: Any = MappingProxyType({})
    both_ways = False

    def __init__(self, vocab: int = VOCAB, eos: int = VOCAB - 1) -> None:
        self.device = torch.device("cpu")
        self.vocab_size, self.max_context = vocab, 1 << 20
        self.eos_token_ids = [eos]
        self.attention: Any = SimpleNamespace(reads_shared_once=False)
        self.max_graph_rows = 0
        self._random = random.Random(vocab)
        self.unwritten = 0
        """Slots that were read before anybody had written them."""
        self.fails_at = 0
        """Of so many rows, one has logits that are not numbers; by its tokens, and 0 for none."""

    @property
    def can_overlap(self) -> bool:
        return self.device.type != "cpu"

    @property
    def multi_step(self) -> bool:
        return not self.can_overlap and not self.state_shapes and problem() is None

    def decode(
        self, token_ids: Ints, batch: PagedBatch, positions: Ints, pool: HashPool, how: MultiStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run any number of steps, as if another thread interrupted them."""
        most = self._random.randint(1, 8)
        return decode_by_steps(self, token_ids, batch, positions, pool, how, most)

    def forward(
        self,
        token_ids: Ints,
        batch: PagedBatch,
        logit_rows: Ints,
        pool: HashPool,
        states: Any = (),
        unread: Unread | None = None,
    ) -> torch.Tensor:
        if unread is not None:
            token_ids[unread.rows] = unread.tokens.cpu().numpy()
        pool.spoil()
        places = np.divmod(batch.slots(), batch.page_size)
        pool.slots[places] = token_ids
        logits = np.zeros((len(logit_rows), self.vocab_size), np.float32)
        for out, tokens in enumerate(read_rows(batch, logit_rows, pool.slots)):
            self.unwritten += int((tokens < 0).sum())
            logits[out] = logits_after(tokens, self.vocab_size)
            if self.fails(tokens):
                logits[out, 3] = np.nan
        return torch.from_numpy(logits)

    def fails(self, tokens: Ints) -> bool:
        """Whether the logits after these tokens are no numbers."""
        return self.fails_at > 0 and int(np.sum(tokens)) % self.fails_at == 0


class RecurrentHashModel(HashModel):
    """The same, but it goes wrong where a state is not that of the tokens that the pages hold."""

    state_shapes = MappingProxyType({"checksum": 1})
    wrong_states = 0

    def forward(self, *step: Any) -> torch.Tensor:
        logits = super().forward(*step)
        token_ids, batch, logit_rows, pool, states, *_ = step
        after = []
        for i, state in enumerate(states):
            before, keeps = 0 if state.read < 0 else pool.states[state.read], dict(state.keeps)
            start, end = map(int, batch.qo_indptr[i : i + 2])
            for count, token in enumerate(token_ids[start:end], 1):
                before = crc32(np.int64(token).tobytes(), before) if before >= 0 else before
                after.append(before)
                if count in keeps:
                    pool.states[keeps[count]] = before
            pool.states[state.write] = before
        for out, tokens in enumerate(read_rows(batch, logit_rows, pool.slots)):
            if crc32(np.asarray(tokens, np.int64).tobytes()) != after[logit_rows[out]]:
                self.wrong_states += 1
                logits[out] = logits[out].flip(0)
        return logits


SUM = 24
"""The bit from which on a token's KV in a full layer has a checksum of the window below."""

IN_WINDOW = 1 << 20
"""Added to a token in a page of a window, so that no other page is taken for one."""


class WindowHashModel(HashModel):
    """The same, but it goes wrong where a window does not hold the last of these tokens, or did not
    where KV was written: that of a full layer has the checksum of the window below it."""

    wrong_windows = 0

    def forward(self, *step: Any) -> torch.Tensor:
        token_ids, batch, logit_rows, pool, *_ = step
        places = np.divmod(batch.window.slots(), batch.window.page_size)
        logits = super().forward(*step)  # which writes the tokens, and brings the unread ones
        pool.window_slots[places] = token_ids + IN_WINDOW
        size, rows = pool.windows.window, np.arange(len(token_ids))
        sums = [checksum(seen[-size:]) for seen in read_rows(batch.window, rows, pool.window_slots)]
        pool.slots[np.divmod(batch.slots(), batch.page_size)] += np.array(sums) << SUM
        for out, kept in enumerate(read_rows(batch, logit_rows, pool.slots)):
            text = kept % (1 << SUM)
            logits[out] = torch.from_numpy(logits_after(text, self.vocab_size))
            windows = (text[max(0, end - size) : end] for end in range(1, len(text) + 1))
            if (kept >> SUM).tolist() != [checksum(window + IN_WINDOW) for window in windows]:
                self.wrong_windows += 1
                logits[out] = logits[out].flip(0)
            if self.fails(text):
                logits[out, 3] = torch.nan
        return logits


def checksum(tokens: Ints) -> int:
    return crc32(np.asarray(tokens, np.int64).tobytes())


def hash_engine(
    cache: str = "radix",
    page_size: int = 4,
    num_pages: int = 200,
    max_num_batched_tokens: int = 200,
    max_num_seqs: int = 16,
    num_states: int = 0,
    model: Any = None,
    windows: WindowLayout | None = None,
    proposer: DraftProposer | None = None,
    **options: Any,
) -> Engine:
    """An engine over a model of hashes; over a recurrent one, if there are slots for its states, or
    one with windows."""
    kind = RecurrentHashModel if num_states else WindowHashModel if windows else HashModel
    model = model or kind()
    pool: Any = HashPool(num_pages, page_size, num_states, windows)
    index = CACHES[cache](SpoilingPool(pool))
    planner = choose_planner(index, num_states, windows)
    kept = choose_logits_cache(index, model.vocab_size, num_states)
    scheduler = Scheduler(
        index,
        max_num_batched_tokens,
        max_num_seqs,
        planner=planner,
        logits_cache=kept,
        proposer=proposer,
    )
    return Engine(model, pool, index, scheduler, **options)


def force_no_tokens(engine: Engine) -> None:
    """Let an engine compute each token that a grammar leaves no choice of in a step of its own."""
    engine.output_processor._with_forced = lambda sequence, token: iter([token])  # type: ignore


def assert_cached_is_computed(engine: Engine) -> None:
    """Each cached slot holds the token of its place on its path."""
    cache, pool = engine.cache, cast(HashPool, engine.kv_pool)
    paths: list[tuple[Ints, list[int]]] = []
    if isinstance(cache, RadixCache):
        for node in cache._tree:
            pages = cache._tree.read_pages(node, 0, -(-node.end // pool.page_size))
            paths.append((cache._tree.path_tokens(node), pages.tolist()))
    elif isinstance(cache, HashBlockCache):
        for page, block in enumerate(cache._blocks):
            if block is not None:
                paths.append((np.frombuffer(block.tokens, np.int32), [page]))
    for tokens, table in paths:
        held = pool.slots[table].reshape(-1)[: len(tokens)] % (1 << SUM)
        assert held.tolist() == tokens.tolist(), "what is cached was not computed"
    if isinstance(cache, RadixCache) and cache.windows is not None:
        for tokens, table in paths:
            assert_left_is_computed(pool, cache.windows.left, tokens, np.array(table, np.int32))


def assert_left_is_computed(pool: HashPool, left: LeftPages, tokens: Ints, table: Pages) -> None:
    """Each page of a window that can be found holds the tokens of its place, and the deepest window
    of some sizes is where each of its pages can be found."""
    size, beside = left.page_size, dict[int, int]()
    rows, columns, pages = left.entries()
    place = {(row, column): page for row, column, page in zip(rows, columns, pages, strict=True)}
    for end in range(size, len(tokens) + 1, size):
        row, number = (end - 1) // pool.page_size, end // size - 1
        column = number - row * pool.page_size // size
        if (page := place.get((table[row], column))) is not None:
            beside[number] = page
            held = pool.window_slots[page] - IN_WINDOW
            assert held.tolist() == tokens[end - size : end].tolist(), "found, but not computed"
    for window in (2, 9, 30):
        wanted = -(-(window - 1) // size)
        whole = [
            end
            for end in range(1, len(tokens) // size + 1)
            if all(number in beside for number in range(max(0, end - wanted), end))
        ]
        first, found = left.find(table, len(tokens), window)
        assert first + len(found) == max(whole, default=0)
        assert found.tolist() == [beside[first + i] for i in range(len(found))]


def read_rows(batch: PagedBatch, logit_rows: Ints, slots: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """What the pages `slots` [num_pages, page_size] hold for each row: of all tokens up to it."""
    owners = np.searchsorted(batch.qo_indptr, logit_rows, side="right") - 1
    for row, owner in zip(logit_rows, owners, strict=True):
        table = batch.kv_indices[batch.kv_indptr[owner] : batch.kv_indptr[owner + 1]]
        length = int(batch.kv_lens[owner] - (batch.qo_indptr[owner + 1] - 1 - row))
        yield slots[table].reshape(-1)[:length]


def greedy(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the model says to a prompt, worked out from its tokens alone."""
    tokens = [*prompt]
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(int(logits_after(np.array(tokens)).argmax()))
        if tokens[-1] == VOCAB - 1:
            break
    return tokens[len(prompt) :]
