"""Which families of models run, and by what, as a table for the docs:
`python -m tests.scripts.families [FAMILY ...]`.

A tiny random model of each: a text is asked, then texts that part from it at random places, so that
they are hits. Each answer must be that of transformers' own `generate`.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

from radixcache import LLM, ModelError, SamplingParams
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.gguf.architectures import ROWS
from tests.helpers.decoders import DECODERS
from tests.helpers.engines import plain_greedy
from tests.helpers.models import HYBRIDS, MLA, MULTIMODAL, tiny_model

OTHERS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {}, "olmo": {}, "nemotron": {}, "phi": {}, "starcoder2": {}, "apertus": {},
    "stablelm": {}, "gpt_neox": {}, "gpt2": {}, "opt": {},
}  # fmt: skip
"""Families without a description."""
# transformers bounds the time steps of a prefill, and not those of its decodes.
OPTIONS = {**DECODERS, **OTHERS, "nemotron_h": {}}
CUTS = 6


def tried(family: str, folder: Path) -> tuple[int, str]:
    """How many of the hits' answers are right, and by what the family runs."""
    path = tiny_model(family, folder, tokenizer=False, **OPTIONS.get(family, {}))
    rng, params = random.Random(1), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stem, right = [rng.randrange(250) for _ in range(90)], 0
    with LLM(path, kv_cache_memory_bytes="4MB", page_size=4, device="cpu") as llm:
        model = llm.engine.model
        looped = isinstance(model, Decoder)
        llm.generate([stem], params)
        for _ in range(CUTS):
            cut = rng.randint(30, 89)
            text = [*stem[:cut], *(rng.randrange(250) for _ in range(9))]
            llm.generate([[*text[: cut + 1], 251]], params)  # a hybrid keeps its state there
            (output,) = llm.generate([text], params)
            answer = plain_greedy(path, text, 8, ignore_eos=True)
            right += output.outputs[0].token_ids == answer and output.num_cached_tokens >= cut
    if not looped:
        return right, "transformers' layers"
    kind = "loop, native and GPU, exact" + " (recurrent)" * bool(model.state_shapes)
    read = MULTIMODAL.get(family, (family,))[0] in IN_GGUF
    return right, kind + ("" if read else "; no GGUF")


IN_GGUF = {row.family for row in ROWS.values()} | {"mistral", "mixtral", "olmo3"}
IN_GGUF |= {"gemma4_unified_text", "glm4v_moe_text", "qwen2_5_vl_text", "solar_open"}
IN_GGUF |= {"deepseek_v2", "glm4_moe_lite", "youtu"}
"""Families whose GGUF files are read, some under another's name."""


def main(chosen: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    failed, found = [], defaultdict[str, list[str]](list)
    for family in dict.fromkeys([*DECODERS, *OTHERS, *MLA, *HYBRIDS, *MULTIMODAL]):
        if chosen and family not in chosen:
            continue
        with TemporaryDirectory() as folder:
            try:
                count, by = tried(family, Path(folder))
            except ModelError as error:
                failed.append(f"{family}: {error}")
                continue
        if count == CUTS:
            found[by].append(family)
        else:
            failed.append(f"{family}: {count} of {CUTS}, by {by}")
    head = f"each `model_type` whose {CUTS} of {CUTS} hits gave transformers' tokens"
    print(f"| run by | {head} |\n|---|---|")
    for by, families in sorted(found.items()):
        print(f"| {by} | {', '.join(sorted(families))} |")
    print(*failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
