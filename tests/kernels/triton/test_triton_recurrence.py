"""The recurrence of recurrent layers in Triton's interpreter against `loop`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from radixcache.kernels import choose
from radixcache.kernels.recurrence import Slots, Tokens
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.recurrence import recur as loop
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.load import load_model
from tests.helpers.models import tiny_model
from tests.runtime.model.steps import plain_logits, random_sequences, relative_error, run_steps

triton = pytest.importorskip("triton", reason="`make test-gpu` brings it")
triton_attention = pytest.importorskip("radixcache.kernels.triton.attention")
if not triton_attention.INTERPRETED:
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)

from radixcache.kernels.triton import recurrence as triton_recurrence  # noqa: E402


class Case(NamedTuple):
    states: torch.Tensor
    tokens: Tokens
    slots: Slots


def make_case(seed: int, lens: list[int]) -> Case:
    """Random sequences over random slots; slots that are read by nobody hold what is no number."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    groups, count = int(rng.choice([1, 2, 3])), sum(lens)
    heads, key, value = (int(rng.choice(s)) for s in ([1, 2], [4, 12, 16], [8, 16, 20, 40]))
    heads *= groups
    num_slots = 3 * len(lens) + count
    free = rng.permutation(num_slots).tolist()
    read = [free.pop() if rng.random() < 0.7 else -1 for _ in lens]
    write = [r if r >= 0 and rng.random() < 0.5 else free.pop() for r in read]
    keeps = [free.pop() if rng.random() < 0.3 else -1 for _ in range(count)]
    states = torch.full((num_slots, heads, key, value), torch.nan)
    for slot in read:
        if slot >= 0:
            states[slot] = torch.randn(heads, key, value, generator=generator)

    def rows(*shape: int) -> torch.Tensor:
        """A view of a wider row, as a layer's products give it."""
        size = int(np.prod(shape))
        wide = torch.randn(count, size + 8, generator=generator)
        return wide[:, 4 : 4 + size].unflatten(1, shape)

    tokens = Tokens(
        rows(groups, key), rows(groups, key) / key**0.5, rows(heads, value),
        rows(heads, key if seed % 3 else 1).sigmoid(), rows(heads).sigmoid(), bool(seed % 2),
    )  # fmt: skip
    tables = np.cumsum([0, *lens]), read, write, keeps
    return Case(states, tokens, Slots(*(torch.tensor(np.array(t, np.int32)) for t in tables)))


@pytest.mark.parametrize("seed", range(12))
def test_rows_and_states_are_those_of_the_loop(seed: int) -> None:
    lens = np.random.default_rng(seed).integers(0, 9, 4).tolist() if seed else [1, 1, 7, 0, 2]
    states, tokens, slots = make_case(seed, lens)
    ours, theirs = states.clone(), states.clone()
    out, expected = triton_recurrence.recur(ours, tokens, slots), loop(theirs, tokens, slots)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5, equal_nan=True)


def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch() -> None:
    """And however its sequence is cut."""
    states, tokens, slots = make_case(3, [1, 6, 9])
    together = triton_recurrence.recur(states.clone(), tokens, slots)
    first, held = 7, states.clone()
    for rows in (slice(first, first + 4), slice(first + 4, first + 9)):
        part = Tokens(*(t[rows] for t in tokens[:5]), delta=tokens.delta)  # type: ignore[misc, arg-type]
        count = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        read = slots.read[2:] if rows.start == first else slots.write[2:]
        alone = Slots(count, read, slots.write[2:], slots.keeps[rows])
        assert torch.equal(triton_recurrence.recur(held, part, alone), together[rows])


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "kimi_linear"])
def test_a_model_gives_the_logits_of_plain_transformers(family, tmp_path, monkeypatch) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False)
    sequences = [tokens[:14] for tokens in random_sequences()]
    monkeypatch.setattr(choose, "find_recurrence", lambda *_: triton_recurrence.recur)
    model = load_model(folder, device="cpu", dtype="float32", attention=TorchAttention())
    assert isinstance(model, Decoder)
    found = run_steps(model, sequences, [(6, 0, 1), (1, 14, 0), (7, 0, 13)], 4)
    assert relative_error(found, plain_logits(folder, sequences)) < 1e-4
