"""GGUF files: a writer, the block formats weight by weight, and tiny models in both formats.

Nothing of it is shared with what reads them. `decode` says of each position where the bits of its
weight are, as the format's definition does, while the product takes whole fields apart.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10}
NUMBERS |= {"Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ4_NL": 20}
NUMBERS |= {"IQ4_XS": 23, "BF16": 30}

# Weights and bytes of a block; where its float16 numbers are, and what makes weights of some 0.06.
SIZES: dict[str, tuple[int, int, dict[int, float]]] = {
    "Q4_0": (32, 18, {0: 0.013}),
    "Q4_1": (32, 20, {0: 0.013, 2: -0.1}),
    "Q5_0": (32, 22, {0: 0.0065}),
    "Q5_1": (32, 24, {0: 0.0065, 2: -0.1}),
    "Q8_0": (32, 34, {0: 0.0008}),
    "Q2_K": (256, 84, {80: 0.006, 82: 0.009}),
    "Q3_K": (256, 110, {108: 0.0015}),
    "Q4_K": (256, 144, {0: 0.0002, 2: 0.0015}),
    "Q5_K": (256, 176, {0: 0.0001, 2: 0.0015}),
    "Q6_K": (256, 210, {208: 0.00005}),
    "IQ4_NL": (32, 18, {0: 0.0008}),
    "IQ4_XS": (256, 136, {0: 0.00005}),
}
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


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
        number = kind if isinstance(kind, int) else NUMBERS[kind]
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += text(name) + sizes + struct.pack("<IQ", number, len(data))
        data += raw
    return head + bytes(-len(head) % alignment) + data


def random_blocks(kind: str, count: int, rng: np.random.Generator, *, wild: bool = False) -> Bytes:
    """Blocks whose bits are random; `wild` takes float16 numbers of all sizes and signs."""
    _, size, halves = SIZES[kind]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at, usual in halves.items():
        scale = usual * rng.uniform(0.5, 1.5, count)
        if wild:
            scale = rng.standard_normal(count) * 10.0 ** rng.integers(-7, 3, count)
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    return blocks


def decode(kind: str, blocks: Bytes) -> Floats:
    """[blocks, weights] in float32, one position of all blocks after the other."""
    width = SIZES[kind][0]
    weights = [_WEIGHTS[kind](blocks, position) for position in range(width)]
    return np.stack(weights, axis=1).astype(np.float32)


def _half(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _int(values: Any) -> NDArray[np.int64]:
    return np.asarray(values).astype(np.int64)


def _nibble(blocks: Bytes, byte: int, high: int) -> NDArray[np.int64]:
    return _int(blocks[:, byte]) >> (4 * high) & 15


def _bit(blocks: Bytes, byte: int, place: int) -> NDArray[np.int64]:
    return _int(blocks[:, byte]) >> place & 1


def _f32(values: NDArray[np.int64]) -> Floats:
    return values.astype(np.float32)


def _q45(b: Bytes, i: int, bits: int, has_minimum: bool) -> Floats:
    """Q4_0, Q4_1, Q5_0 and Q5_1; a weight's fifth bit stands before all nibbles."""
    at = 4 if has_minimum else 2
    number = _nibble(b, (at + 4 if bits == 5 else at) + i % 16, i // 16)
    if bits == 5:
        number = number + 16 * _bit(b, at + i // 8, i % 8)
    if has_minimum:
        return _half(b, 0) * _f32(number) + _half(b, 2)
    return _half(b, 0) * _f32(number - 2 ** (bits - 1))


def _q8_0(b: Bytes, i: int) -> Floats:
    return _half(b, 0) * b[:, 2 + i].view(np.int8).astype(np.float32)


def _q2_k(b: Bytes, i: int) -> Floats:
    number = _int(b[:, 16 + 32 * (i // 128) + i % 32]) >> (2 * (i % 128 // 32)) & 3
    scale = _half(b, 80) * _f32(_nibble(b, i // 16, 0))
    return scale * _f32(number) - _half(b, 82) * _f32(_nibble(b, i // 16, 1))


def _q3_k(b: Bytes, i: int) -> Floats:
    number = _int(b[:, 32 + 32 * (i // 128) + i % 32]) >> (2 * (i % 128 // 32)) & 3
    number = number - 4 * (1 - _bit(b, i % 32, i // 32))
    k = i // 16
    low = _nibble(b, 96 + k % 8, k // 8)
    scale = low + 16 * (_int(b[:, 104 + k % 4]) >> (2 * (k // 4)) & 3) - 32
    return _half(b, 108) * _f32(scale) * _f32(number)


def _scale_of_k(b: Bytes, s: int) -> tuple[Floats, Floats]:
    """Scale and minimum of the sub-block s of Q4_K and Q5_K."""
    if s < 4:
        scale, minimum = _int(b[:, 4 + s]) & 63, _int(b[:, 8 + s]) & 63
    else:
        scale = _nibble(b, 8 + s, 0) + 16 * (_int(b[:, s]) >> 6)
        minimum = _nibble(b, 8 + s, 1) + 16 * (_int(b[:, 4 + s]) >> 6)
    return _half(b, 0) * _f32(scale), _half(b, 2) * _f32(minimum)


def _q4_k(b: Bytes, i: int) -> Floats:
    scale, minimum = _scale_of_k(b, i // 32)
    return scale * _f32(_nibble(b, 16 + 32 * (i // 64) + i % 32, i // 32 % 2)) - minimum


def _q5_k(b: Bytes, i: int) -> Floats:
    scale, minimum = _scale_of_k(b, i // 32)
    number = _nibble(b, 48 + 32 * (i // 64) + i % 32, i // 32 % 2)
    return scale * _f32(number + 16 * _bit(b, 16 + i % 32, i // 32)) - minimum


def _q6_k(b: Bytes, i: int) -> Floats:
    half, quarter, place = i // 128, i % 128 // 32, i % 32
    low = _nibble(b, 64 * half + 32 * (quarter % 2) + place, quarter // 2)
    high = _int(b[:, 128 + 32 * half + place]) >> (2 * quarter) & 3
    scale = _half(b, 208) * b[:, 192 + i // 16].view(np.int8).astype(np.float32)
    return scale * _f32(low + 16 * high - 32)


def _iq4_nl(b: Bytes, i: int) -> Floats:
    return _half(b, 0) * _f32(_IQ4[_nibble(b, 2 + i % 16, i // 16)])


def _iq4_xs(b: Bytes, i: int) -> Floats:
    s = i // 32
    scale = _nibble(b, 4 + s // 2, s % 2) + 16 * (_int(b[:, 2 + s // 4]) >> (2 * (s % 4)) & 3)
    number = _IQ4[_nibble(b, 8 + 16 * s + i % 16, i % 32 // 16)]
    return _half(b, 0) * _f32(scale - 32) * _f32(number)


_WEIGHTS: dict[str, Callable[[Bytes, int], Floats]] = {
    "Q4_0": partial(_q45, bits=4, has_minimum=False),
    "Q4_1": partial(_q45, bits=4, has_minimum=True),
    "Q5_0": partial(_q45, bits=5, has_minimum=False),
    "Q5_1": partial(_q45, bits=5, has_minimum=True),
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}

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
    blocks = random_blocks(kind, rows * columns // SIZES[kind][0], rng)
    return blocks.tobytes(), torch.from_numpy(decode(kind, blocks)).view(rows, columns)


def _apart(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 2 j and 2 j + 1 of a head to j and j + half of it."""
    apart, dim = torch.empty_like(weights), len(weights) // heads
    for head in range(heads):
        for j in range(dim // 2):
            apart[head * dim + j] = weights[head * dim + 2 * j]
            apart[head * dim + dim // 2 + j] = weights[head * dim + 2 * j + 1]
    return apart
