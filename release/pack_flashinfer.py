"""Packs FlashInfer for a GPU machine without network: with built kernels, or as sources.

    python -m release.pack_flashinfer --sources flashinfer.tgz
    python -m release.pack_flashinfer flashinfer.tgz

The first takes seconds and no compiler here; the GPU machine needs nvcc and ninja, and its check
builds a Llama's kernels on all cores there. The second needs nvcc 13.0 and gcc here, but no GPU,
and an hour on two cores; built kernels stay in the build folder, and a second call continues from
them. Both download half a gigabyte. On the GPU machine `release/gpu_session.sh` unpacks the
archive and sources its `env.sh`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from release.flashinfer_kernels import all_kernels

FLASHINFER = "flashinfer-python==0.7.2.post1"
HEADERS = ("nvidia-curand==10.4.0.35", "nvidia-cublas==13.0.2.14")
"""Packages used for their headers alone: `sampling` includes the first's, `norm` the second's."""

NEEDED = (
    "apache-tvm-ffi==0.1.15.post2", "nvidia-ml-py", "packaging", "requests", "urllib3", "idna",
    "certifi", "charset-normalizer", "tqdm", "filelock", "jinja2", "markupsafe", "ninja",
)  # fmt: skip
"""Packages that FlashInfer imports besides torch and numpy, and builds with."""

PARTS = "activation cascade decode norm page prefill rope sampling"
"""Modules to pack, with their imports; the rest of FlashInfer is left out."""

_INCLUDED = (
    "include", "cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "cutlass/include",
    "spdlog/include", "csrc/nv_internal",
)  # fmt: skip
"""Folders of FlashInfer's data that kernels include, besides `csrc`."""

ENV = """\
_here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$_here/site${PYTHONPATH:+:$PYTHONPATH} PATH=$PATH:$_here/site/bin
export FLASHINFER_CUDA_ARCH_LIST=%s FLASHINFER_USE_CUDA_NORM=1 FLASHINFER_LOGGING_LEVEL=warning
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$_here/workspace}
export FLASHINFER_EXTRA_CUDAFLAGS=-I$_here/headers FLASHINFER_EXTRA_LDFLAGS=-L$_here/stub
[ ! -x /usr/local/cuda/bin/nvcc ] || export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
command -v nvcc > /dev/null || export FLASHINFER_DISABLE_JIT=1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive", type=Path, help="to write, a .tgz")
    parser.add_argument("--build", type=Path, default=Path("build/flashinfer"), metavar="FOLDER",
                        help="for downloads and built kernels (build/flashinfer)")  # fmt: skip
    parser.add_argument("--sources", action="store_true", help="without kernels")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="kernels with one in their names")
    parser.add_argument("--arch", default="9.0a", help="of the GPU (9.0a, Hopper)")
    parser.add_argument("--python", default="3.12", metavar="V", help="of that machine (3.12)")
    args = parser.parse_args(arguments)
    if not args.sources and shutil.which("nvcc") is None:
        print("nvcc is not there: kernels cannot be built here; see --sources", file=sys.stderr)
        return 2
    build = args.build.resolve()
    fetch(build, args.python)
    kernels = [] if args.sources else compile_kernels(build, args.only, args.arch)
    write(build, args.archive, kernels, args.arch, args.python)
    size = args.archive.stat().st_size / 2**20
    print(f"{args.archive}: {len(kernels)} kernels, {size:.1f} MiB")
    return 0


def fetch(build: Path, python: str) -> None:
    """Download FlashInfer's sources, its imports (for both machines) and headers, unless there."""
    wheels = build / "wheels"
    for requirement in (FLASHINFER, *HEADERS):
        name = requirement.partition("==")[0].replace("-", "_")
        if not list(wheels.glob(f"{name}-*.whl")):
            _pip("download", "--no-deps", "-d", wheels, requirement)
        (wheel,) = wheels.glob(f"{name}-*.whl")
        target = build / ("sources" if requirement == FLASHINFER else "headers")
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if requirement == FLASHINFER
                       or "/include/" in m]  # fmt: skip
            if not (target / members[-1]).exists():
                archive.extractall(target, members)
    if not (build / "tools").exists():
        _pip("install", "--no-deps", "--target", build / "tools", *NEEDED)
    site = build / f"site-{python}"
    if not site.exists():
        there = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        for platform in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
            there += ["--platform", f"{platform}_x86_64"]
        _pip("install", "--no-deps", "--target", site, *there, *NEEDED)


def _pip(verb: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", verb, "-q", *map(str, arguments)], check=True)


def link_stub(build: Path) -> Path:
    """Make an empty library to link with, in place of the driver's."""
    stub = build / "stub"
    stub.mkdir(exist_ok=True)
    if (compiler := shutil.which("gcc")) is not None:
        (stub / "empty.c").write_text("int radixcache_stub;\n")
        library, source = stub / "libcuda.so", stub / "empty.c"
        subprocess.run(
            [compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True
        )
    return stub


def compile_kernels(build: Path, only: Sequence[str] | None, arch: str) -> list[str]:
    """Build missing kernels into `aot` of the build folder; returns all kernels' names."""
    nvcc = Path(shutil.which("nvcc") or "").resolve()
    usual = Path("/usr/local/cuda")  # nvcc may be a script elsewhere that calls the one there
    home = usual if (usual / "bin/nvcc").exists() else nvcc.parent.parent
    os.environ |= {
        "CUDA_HOME": os.environ.get("CUDA_HOME") or str(home),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(build / "workspace"),
        "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(
            f"-I{folder}" for folder in (build / "headers").glob("nvidia/*/include")
        ),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{link_stub(build)}",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "MAX_JOBS": os.environ.get("MAX_JOBS", "2"),
        "PATH": f"{build / 'tools/bin'}:{os.environ['PATH']}",
    }
    sys.path[:0] = [str(build / "tools"), str(build / "sources")]
    specs = {spec.name: spec for spec in all_kernels()}
    chosen = [name for name in specs if not only or any(word in name for word in only)]
    for name in chosen:
        library = build / "aot" / arch / name / f"{name}.so"
        if library.exists():
            continue
        start = time.monotonic()
        specs[name].build(verbose=False)
        library.parent.mkdir(parents=True, exist_ok=True)
        strip = ["strip", "--strip-unneeded", "-o", library, specs[name].jit_library_path]
        subprocess.run(strip, check=True)
        took, size = time.monotonic() - start, library.stat().st_size / 2**20
        print(f"{took:4.0f} s, {size:4.1f} MiB: {name}", flush=True)
    return chosen


def write(build: Path, archive: Path, kernels: Iterable[str], arch: str, python: str) -> None:
    """Write the archive: kernels, the modules that load them, and their imports."""
    code = f"import flashinfer, sys\nfrom flashinfer import {', '.join(PARTS.split())}\n" + (
        "print(*(m.__file__ for n, m in list(sys.modules.items())"
        " if n.split('.')[0] == 'flashinfer' and getattr(m, '__file__', None)), sep='\\n')"
    )
    path = os.pathsep.join([str(build / "tools"), str(build / "sources")])
    used = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    ).stdout.split()  # fmt: skip
    sources = build / "sources"
    files = {Path(file) for file in used if file.startswith(str(sources))}
    files |= {f for f in (sources / "flashinfer").rglob("*.json") if "data" not in f.parts}
    data = sources / "flashinfer/data"  # loading a built kernel renders its sources nonetheless
    files |= {file for file in (data / "csrc").iterdir() if file.is_file()}
    for folder in _INCLUDED:
        files |= {file for file in (data / folder).rglob("*") if file.is_file()}
    (build / "env.sh").write_text(ENV % arch)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(build / "env.sh", "env.sh")
        tar.add(build / "stub", "stub")
        for headers in (build / "headers").glob("nvidia/*/include"):
            tar.add(headers, "headers")
        tar.add(build / f"site-{python}", "site", filter=_no_caches)
        for file in sorted(files):
            tar.add(file, f"site/{file.relative_to(sources)}")
        for name in kernels:
            library = build / "aot" / arch / name / f"{name}.so"
            tar.add(library, f"site/flashinfer/data/aot/{name}/{name}.so")


def _no_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    unused = ("__pycache__", "tvm_ffi/src", "tvm_ffi/3rdparty")
    return None if any(part in member.name for part in unused) else member


if __name__ == "__main__":
    sys.exit(main())
