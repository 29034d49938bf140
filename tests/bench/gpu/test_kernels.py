"""What the backend asks of FlashInfer is known by name, packed, and missed if it is not there."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from radixcache.bench.gpu import environment, pack
from radixcache.bench.gpu.kernel_names import (
    COMMON,
    GATE,
    Attention,
    all_kernels,
    attention_kernels,
    missing,
)
from radixcache.bench.gpu.report import Report
from radixcache.kernels.choice import try_out
from radixcache.runtime.model.load import VERIFIED
from tests.bench.gpu.rehearsal import rehearsal_place
from tests.kernels.gpu import pretend_gpu
from tests.pretend_cuda import CUDA

NAMES = [*COMMON, *(kernel.name for kernel in all_kernels())]


def test_the_names_are_those_of_flashinfer() -> None:
    of_bf16 = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32"
    heads = "head_dim_qk_128_head_dim_vo_128_posenc_0"
    decode = Attention("decode", torch.bfloat16, 128, False, True)
    assert decode.name == (
        f"batch_decode_with_kv_cache_{of_bf16}_{heads}_use_swa_False_use_logits_cap_True"
    )
    fa2 = Attention("fa2", torch.bfloat16, 128, True, False)
    assert fa2.name == (
        f"batch_prefill_with_kv_cache_{of_bf16}_{heads}_use_swa_True_use_logits_cap_False"
        "_f16qk_False_kv_stride_equal"
    )


def test_every_model_type_of_the_gate_is_there() -> None:
    assert set(GATE) == VERIFIED
    dims = {kernel.head_dim for kernel in all_kernels()}
    rules = {(kernel.window, kernel.softcap) for kernel in all_kernels()}
    assert dims == {64, 128, 256} and len(rules) == 4


@pytest.mark.parametrize("model", GATE)
def test_the_backend_asks_for_these_kernels(model: str) -> None:
    for real in GATE[model]:
        kind = real._replace(query_heads=real.query_heads // real.kv_heads, kv_heads=1)
        with pretend_gpu(any_dtype=False) as gpu:
            backend = gpu.backend.FlashInferBackend(CUDA, torch.bfloat16, [kind])
            try_out(backend, CUDA, torch.bfloat16, [kind])
            decode = [w for (use, *_), w in backend._wrappers.items() if use == "decode"]
            assert {use for use, *_ in backend._wrappers} >= {"decode", "prefill", "ragged"}
            plain = not all(wrapper._use_tensor_cores for wrapper in decode)
        uses = ["fa2", "decode"] if plain else ["fa2"]
        found = attention_kernels([kind], torch.bfloat16)
        assert [kernel.use for kernel in found] == uses
        assert {(k.head_dim, k.window, k.softcap) for k in found} == {
            (kind.head_dim, kind.window is not None, kind.softcap is not None)
        }


def test_a_missing_kernel_is_named() -> None:
    assert missing(NAMES) == []
    for name in NAMES:
        assert missing(n for n in NAMES if n != name) == [name]
    only_bf16 = [name for name in NAMES if "_f16_" not in name]
    assert missing(only_bf16, [torch.bfloat16]) == [] and missing(only_bf16)


def test_the_environment_names_what_an_archive_lacks(tmp_path) -> None:
    for name in NAMES[1:]:
        library = tmp_path / "data/aot" / name / f"{name}.so"
        library.parent.mkdir(parents=True)
        library.touch()
    package = ModuleType("flashinfer")
    package.__file__ = str(tmp_path / "__init__.py")
    report = Report("environment", tmp_path / "rows", 60)
    with rehearsal_place(tmp_path) as place:
        sys.modules["flashinfer"] = package  # until the rehearsal ends
        environment.run(place, report)
    rows = {row.name: row for row in report.rows}
    assert rows["built kernels of FlashInfer"].lines == sorted(NAMES[1:])
    assert rows["of the gate's models, not built"].lines == NAMES[:1]


# Packing. What nvcc makes of it is not tested here.


def test_the_packer_lists_what_it_packs(capsys) -> None:
    assert pack.main(["none.tgz", "--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert missing(listed) == [] and listed[:2] == ["page", "cascade"]
    assert pack.main(["none.tgz", "--list", "--only", "norm", "_bf16"]) == 0
    assert all("norm" in n or "_bf16" in n for n in capsys.readouterr().out.split())


def test_without_a_compiler_nothing_is_packed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert pack.main([str(tmp_path / "a.tgz"), "--build", str(tmp_path / "build")]) == 2
    assert "nvcc is not there" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_archive_holds_kernels_and_what_loads_them(tmp_path) -> None:
    def write(path: str, text: str = "") -> None:
        file = tmp_path / "build" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    package = "sources/flashinfer"
    for name in ["__init__", *pack.PARTS.split(), "of_no_use"]:
        write(f"{package}/{name}.py")
    for name in ("page.cu", "batch_decode.jinja", "utils.h", "gemm.cu"):
        write(f"{package}/data/csrc/{name}")
    write("site-3.12/tvm_ffi/__init__.py")
    write("aot/9.0a/page/page.so", "ELF")
    archive = tmp_path / "flashinfer.tgz"
    pack.write(tmp_path / "build", archive, ["page"], "9.0a", "3.12")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there"
    held = {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}
    inside = "site/flashinfer"
    sources = {f"{inside}/data/csrc/{n}" for n in ("page.cu", "batch_decode.jinja", "utils.h")}
    modules = {f"{inside}/{n}.py" for n in ["__init__", *pack.PARTS.split()]}
    assert held == modules | sources | {
        "env.sh", "site/tvm_ffi/__init__.py", f"{inside}/data/aot/page/page.so",
    }  # fmt: skip
    assert "FLASHINFER_DISABLE_JIT=1" in Path(there, "env.sh").read_text()
