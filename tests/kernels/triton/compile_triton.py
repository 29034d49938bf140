"""Compiles the Triton kernels for GPUs that are not here, as `tests.kernels.triton.compile_triton`:
those of the dtypes and head sizes that are given, or of all.

Prints a line for each; ends with an error if one does not compile, needs more shared memory than
the smallest of these GPUs has, or loads what pages hold byte by byte.
"""

from __future__ import annotations

import math
import re
import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixcache.kernels.attention import LayerKind
from radixcache.kernels.kv_format import stored_dim
from radixcache.kernels.triton import attention_kernels as triton_kernels
from radixcache.kernels.triton import experts as triton_experts
from radixcache.kernels.triton import linear as triton_linear
from radixcache.kernels.triton import recurrence as triton_recurrence
from radixcache.kernels.triton.prefill import MIN_SPLIT, block_of, rows_of

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "int8": torch.bfloat16,  # pages of int8
}  # fmt: skip

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}
INDICES = {"slots", "kv_indptr", "kv_indices", "kv_lens", "qo_indptr"}
ODD = {"first_sequence", "splits", "window", "scale", "softcap", "k_head", "v_head"}
ODD |= {"rows", "groups"}
LINEAR = [("numbers", 32), ("ints", 128), ("e2m1", 16), ("e4m3", 128), ("table", 32)]
POINTERS = {"key", "value", "k_pages", "v_pages", "query", "out"}


def constants(
    dtype: str, dim: int, rows: int, splits: int, plain: bool, amd: bool
) -> dict[str, Any]:
    exact = dtype == "fp32"
    return {
        "DIM": dim, "DIM_2": dim, "VALUE": dim, "VALUE_2": dim, "WINDOW": not plain,
        "SOFTCAP": not plain,
        "PAGE": 16, "GROUP": 4, "BLOCK": block_of(dim, DTYPES[dtype], amd), "EXACT": exact,
        "ALIGN": math.gcd(16, stored_dim(dim, torch.int8) if dtype == "int8" else 16),
        "UPCAST": False, "SPLITS": splits, "SPLIT": splits > 1, "SINKS": True, "LSE": True,
        "MIN_SPLIT": MIN_SPLIT, "ROWS": rows,
    }  # fmt: skip


def compile_one(
    name: str,
    rows: int,
    splits: int,
    target: str,
    dtype: str,
    dim: int,
    plain: bool = False,
    **options: int,
) -> None:
    kernel = getattr(triton_kernels, name)
    known = constants(dtype, dim, rows, splits, plain, target == "gfx942")

    def kind(argument: str) -> str:
        if argument in known:
            return "constexpr"
        if argument in INDICES:
            return "*i32"
        if argument in POINTERS and dtype == "int8":
            return "*i8" if "pages" in argument else "*bf16"
        if argument in POINTERS:
            return f"*{dtype}"
        if argument in ("parts", "sums", "sinks", "lse"):
            return "*fp32"
        return "fp32" if argument in ("scale", "softcap") else "i32"

    signature = {argument: kind(argument) for argument in kernel.arg_names}
    values = {name: value for name, value in known.items() if name in signature}
    compile_for(target, kernel, signature, values, f"{dtype} {dim} {name}", **options)


def compile_recurrence(target: str, delta: bool, key: int, value: int, fades: int = 1) -> None:
    kernel = triton_recurrence._recur
    known = {
        "HEADS": 32, "GROUP": 2, "KEY": key, "KEY_2": key, "VALUE": value, "DELTA": delta,
        "FADES": fades,
        "COLUMNS": triton_recurrence.columns_of(key),
    }  # fmt: skip
    kinds = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(known, "constexpr")
    kinds |= dict.fromkeys(("starts", "read", "write", "keeps"), "*i32")
    kinds |= dict.fromkeys(("query_row", "key_row", "value_row"), "i32")
    compile_for(target, kernel, kinds, known, f"{key} x {value} _recur", num_warps=1)


def compile_experts(target: str, dtype: str, rows: int) -> None:
    kernel, amd = triton_experts.grouped_kernel, target == "gfx942"
    known = {
        "COUNT": 128, "COUNT_2": 128, "BIAS": True, "GATHER": True, "EVEN": False, "ROWS": rows,
        "COLUMNS": triton_experts.COLUMNS, "BLOCK": 64 if amd or dtype == "fp32" else 128,
        "EXACT": dtype == "fp32", "UPCAST": False,
    }  # fmt: skip
    kinds = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(known, "constexpr")
    kinds |= dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}")
    kinds |= {"ends": "*i32", "order": "*i64"}
    what = f"{dtype} {rows} grouped_kernel"
    compile_for(target, kernel, kinds, known, what, num_stages=2 if amd else 4)


def compile_linear(target: str, dtype: str, codes: str, group: int, rows: int) -> list[str]:
    """The kinds of Hopper's products that it uses, one after another, without their widths."""
    known = {
        "BITS": 8 if codes in ("numbers", "e4m3") else 4, "CODES": codes, "GROUP": group,
        "GROUPS": max(1, triton_linear.WORDS // group), "MINIMUM": codes == "numbers",
        "BIAS": True, "EVEN": group > 16, "ROWS": rows, "COLUMNS": triton_linear.COLUMNS,
        "WORDS": triton_linear.WORDS, "EXACT": dtype == "fp32", "UPCAST": False,
    }  # fmt: skip
    kernel = triton_linear.linear_kernel
    kinds = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(known, "constexpr")
    kinds |= dict.fromkeys(("x", "bias", "out"), f"*{dtype}")
    kinds |= {"codes": "*u8", "scales": "*fp16", "minimums": "*fp32", "levels": "*fp32"}
    what, stages = f"{dtype} {codes} {group} {rows} linear_kernel", 2 if target == "gfx942" else 4
    made = compile_for(target, kernel, kinds, known, what, num_stages=stages)
    found = re.findall(r"wgmma\.mma_async\S*?\.m64n\d+(k\d+\S*)", made)
    assert bool(found) == (target == "sm_90" and dtype != "fp32")
    return found


def compile_for(
    target: str, kernel: Any, signature: dict[str, str], values: Any, what: str, **options: int
) -> str:
    """Its PTX, on NVIDIA."""
    gpu, limit = TARGETS[target]
    # As at a launch, where addresses and strides are multiples of 16: then loads are pipelined.
    names = list(signature)
    aligned = [n for n in names if signature[n] != "constexpr" and n not in ODD]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    made = triton.compile(source, target=gpu, options=options)
    shared = made.metadata.shared
    print(f"{target} {what}: {shared} bytes of shared memory", flush=True)
    assert shared <= limit, f"{target} has {limit}"
    ptx: str = made.asm.get("ptx", "")
    assert not re.search(r"ld\.global\S*[bsu]8 ", ptx), "byte by byte"
    return ptx


if __name__ == "__main__":
    for target in TARGETS:
        compile_recurrence(target, True, 128, 128)
        compile_recurrence(target, True, 128, 128, fades=128)
        compile_recurrence(target, False, 128, 64)
    dims = [int(dim) for dim in sys.argv[1:] if dim.isdecimal()] or [64, 128, 256, 512]
    for dtype in [name for name in sys.argv[1:] if name in DTYPES] or DTYPES:
        if dtype != "int8":
            for target, rows in product(TARGETS, (16, 64)):
                compile_experts(target, dtype, rows)
            for target in TARGETS:
                few = compile_linear(target, dtype, *LINEAR[0], 16)
                many = [compile_linear(target, dtype, *one, 64) for one in LINEAR]
                assert few == many[0], f"{target}: few rows and many add in other orders"
        for target, dim in product(TARGETS, dims):
            if (target, dtype, dim) == ("gfx942", "fp32", 512):
                continue  # no tile fits: plain torch computes there
            compile_one("append_kernel", 0, 1, target, dtype, dim)
            compile_one("decode_kernel", 16, 16, target, dtype, dim)
            compile_one("merge_kernel", 0, 16, target, dtype, dim)
            for rules, splits in ((None, 16), (9, 1)):
                kind = LayerKind(4, 1, dim, dim, 1.0, rules, rules)
                tile, plain = rows_of(kind, DTYPES[dtype], target == "gfx942"), rules is None
                compile_one("prefill_kernel", tile, splits, target, dtype, dim, plain, num_stages=2)
