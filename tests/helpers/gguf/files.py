"""GGUF files: a writer, random blocks, and tiny models in both formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Where a block's float16 numbers are, and what makes weights of some 0.06.
HALVES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 0.013},
    "Q4_1": {0: 0.013, 2: -0.1},
    "Q5_0": {0: 0.0065},
    "Q5_1": {0: 0.0065, 2: -0.1},
    "Q8_0": {0: 0.0008},
    "Q2_K": {80: 0.006, 82: 0.009},
    "Q3_K": {108: 0.0015},
    "Q4_K": {0: 0.0002, 2: 0.0015},
    "Q5_K": {0: 0.0001, 2: 0.0015},
    "Q6_K": {208: 0.00005},
    "IQ4_NL": {0: 0.0008},
    "IQ4_XS": {0: 0.00005},
    "MXFP4": {},
    "NVFP4": {},
    "IQ1_S": {0: 0.005},
    "IQ1_M": {},
    "IQ2_XXS": {0: 0.001},
    "IQ2_XS": {0: 0.001},
    "IQ2_S": {0: 0.001},
    "IQ3_XXS": {0: 0.0005},
    "IQ3_S": {0: 0.0005},
    "TQ1_0": {52: 0.06},
    "TQ2_0": {64: 0.06},
}


class Stored(NamedTuple):
    """A tensor of a file: kind, shape as torch has it, and its bytes."""

    kind: str | int
    shape: tuple[int, ...]
    data: bytes


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """A value of the metadata with its type before it; a tuple is (type, bytes) as they are."""
    if isinstance(value, tuple):
        return struct.pack("<I", value[0]) + value[1]
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    parts = [value_of(part) for part in value]
    kind = parts[0][:4] if parts else struct.pack("<I", 4)
    return (
        struct.pack("<I", 9) + kind + struct.pack("<Q", len(parts)) + b"".join(p[4:] for p in parts)
    )


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Mapping[str, Stored] | Sequence[tuple[str, Stored]] = (),
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    keys = [*(metadata.items() if isinstance(metadata, Mapping) else metadata)]
    named = [*(tensors.items() if isinstance(tensors, Mapping) else tensors)]
    head = b"GGUF" + struct.pack("<IQQ", version, len(named), len(keys))
    head += b"".join(text(key) + value_of(value) for key, value in keys)
    data = b""
    for name, (kind, shape, raw) in named:
        data += bytes(-len(data) % alignment)
        number = kind if isinstance(kind, int) else gguf.GGMLQuantizationType[kind].value
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += text(name) + sizes + struct.pack("<IQ", number, len(data))
        data += raw
    return head + bytes(-len(head) % alignment) + data


def random_blocks(
    kind: str, weights: int, rng: np.random.Generator, *, wild: bool = False
) -> Bytes:
    """Blocks whose bits are random; `wild` takes float16 numbers of all sizes and signs."""
    width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    count = weights // width
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    if kind == "MXFP4":  # a power of two
        blocks[:, 0] = rng.integers(0, 150, count) if wild else rng.integers(121, 124, count)
    if kind == "NVFP4":
        blocks[:, :4] = rng.integers(0, 256 if wild else 16, (count, 4))
        blocks[0, :2] = (127, 255) if wild else 0
    if kind == "IQ1_M":  # the four parts of a finite float16
        blocks[:, 55] &= 0xBF if wild else 0x1F
    for at, usual in HALVES[kind].items():
        scale = usual * rng.uniform(0.5, 1.5, count)
        if wild:
            scale = rng.standard_normal(count) * 10.0 ** rng.integers(-7, 3, count)
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def decode(kind: str, blocks: Bytes) -> Floats:
    """[blocks, weights] in float32, by the package of those who made the format."""
    weights: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return weights


# A tiny model: of 256 columns, for K-quants are blocks of so many.
HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY = 256, 256, 8, 2, 32, 2, 260
_MATRICES = {
    "attn_q": ("self_attn.q_proj", HEADS * DIM, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * DIM, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * DIM, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HEADS * DIM),
    "ffn_gate": ("mlp.gate_proj", INNER, HIDDEN),
    "ffn_up": ("mlp.up_proj", INNER, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, INNER),
}


# What a config and the metadata of a GGUF file call it.
_SHAPE = [
    ("vocab_size", "vocab_size", VOCABULARY),
    ("hidden_size", "embedding_length", HIDDEN),
    ("intermediate_size", "feed_forward_length", INNER),
    ("num_hidden_layers", "block_count", LAYERS),
    ("num_attention_heads", "attention.head_count", HEADS),
    ("num_key_value_heads", "attention.head_count_kv", KV_HEADS),
    ("head_dim", "attention.key_length", DIM),
    ("max_position_embeddings", "context_length", 512),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon", 1e-5),
    ("rope_theta", "rope.freq_base", 10_000.0),
]


def config_of(family: str) -> dict[str, Any]:
    """config.json of the tiny models."""
    return {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        **{name: value for name, _, value in _SHAPE},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **({"sliding_window": 7} if family == "mistral" else {}),
    }


def metadata_of(family: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same of a GGUF file; "{}" in a key stands for the architecture, None takes it away."""
    name = "llama" if family == "mistral" else family
    metadata = {
        "general.architecture": name,
        **{f"{{}}.{key}": value for _, key, value in _SHAPE},
        "{}.attention.value_length": DIM,
        **({"{}.attention.sliding_window": 7} if family == "mistral" else {}),
        **(more or {}),
    }
    return {key.format(name): value for key, value in metadata.items() if value is not None}


def write_model(
    path: Path,
    metadata: Mapping[str, Any] | None = None,
    family: str = "llama",
    kinds: Sequence[str] = ("Q8_0",),
    *,
    tied: bool = False,
    seed: int = 0,
    extra: Mapping[str, Stored] | None = None,
) -> dict[str, torch.Tensor]:
    """A tiny random model; its weights as a safetensors folder would have them.

    Args:
        metadata: other than `metadata_of` has it.
        kinds: of the matrices, in turn.
        tied: the head is the embedding.
        extra: more tensors of the file.
    """
    rng, tensors, dense = np.random.default_rng(seed), dict(extra or {}), {}
    left = list(kinds)

    def matrix(name: str, ours: str, rows: int, columns: int, heads: int = 0) -> None:
        kind = left[0]
        left.append(left.pop(0))
        raw, weights = _matrix(kind, rows, columns, rng)
        tensors[name] = Stored(kind, (rows, columns), raw)
        dense[ours] = _apart(weights, heads) if heads else weights

    def vector(name: str, ours: str, size: int, heads: int = 0, mean: float = 1.0) -> None:
        values = torch.from_numpy(rng.normal(mean, 0.2, size).astype(np.float32))
        tensors[name] = Stored("F32", (size,), values.numpy().tobytes())
        dense[ours] = _apart(values, heads) if heads else values

    matrix("token_embd.weight", "model.embed_tokens.weight", VOCABULARY, HIDDEN)
    vector("output_norm.weight", "model.norm.weight", HIDDEN)
    if not tied:
        matrix("output.weight", "lm_head.weight", VOCABULARY, HIDDEN)
    turned = family in ("llama", "mistral")
    for layer in range(LAYERS):
        to, of = f"blk.{layer}.", f"model.layers.{layer}."
        vector(f"{to}attn_norm.weight", f"{of}input_layernorm.weight", HIDDEN)
        vector(f"{to}ffn_norm.weight", f"{of}post_attention_layernorm.weight", HIDDEN)
        for name, (ours, rows, columns) in _MATRICES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name, 0) if turned else 0
            matrix(f"{to}{name}.weight", f"{of}{ours}.weight", rows, columns, heads)
            if family == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                vector(f"{to}{name}.bias", f"{of}{ours}.bias", rows, mean=0.0)
        if family == "qwen3":
            for part in "qk":
                vector(f"{to}attn_{part}_norm.weight", f"{of}self_attn.{part}_norm.weight", DIM)
    path.write_bytes(gguf_bytes(metadata_of(family, metadata or {}), tensors))
    return dense


def write_folder(folder: Path, family: str, dense: Mapping[str, torch.Tensor], **more: Any) -> Path:
    """The same model as config.json and safetensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config_of(family), **more}))
    save_file({n: w.contiguous() for n, w in dense.items()}, folder / "model.safetensors")
    return folder


def _matrix(
    kind: str, rows: int, columns: int, rng: np.random.Generator
) -> tuple[bytes, torch.Tensor]:
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        weights = torch.from_numpy(rng.normal(0, 0.06, (rows, columns))).to(dtype)
        return weights.view(torch.uint8).numpy().tobytes(), weights.float()
    blocks = random_blocks(kind, rows * columns, rng)
    return blocks.tobytes(), torch.from_numpy(decode(kind, blocks)).view(rows, columns)


def _apart(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 2 j and 2 j + 1 of a head to j and j + half of it."""
    apart, dim = torch.empty_like(weights), len(weights) // heads
    for head in range(heads):
        for j in range(dim // 2):
            apart[head * dim + j] = weights[head * dim + 2 * j]
            apart[head * dim + dim // 2 + j] = weights[head * dim + 2 * j + 1]
    return apart
