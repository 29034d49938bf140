"""Compiles the Triton kernels for GPUs that are not here: `python -m tests.kernels.compile_triton`.

Prints a line for each; ends with an error if one does not compile, or needs more shared memory
than the smallest of these GPUs has.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixcache.kernels import triton_backend

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
INDICES = {"slots", "kv_indptr", "kv_indices", "kv_lens", "qo_indptr"}
POINTERS = {"key", "value", "k_pages", "v_pages", "query", "out"}


def constants(dtype: str, dim: int, rows: int) -> dict[str, Any]:
    exact = dtype == "fp32"
    return {
        "DIM": dim, "DIM_2": dim, "VALUE": dim, "VALUE_2": dim, "WINDOW": True, "SOFTCAP": True,
        "PAGE": 16, "GROUP": 4, "BLOCK": triton_backend.BLOCK // (1 + exact), "EXACT": exact,
        "UPCAST": False, "SPLITS": triton_backend.SPLITS, "SINKS": True,
        "MIN_SPLIT": triton_backend.MIN_SPLIT, "ROWS": rows,
    }  # fmt: skip


def compile_one(name: str, rows: int, target: str, dtype: str, dim: int) -> None:
    kernel = getattr(triton_backend, name)
    known = constants(dtype, dim, rows)

    def kind(argument: str) -> str:
        if argument in known:
            return "constexpr"
        if argument in INDICES:
            return "*i32"
        if argument in POINTERS:
            return f"*{dtype}"
        if argument in ("parts", "sums", "sinks"):
            return "*fp32"
        return "fp32" if argument in ("scale", "softcap") else "i32"

    signature = {argument: kind(argument) for argument in kernel.arg_names}
    values = {name: value for name, value in known.items() if name in signature}
    gpu, limit = TARGETS[target]
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=values), target=gpu)
    shared = made.metadata.shared
    print(f"{target} {dtype} {dim} {name}: {shared} bytes of shared memory", flush=True)
    assert shared <= limit, f"{target} has {limit}"


if __name__ == "__main__":
    for dtype in sys.argv[1:] or ("bf16", "fp16", "fp32"):
        tile = triton_backend.ROWS // (1 + (dtype == "fp32"))
        kernels = {"_append": 0, "_decode": 16, "_merge": 0, "_prefill": tile}
        for target, dim, (name, rows) in product(TARGETS, (64, 128), kernels.items()):
            compile_one(name, rows, target, dtype, dim)
