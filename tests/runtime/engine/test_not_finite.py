"""A token whose KV is no finite number fails the requests that contain it, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from radixcache import SamplingParams
from radixcache.runtime.engine.output_processor import NOT_A_NUMBER
from tests.helpers.engines import (
    Layers,
    assert_no_page_is_lost,
    finish,
    generated,
    make_engine,
    run,
)
from tests.helpers.models import tiny_model

HUGE = 9  # the token; none of those that `check_logits` compares
SIZES = {"float32": 3e38, "float16": 3e5, "int8": 1e8, "bfloat16": 3e38}
"""A weight of its value, by the dtype of the pages."""
SYSTEM = [*range(100, 129)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def write_model(path: Path, size: float, family: str = "llama", **options: Any) -> Path:
    """A tiny model in whose first attention one token alone has such a value."""
    tiny_model(family, path, tokenizer=False, **options)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight[-1] = 0  # the last number of the hidden state is the token's embedding alone
        elif weight.dim() == 2:
            weight[:, -1] = 0
    weights["model.embed_tokens.weight"][HUGE, -1] = 4
    first = next(name for name in weights if name.endswith("self_attn.v_proj.weight"))
    weights[first][:, -1] = size
    weights["lm_head.weight"][HUGE] = 0
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


CASES = [(kv, "llama", layers, "radix") for kv in SIZES for layers in ("chosen", "torch")] + [
    ("int8", "llama", "chosen", "hash-block"),
    ("float32", "gemma3_text", "chosen", "radix"),
    ("float32", "qwen3_5_text", "chosen", "radix"),
]


@pytest.mark.parametrize(("kv", "family", "layers", "cache"), CASES)
def test_only_requests_that_contain_it_fail_and_nothing_of_it_stays(
    tmp_path: Path, kv: str, family: str, layers: Layers, cache: str
) -> None:
    path = write_model(tmp_path, SIZES[kv], family, hidden_size=128, head_dim=32)
    how: dict[str, Any] = {"layers": layers, "kv": "auto" if kv == "float32" else kv}
    how |= {"windows": "gemma" in family, "num_states": 40 * ("qwen" in family), "page_size": 4}
    good = [[*SYSTEM, 70, 71], [*SYSTEM, 65], [*SYSTEM, 65, 66, 5, 6]]
    bad = [[*SYSTEM, 65, 66, HUGE], [*SYSTEM, 65, HUGE, 67], [*SYSTEM, 65, 66, HUGE]]
    alone = [generated(run(make_engine(path, **how), [prompt], GREEDY))[0] for prompt in good]
    for step in (2048, 7):
        engine = make_engine(path, cache, max_num_batched_tokens=step, **how)
        spoilt = [engine.add_request(prompt, replace(GREEDY, n=2)) for prompt in bad]
        others = [engine.add_request(prompt, GREEDY) for prompt in good]
        finish(engine)
        assert generated(others) == alone and {other.error for other in others} == {None}
        assert {request.error for request in spoilt} == {NOT_A_NUMBER}
        (late,) = run(engine, [[*SYSTEM, 71]], replace(GREEDY, allowed_token_ids=[HUGE]))
        assert generated([late]) == [[[HUGE]]] and late.error == NOT_A_NUMBER
        for prompt in (*bad, [*SYSTEM, 71, HUGE]):
            assert engine.cache.cached_length(prompt) <= prompt.index(HUGE)
        again = run(engine, good, GREEDY)
        assert generated(again) == alone and all(r.sequences[0].cached_tokens for r in again)
        assert_no_page_is_lost(engine)
