# mypy: disable-error-code="import-not-found"
"""Does `HashBlockCache` do what vLLM does? Both get the same random requests, side by side.

    make conformance
    make conformance ARGS="--seeds 200 --operations 5000"

runs vLLM's own `KVCacheManager` (the PyPI package, in a virtual environment of its own) and
`HashBlockCache` in one process. Each operation goes to both: admissions with chunked prefill,
decoding, preemption and resumption, cache salts, LoRA adapters, images, evictions, resets, pools
that run full. After every operation all of this must be equal: hits, page tables, the
order of the free queue, reference counts, hash of every page, pages under every hash, statistics
and events.

Prints the count of each operation and every difference; exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import Counter
from hashlib import sha256
from importlib.metadata import version
from random import Random
from typing import Any

import torch
from tqdm import tqdm
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from bench.peers.conformance.round import Round, chain
from bench.peers.vllm_manager import make_hasher
from radixcache.hash_block.hashes import BlockNamespace, Image, first_parent


def compare_hashes() -> list[str]:
    """Hashes of fixed content by vLLM and by us, for three seeds; the differences, in words."""
    position = PlaceholderRange(20, 30)
    image = MultiModalFeatureSpec(None, "image", identifier="cat", mm_position=position)
    embeds = torch.arange(96, dtype=torch.float32).reshape(48, 2)
    digests = tuple(sha256(embeds[at : at + 16].numpy().tobytes()).digest() for at in (0, 16, 32))
    mixed = {"prompt_embeds": embeds, "prompt_is_token_ids": [True] * 48}
    cases: list[tuple[dict[str, Any], BlockNamespace]] = [
        ({}, BlockNamespace()),
        ({"cache_salt": "s"}, BlockNamespace(salt="s")),
        ({"lora_request": LoRARequest("a", 1, "/p")}, BlockNamespace(lora=("a", "/p"))),
        ({"mm_features": [image]}, BlockNamespace(images=(Image("cat", 20, 30),))),
        (mixed, BlockNamespace(prompt_embeds=digests)),
    ]
    tokens = list(range(70))
    differences = []
    for seed in (None, "0", "42"):
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        hasher = make_hasher(16)
        for options, namespace in cases:
            request = Request(
                "r", tokens[:48], SamplingParams(), None, block_hasher=hasher, **options
            )
            request.append_output_token_ids(tokens[48:])
            peer = [kv_cache_utils.NONE_HASH, *request.block_hashes]
            ours = [first_parent(), *chain(tokens, 16, namespace)]
            if peer != ours:
                differences.append(f"hashes, seed {seed}, {namespace}: {peer} {ours}")
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description="HashBlockCache against vLLM's KVCacheManager.")
    parser.add_argument("--seeds", type=int, default=64, help="rounds (64)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=5000, help="per seed (5000)")
    args = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"  # by default, 64 bits of each
    os.environ.pop("PYTHONHASHSEED", None)
    differences = compare_hashes()
    os.environ.pop("PYTHONHASHSEED")
    counts: Counter[str] = Counter()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for seed in tqdm(seeds, disable=None):
        one = Round(Random(seed))
        try:
            one.run(args.operations)
        except Exception as error:  # an exception is a difference
            differences.append(f"seed {seed}, {one.shape}: {error!r}\n  after " + one.trace[-1])
        counts += one.counts
    for what, count in sorted(counts.items()):
        print(f"{count:>9,}  {what}")
    for difference in differences:
        print(f"DIFFERENCE: {difference}")
    print(
        f"vLLM {version('vllm')}: {len(differences)} differences in {counts['operations']:,} "
        f"operations over seeds {seeds[0]}..{seeds[-1]}, and in the hashes"
    )
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
