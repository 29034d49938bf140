"""A GGUF file of each architecture, written as llama.cpp's converter does, is its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.configuration_utils import PreTrainedConfig

from radixcache.kernels.quantized import Quantized
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.model.checkpoint import open_checkpoint
from radixcache.runtime.model.description import Architecture
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.gguf.architectures import ROWS
from radixcache.runtime.model.gguf.config import describe_gguf
from radixcache.runtime.model.gguf.weights import GGUFWeights
from radixcache.runtime.model.weights import CheckpointWeights
from tests.helpers.gguf_converter import FAMILIES, convert
from tests.helpers.models import tiny_model

CPU = torch.device("cpu")
_OTHER_NAMES = {"nemotron_h_moe"}  # of the same family


def made(family: str, folder: Path, **changes: Any) -> tuple[Architecture, GGUFFile]:
    """A model's description from its config.json, and the same model as a GGUF file."""
    tiny_model(family, folder, tokenizer=False, **FAMILIES[family][1])
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    return describe(settings), GGUFFile(convert(folder, folder / "model.gguf", **changes))


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            parts = (getattr(each, field.name) for each in (one, other))
            yield from differences(*parts, f"{at}.{field.name}")
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for number, parts in enumerate(zip(one, other, strict=True)):
            yield from differences(*parts, f"{at}.{number}")
    elif not (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other):
        yield f"{at}: {one} and {other}"


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    one, other = (x.dense() if isinstance(x, Quantized) else x for x in (one, other))
    return one.dtype == other.dtype and torch.equal(one, other)


def test_each_architecture_is_tried() -> None:
    assert {name for name, _ in FAMILIES.values()} | _OTHER_NAMES == ROWS.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_described_as_its_checkpoint_and_has_its_weights(family, tmp_path) -> None:
    described, file = made(family, tmp_path)
    assert not [*differences(described, describe_gguf(file))]
    read = GGUFWeights(file, described, CPU, torch.float32)
    with open_checkpoint(tmp_path, CPU, torch.float32) as checkpoint:
        wanted = CheckpointWeights(checkpoint, described)
        assert equal(read.embedding(), wanted.embedding())
        assert described.tied or equal(read.head(), wanted.head())
        assert equal(read.last_norm(), wanted.last_norm())
        for number in range(len(described.layers)):
            found, weights = read.layer(number), wanted.layer(number)
            assert found.keys() == weights.keys()
            assert not [name for name in found if not equal(found[name], weights[name])], number
