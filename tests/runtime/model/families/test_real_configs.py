"""Real checkpoints, by what runs them: each config.json as the hub has it, without weights.

The files are no part of this project: the folder below stands in the checkout or beside it, and the
test is skipped where there is none. How a checkpoint's weights are stored is not tried here.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile

import pytest

from radixcache.errors import ModelError
from radixcache.kernels.spec import Unknown
from radixcache.runtime.model.fallback.loading import load_config
from radixcache.runtime.model.families.describe import describe
from tests.helpers.sources import ROOT

FOLDERS = [at / "shared/data/configs" for at in (ROOT, ROOT.parent)]
CONFIGS = next((folder for folder in FOLDERS if folder.is_dir()), None)
END = "_config.json"
INDEXED = "it has layers of type indexed_attention, which"
UNKNOWN = "but Transformers does not recognize this architecture"
CODE = "contains custom code which must be executed"

LOOP = {
    "deepseek_v3": "deepseek-ai--DeepSeek-R1 moonshotai--Kimi-K2-Instruct nvidia--Kimi-K2.6-NVFP4",
    "gemma4_text": "nvidia--Gemma-4-31B-IT-NVFP4",
    "gpt_oss": "openai--gpt-oss-20b",
    "llama": "meta-llama--Meta-Llama-3.1-405B meta-llama--Meta-Llama-3.1-8B "
    "nvidia--Llama-3.1-70B-Instruct-FP8",
    "minimax_m2": "MiniMaxAI--MiniMax-M2.5 nvidia--MiniMax-M2.5-NVFP4",
    "mixtral": "mistralai--Mixtral-8x22B-v0.1",
    "nemotron_h": "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4 "
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4 "
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",
    "qwen3": "Qwen--Qwen3-1.7B Qwen--Qwen3-32B-FP8 Qwen--Qwen3-8B",
    "qwen3_5_moe_text": "Qwen--Qwen3.5-397B-A17B Qwen--Qwen3.8-2.4T-A95B-FP8 "
    "nvidia--Qwen3.5-397B-A17B-NVFP4 nvidia--Qwen3.6-35B-A3B-NVFP4",
    "qwen3_5_text": "Qwen--Qwen3.5-27B",
    "qwen3_moe": "Qwen--Qwen3-235B-A22B-FP8 Qwen--Qwen3-30B-A3B-FP8 nvidia--Qwen3-235B-A22B-NVFP4",
    "qwen3_vl_moe_text": "Qwen--Qwen3-VL-235B-A22B-Instruct Qwen--Qwen3-VL-30B-A3B-Instruct",
    "qwen3_vl_text": "Qwen--Qwen3-VL-32B-Thinking Qwen--Qwen3-VL-8B-Instruct",
}
"""Families of our loop, and the checkpoints that it runs."""

LAYERS = {
    "no loop for laguna": "poolside--Laguna-XS.2-FP8",
    "no loop for step3p7": "stepfun-ai--Step-3.7-Flash-FP8",
}
"""Why the loop does not run them, and the checkpoints that transformers' layers run."""

REFUSED = {
    f"`deepseek_ref` {UNKNOWN}": "sgl-project--DeepSeek-V4-Pro-FP8",
    f"`mimo` {UNKNOWN}": "XiaomiMiMo--MiMo-7B-Base",
    f"`minimax_m3` {UNKNOWN}": "MiniMaxAI--MiniMax-M3",
    CODE: "moonshotai--Kimi-K3",
    f"'deepseek_v32' cannot run over KV pages: {INDEXED}": "deepseek-ai--DeepSeek-V3.2 "
    "nvidia--DeepSeek-V3.2-NVFP4",
    "it has layers of type compressed_sparse_attention": "deepseek-ai--DeepSeek-V4-Pro "
    "nvidia--DeepSeek-V4-Pro-NVFP4",
    f"'glm_moe_dsa' cannot run over KV pages: {INDEXED}": "nvidia--GLM-5.1-NVFP4 "
    "nvidia--GLM-5.3-NVFP4 zai-org--GLM-5-FP8 zai-org--GLM-5.1-FP8 zai-org--GLM-5.2-FP8",
    "it has layers of type chunked_attention": "meta-llama--Llama-4-Maverick-17B-128E-Instruct",
    "it has layers of type minimax_m3_sparse": "nvidia--MiniMax-M3-NVFP4",
}
"""Reasons, and the checkpoints that are refused."""

EXPECTED = {
    name: (path, said)
    for path, table in (("loop", LOOP), ("layers", LAYERS), ("refused", REFUSED))
    for said, names in table.items()
    for name in names.split()
}


def tried(config: Path, folder: Path) -> tuple[str, str]:
    """What runs a checkpoint, and its family in the loop, or why the loop or nothing runs it."""
    try:
        return "loop", describe(json.loads(config.read_text())).family
    except Unknown as error:
        reason = str(error)
    copyfile(config, folder / "config.json")
    try:
        load_config(folder)
    except ModelError as error:
        return "refused", str(error)
    return "layers", reason


@pytest.mark.skipif(CONFIGS is None, reason="no config.json files of the hub")
def test_what_runs_a_real_checkpoint(tmp_path) -> None:
    assert CONFIGS is not None
    files = [path for path in CONFIGS.glob(f"*{END}") if "hf_quant" not in path.name]
    found = {path.name.removesuffix(END): tried(path, tmp_path) for path in files}
    for name, (path, said) in found.items():
        print(f"{name}: {path}, {said}")
        expected, part = EXPECTED.get(name, (path, said))  # or one that is only printed
        assert path == expected, (name, said)
        assert part in said if path == "refused" else part == said, name
