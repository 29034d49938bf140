"""A GGUF file is a model like any other, to the bit; a spoiled one is one sentence."""

from __future__ import annotations

import re
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from radixcache import LLM, ModelError
from radixcache.kernels import quantized
from radixcache.kernels.native import blocks as native_blocks
from radixcache.kernels.native.library import problem
from radixcache.kernels.native.linear import PackedLinear
from radixcache.kernels.quantized import Quantized
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.checkpoints.model_files import check_model, split_gguf
from radixcache.runtime.model.gguf.blocks import read_tensor
from radixcache.runtime.model.gguf.config import describe_gguf, open_gguf, settings_of
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from radixcache.runtime.model.weights.sources import GGUFSource
from tests.helpers.gguf.files import (
    Stored,
    decode,
    gguf_bytes,
    random_blocks,
    write_folder,
    write_model,
)
from tests.helpers.native import needs_kernels
from tests.runtime.model.steps import plain_logits, relative_error, run_steps

CPU = torch.device("cpu")
STEPS = [(9, 0), (1, 6), (8, 5)]
BITS = {"Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (8, 32), "Q5_1": (8, 32), "Q8_0": (8, 32)}
BITS |= {"Q2_K": (4, 16), "Q3_K": (4, 16), "Q4_K": (4, 32), "Q5_K": (8, 32), "Q6_K": (8, 16)}
BITS |= {"IQ4_NL": (4, 32), "IQ4_XS": (4, 32), "MXFP4": (4, 32)}
BITS |= dict.fromkeys(["IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"], (4, 32))
BITS |= dict.fromkeys(["IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4"], (4, 16))


def opened(path: Path, data: bytes) -> GGUFFile:
    path.write_bytes(data)
    return GGUFFile(path)


def load(path: Path) -> PagedModel:
    """As it stands: without rounding activations, which costs what these tests compare."""
    return load_model(path, device="cpu", quantized_activations="off")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 260, 18), rng.integers(0, 260, 11)]


@pytest.mark.parametrize("kind", BITS)
def test_blocks_of_each_kind_are_decoded_to_the_bit(path, monkeypatch, kind):
    monkeypatch.setattr(quantized, "_WEIGHTS_AT_ONCE", 1024)  # in many chunks
    rows, columns = 9, 512
    blocks = random_blocks(kind, rows * columns, np.random.default_rng(0), wild=True)
    file = opened(path, gguf_bytes({}, {"a": Stored(kind, (rows, columns), blocks.tobytes())}))
    order = torch.arange(rows).flip(0)
    found, turned = (read_tensor("a", file.tensors["a"], rows) for rows in (None, order))
    assert isinstance(found, Quantized)
    assert isinstance(turned, Quantized)
    assert (found.bits, found.block) == BITS[kind]
    numbers = found.tables()[0]
    assert int(numbers.max()) < 1 << found.bits and numbers.dtype == torch.uint8
    wanted = decode(kind, blocks).reshape(rows, columns)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(found.dense().numpy(), wanted)
    np.testing.assert_array_equal(turned.dense().numpy(), wanted[::-1])
    blocks_back = torch.arange(columns).view(-1, found.block).flip(0).flatten()
    moved = found.columns(blocks_back)
    assert moved is not None
    np.testing.assert_array_equal(moved.dense().numpy(), wanted[:, blocks_back])
    assert found.columns(blocks_back.roll(1)) is None
    joined = Quantized.join([found, turned])
    np.testing.assert_array_equal(joined.dense().numpy(), [*wanted, *wanted[::-1]])
    if problem() is None:  # and the panels are made of the stored blocks
        packed = PackedLinear(joined).weight.numpy()
        np.testing.assert_array_equal(packed.view(np.int32), joined.dense().numpy().view(np.int32))


@needs_kernels
def test_large_tables_are_packed_a_part_at_a_time(path, monkeypatch):
    monkeypatch.setattr(native_blocks, "_ROWS", 32)
    stored = random_blocks("Q6_K", 77 * 512, np.random.default_rng(0)).tobytes()
    file = opened(path, gguf_bytes({}, {"a": Stored("Q6_K", (77, 512), stored)}))
    table, release = read_tensor("a", file.tensors["a"]), Mock()
    assert isinstance(table, quantized.Stored)
    table.release = release
    assert torch.equal(PackedLinear(table).weight, table.dense())
    assert release.call_count == 3


@pytest.mark.parametrize(
    ("family", "kinds", "tied"),
    [
        ("llama", ["Q4_0", "Q4_1", "Q8_0"], False),
        ("llama", ["F32", "BF16", "F16"], True),
        ("mistral", ["Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS"], False),
        ("qwen2", ["Q2_K", "Q3_K", "Q4_K"], True),
        ("qwen3", ["Q4_K", "Q6_K", "Q5_K"], False),
        ("qwen3", ["IQ3_S", "NVFP4", "IQ3_XXS", "IQ2_XS"], False),
        ("llama", ["IQ1_M", "IQ2_S", "TQ1_0", "IQ1_S"], False),
    ],
)
def test_a_model_gives_the_logits_of_its_dense_weights(
    path, tmp_path, sequences, family, kinds, tied
):
    dense = write_model(path, None, family, kinds, tied=tied)
    folder = write_folder(tmp_path / "dense", family, dense, tie_word_embeddings=tied)
    model = load(path)
    assert model.layers_by.startswith("radixcache")
    assert model.model_type == family
    assert re.match(rf"{family} of \d+\.\d bits a weight in float32 on cpu, ", model.placement)
    found = run_steps(model, sequences, STEPS, 4)
    assert relative_error(found, plain_logits(folder, sequences)) < 1e-5
    # And the same as our own loop over the folder gives, which the checkpoint alone decides.
    same = run_steps(load_model(folder, device="cpu"), sequences, STEPS, 4)
    assert relative_error(found, same) < 1e-6


def test_weights_are_given_without_loss(path):
    dense = write_model(path, None, "llama", ["Q4_K", "F16", "BF16", "F32", "Q6_K"])
    file = GGUFFile(path)
    described = describe_gguf(file, settings_of(file))
    weights = GGUFSource(file, described, CPU, torch.float32)
    layers = [weights.layer(number) for number in range(len(described.layers))]
    found = {"model.embed_tokens.weight": weights.embedding(), "lm_head.weight": weights.head()}
    found["model.norm.weight"] = weights.last_norm()
    norms = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for number, layer in enumerate(layers):
        for name, weight in layer.items():
            part = "self_attn" if name in "qkvo" else "mlp"
            theirs = norms.get(name, f"{part}.{name}_proj")
            found[f"model.layers.{number}.{theirs}.weight"] = weight
    assert found.keys() == dense.keys()
    seen = set()
    for name, weight in found.items():
        assert weight is not None
        whole = weight.dense() if isinstance(weight, Quantized) else weight
        assert torch.equal(whole.float(), dense[name]), name
        seen.add("quantized" if isinstance(weight, Quantized) else weight.dtype)
    assert seen == {"quantized", torch.float32, torch.bfloat16}
    elsewhere = GGUFSource(file, described, torch.device("meta"), torch.bfloat16)
    assert elsewhere.last_norm().dtype == torch.float32
    assert elsewhere.layer(0)["q"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_scaling_is_that_of_the_file(path, tmp_path, sequences, written, wanted):
    keys = {f"{{}}.rope.scaling.{key}": value for key, value in written.items()}
    dense = write_model(path, keys)
    wanted = {"rope_theta": 10_000.0, **wanted}
    folder = write_folder(
        tmp_path / "dense", "llama", dense, rope_theta=None, rope_parameters=wanted
    )
    found = run_steps(load(path), sequences, STEPS, 4)
    assert relative_error(found, plain_logits(folder, sequences)) < 1e-5


def test_llama_3s_rope_factors_are_read(path, tmp_path, sequences):
    """llama.cpp's converter writes them as a tensor; transformers' reader leaves them out."""
    rope = {"rope_theta": 10_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    steps = torch.arange(0, 32, 2).double() / 32
    lengths = 2 * torch.pi * 10_000.0**steps
    smooth = ((64 / lengths - 1) / 3).clamp(0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).float()
    assert set(factors.tolist()) > {1.0, 8.0}
    stored = Stored("F32", (16,), factors.numpy().tobytes())
    dense = write_model(path, None, "llama", extra={"rope_freqs.weight": stored})
    folder = write_folder(tmp_path / "dense", "llama", dense, rope_theta=None, rope_parameters=rope)
    wanted = plain_logits(folder, sequences)
    found = run_steps(load(path), sequences, STEPS, 4)
    assert relative_error(found, wanted) < 1e-5
    write_model(path, None, "llama")
    without = run_steps(load(path), sequences, STEPS, 4)
    assert relative_error(without, wanted) > 1e-3
    write_model(path, None, "llama", extra={"rope_freqs.weight": Stored("F32", (4,), bytes(16))})
    with pytest.raises(ModelError, match=r"rope_freqs.weight is of shape \[4\]"):
        load_model(path, device="cpu")


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"{}.attention.scale": 0.5}, "metadata has llama.attention.scale"),
        ("llama", {"{}.expert_count": 8}, "no llama.expert_used_count"),
        ("llama", {"{}.expert_gating_func": 2}, "scored in another way"),
        ("llama", {"{}.attention.value_length": 16}, "values are of another size"),
        ("llama", {"{}.rope.dimension_sections": [1, 1, 1]}, "llama.rope.dimension_sections"),
        ("llama", {"{}.rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor"),
        ("llama", {"{}.attention.causal": False}, "what comes later"),
        ("llama", {"{}.rope.dimension_count": 16}, "part of a head"),
        (
            "llama",
            {"{}.rope.scaling.type": "longrope", "{}.rope.scaling.factor": 2.0},
            "original_context",
        ),
        ("llama", {"{}.rope.scaling.type": "linear"}, "no llama.rope.scaling.factor"),
        ("qwen2", {"{}.attention.sliding_window": 9}, "qwen2.attention.sliding_window"),
        ("llama", {"{}.attention.head_count": None}, "no llama.attention.head_count"),
        ("llama", {"{}.attention.head_count": 0}, "num_attention_heads is 0"),
        ("llama", {"{}.attention.head_count_kv": [2, 4]}, "different numbers of heads"),
        ("llama", {"{}.embedding_length": "256"}, "embedding_length is not of type int"),
        ("llama", {"{}.context_length": [512, 512]}, "context_length is not of type int"),
        ("llama", {"{}.embedding_length": 128}, "where its metadata says"),
        ("llama", {"{}.block_count": 1 << 31}, "metadata has 2147483648 layers"),
        ("llama", {"{}.block_count": 3}, "other weights"),
        ("llama", {"split.count": 3}, "in 3 parts, and by its name in 1"),
        ("llama", {"general.architecture": 7}, "general.architecture is not of type str"),
        ("llama", {"general.architecture": "falcon"}, "architecture falcon, which is not read$"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_sentence(path, family, change, said):
    write_model(path, change, family)
    with pytest.raises(ModelError, match=said) as error:
        load_model(path, device="cpu")
    assert "\n" not in str(error.value)


def test_a_kind_that_only_gguf_reads_names_the_package(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    file = opened(path, gguf_bytes({}, {"a": Stored("IQ2_XXS", (2, 256), bytes(132))}))
    with pytest.raises(ModelError, match=r"IQ2_XXS, .* pip install '\.\[gguf\]'") as error:
        read_tensor("a", file.tensors["a"])
    assert "\n" not in str(error.value)


def test_a_vector_in_blocks_is_refused(path):
    file = opened(path, gguf_bytes({}, {"a": Stored("Q8_0", (64,), bytes(68))}))
    with pytest.raises(ModelError, match="a is a vector of kind Q8_0, which is not read"):
        read_tensor("a", file.tensors["a"])


def test_a_stack_of_matrices_in_blocks_becomes_float32(path):
    blocks = random_blocks("IQ2_XXS", 3 * 2 * 256, np.random.default_rng(0))
    file = opened(path, gguf_bytes({}, {"a": Stored("IQ2_XXS", (3, 2, 256), blocks.tobytes())}))
    found = read_tensor("a", file.tensors["a"])
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.flatten(0, 1).numpy(), decode("IQ2_XXS", blocks))


def test_a_kind_that_has_no_weights_is_refused(path):
    file = opened(path, gguf_bytes({}, {"a": Stored("I32", (2, 4), bytes(32))}))
    with pytest.raises(ModelError, match="the tensor a is of kind I32, which is not read"):
        read_tensor("a", file.tensors["a"])


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        (["BF16"], "bfloat16"),
        (["F16"], "float16"),
        (["F16", "F32"], "float32"),
        (["Q8_0"], "float32"),
    ],
)
def test_dtype_is_the_narrowest_without_loss(path, kinds, dtype):
    write_model(path, kinds=kinds)
    assert settings_of(GGUFFile(path))["dtype"] == dtype


def test_a_folder_with_one_gguf_file_is_that_model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder / "a.GGUF")
    check_model(str(folder))
    assert split_gguf(str(folder)) == (str(folder), "a.GGUF")
    assert open_gguf(folder) is not None
    llm = LLM(folder, device="cpu")
    assert llm.generate([1, 2, 3])[0].outputs[0].token_ids
    (folder / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF files; name one: a.GGUF, b.gguf"):
        LLM(folder)
    check_model(str(folder / "a.GGUF"))
    (folder / "model.safetensors").touch()
    assert split_gguf(str(folder)) == (str(folder), None)


SMALL: dict[str, Any] = {
    "general.architecture": "llama",
    "an.int": -3,
    "a.bool": True,
    "a.float": 0.5,
    "a.list": [1, 2, 3],
    "empty": [],
    "texts": ["a", "", "längst"],
    "nested": [[1], [2, 3]],
}
TENSORS = {
    "a": Stored("F32", (3,), struct.pack("<3f", 1, 2, 3)),
    "b": Stored("Q8_0", (2, 64), bytes(range(136))),
}


def test_a_small_file_is_read(path):
    file = opened(path, gguf_bytes(SMALL, TENSORS))
    assert file.get("an.int", int) == -3
    assert file.get("a.bool", bool) is True
    assert file.get("a.float", float) == 0.5
    assert file.get("an.int", float) == -3.0
    assert file.get("absent", str, "none") == "none"
    assert file.array("a.list", int) == [1, 2, 3]
    assert file.array("texts", str) == ["a", "", "längst"]
    assert file.array("absent", str) == file.array("empty", str) == []
    assert bytes(file.tensors["b"].data) == bytes(range(136))
    assert file.tensors["b"].shape == (2, 64)
    vector = read_tensor("a", file.tensors["a"])
    assert isinstance(vector, torch.Tensor)
    assert vector.tolist() == [1, 2, 3]
    assert opened(path, gguf_bytes(SMALL, TENSORS, version=2)).tensors.keys() == {"a", "b"}
    wide = gguf_bytes({**SMALL, "general.alignment": 64}, TENSORS, alignment=64)
    assert bytes(opened(path, wide).tensors["b"].data) == bytes(range(136))


def test_a_value_of_another_type_is_refused(path):
    file = opened(path, gguf_bytes(SMALL))
    kinds: list[tuple[str, Any]] = [
        ("an.int", str), ("a.bool", int), ("an.int", bool), ("a.list", int), ("texts", str),
    ]  # fmt: skip
    for key, kind in kinds:
        with pytest.raises(ModelError, match=f"its {key} is not of type {kind.__name__}"):
            file.get(key, kind)
    for key, kind in (("texts", int), ("nested", int), ("an.int", int)):
        with pytest.raises(ModelError, match=f"its {key} is no array of type"):
            file.array(key, kind)


def test_a_file_that_is_cut_off_anywhere_is_refused(path):
    whole = gguf_bytes(SMALL, TENSORS)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError) as error:
            GGUFFile(path)
        assert "\n" not in str(error.value)
    path.write_bytes(whole)
    GGUFFile(path)


def test_no_spoiled_byte_is_worse_than_one_sentence(path):
    """Whatever a byte becomes, the file is read or refused, and its tensors lie inside it."""
    whole, rng = gguf_bytes(SMALL, TENSORS), np.random.default_rng(0)
    outcomes = {True: 0, False: 0}
    for at in range(len(whole)):
        for value in (0, 255, int(rng.integers(256))):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                file = GGUFFile(path)
                for key in file.metadata:
                    with suppress(ModelError):
                        file.array(key, int)
                for name, tensor in file.tensors.items():
                    read_tensor(name, tensor)
            except ModelError as error:
                assert "\n" not in str(error)  # noqa: PT017
                outcomes[False] += 1
            else:
                outcomes[True] += 1
    assert min(outcomes.values()) > 100


HUGE = (1 << 64) - 1
NUMBER = struct.pack("<Q", HUGE)
DEEP = struct.pack("<IQ", 9, 1) * 100 + struct.pack("<IQ", 4, 0)
F32 = Stored("F32", (3,), bytes(12))


def head(tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def entry(kind: int, shape: tuple[int, ...], offset: int = 0, name: bytes = b"a") -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    named = struct.pack("<Q", len(name)) + name
    return head(tensors=1) + named + sizes + struct.pack("<IQ", kind, offset) + bytes(200)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read"),
        (b"GGU", "no GGUF file"),
        (b"GGML" + bytes(100), "no GGUF file"),
        (b"PK\3\4" + bytes(100), "no GGUF file"),
        (gguf_bytes({}, version=1), "of version 1"),
        (gguf_bytes({}, version=4), "of version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (head(tensors=HUGE) + bytes(100), "counts more than it holds"),
        (head(keys=HUGE) + bytes(100), "counts more than it holds"),
        (head(keys=1) + NUMBER + bytes(100), "cut off"),
        (gguf_bytes({"a": (8, NUMBER)}), "cut off"),
        (gguf_bytes({"a": (9, struct.pack("<I", 4) + NUMBER)}), "counts more"),
        (gguf_bytes({"a": (9, struct.pack("<I", 8) + NUMBER)}), "counts more"),
        (gguf_bytes({"a": (9, struct.pack("<I", 9) + NUMBER)}), "counts more"),
        (gguf_bytes({"a": (9, DEEP)}), "arrays in arrays"),
        (gguf_bytes({"a": (13, bytes(8))}), "type 13"),
        (gguf_bytes({"a": (9, struct.pack("<IQ", 99, 1) + bytes(8))}), "type 99"),
        (gguf_bytes({"a": (8, struct.pack("<Q", 1) + b"\xff")}), "no UTF-8"),
        (gguf_bytes([("a", 1), ("a", 2)]), "key 'a' twice"),
        (gguf_bytes({"general.alignment": 0}), "alignment is 0"),
        (gguf_bytes({"general.alignment": 1 << 30}), "alignment is"),
        (gguf_bytes({"general.alignment": "32"}), "alignment is not of type int"),
        (gguf_bytes({}, [("a", F32), ("a", F32)]), "tensor 'a' twice"),
        (entry(99, (3,)), "kind 99"),
        (entry(4, (32,)), "kind 4"),
        (entry(0, (3, 1, 1, 1, 1)), "5 dimensions"),
        (entry(0, (3, 0)), r"shape \[3, 0\]"),
        (entry(8, (33, 2)), r"kind Q8_0 is of shape \[33, 2\]"),
        (entry(0, (HUGE, HUGE, HUGE, HUGE)), "lies outside"),
        (entry(0, (3,), offset=HUGE), "lies outside"),
        (entry(0, (3,), offset=1 << 40), "lies outside"),
        (entry(0, (3,), offset=4), "lies outside"),
        (entry(0, (3,), offset=64), "'a' does not begin where"),
        (gguf_bytes({}, {"a": Stored("F32", (17,), bytes(40)), "b": F32}), "'b' does not begin"),
        (gguf_bytes({}, {"a": Stored("F32", (3,), bytes(40)), "b": F32}), "'b' does not begin"),
        (entry(0, (3,), name=b"\xff"), "no UTF-8"),
        (entry(0, (3,))[:33] + struct.pack("<I", 1 << 31) + bytes(99), "dimensions"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_in_one_sentence(path, data, said):
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said) as error:
        GGUFFile(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(path))


def test_long_arrays_of_a_hostile_file_are_not_read_until_asked_for(path):
    """Sixteen million nothings are skipped, not made."""
    count = 1 << 24
    raw = struct.pack("<IQ", 7, count) + bytes(count)
    path.write_bytes(gguf_bytes({"a": (9, raw)}))
    assert GGUFFile(path).metadata["a"].length == count
