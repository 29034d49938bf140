"""What is installed, what importing it costs, and what it needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.forks import Forked
from tests.helpers.sources import FILES, MODULES, PACKAGES, ROOT, SOURCES, imports, installed_path

NOT_AT_HAND = {"flashinfer", "triton", "ray", "vllm", "sglang"}
"""Installed where there is a GPU, a cluster, or an engine that a plugin is for."""

DISTRIBUTION = {
    "PIL": "pillow",
    "flashinfer": "flashinfer-python",
    "opentelemetry": "opentelemetry-sdk",  # one of three, whose modules are below one name
    "triton": "torch",  # which brings it
    "vl_convert": "vl-convert-python",
    "zmq": "pyzmq",
}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Standard output of a command, which must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution of a copy, so that it leaves no traces here."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in PACKAGES:
        skip = ignore_patterns("__pycache__", "*.egg-info")
        copytree(ROOT / name, folder / "checkout" / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        copy(ROOT / name, folder / "checkout")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", "../dist")
    run(*build, cwd=folder / "checkout")
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder to put on the path, with the wheel unpacked in it."""
    target = wheel.parent.parent / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_the_wheel_holds_every_file_once_and_only_below_radixcache(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    info = wheel.name.rpartition("-py3")[0] + ".dist-info"
    assert {name.partition("/")[0] for name in names} == {"radixcache", info}
    held = {name for name in names if name.startswith("radixcache/")}
    assert held == {installed_path(path).as_posix() for path in FILES}


def import_each(installed: Path, elsewhere: Path) -> int:
    """Print the files of all modules, imported as if nothing of the project had been."""
    os.chdir(elsewhere)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path = [str(installed), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in MODULES:
        try:
            print(importlib.import_module(name).__file__)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in NOT_AT_HAND:
                raise
    return 0


def test_an_installed_wheel_imports_from_outside_the_repository(installed: Path, tmp_path: Path):
    done = Forked(tmp_path, import_each, installed, tmp_path)  # torch need not be imported again
    assert done.wait(120) == 0, done.err.read_text()
    files = done.out.read_text().splitlines()
    assert files and all(Path(file).is_relative_to(installed) for file in files)


def test_the_folders_at_the_top_do_not_shadow_the_hugging_face_package(tmp_path: Path) -> None:
    """transformers imports `kernels`; a package further down the path beats our bare folder."""
    assert not [f for f in PACKAGES[1:] if (ROOT / f / "__init__.py").exists()]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").touch()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    code = "import kernels; print(kernels.__file__)"
    found = run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=path)
    assert Path(found.strip()) == tmp_path / "kernels/__init__.py"


def test_importing_the_index_brings_its_two_dependencies_and_no_more(tmp_path: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import radixcache
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(names - sys.stdlib_module_names))
"""
    output = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert output.split() == ["numpy", "radixcache", "sortedcontainers"]


def requirements(installed: Path) -> list[Requirement]:
    """Those of the package and all its extras."""
    (info,) = installed.glob("*.dist-info")
    return [Requirement(line) for line in importlib.metadata.Distribution.at(info).requires or []]


def test_the_package_imports_only_what_it_declares(installed: Path) -> None:
    # So neither bench/peers nor tests, and no `kernels.x` where `radixcache.kernels.x` is meant.
    declared = {canonicalize_name(r.name) for r in requirements(installed)}
    known = {"radixcache", *sys.stdlib_module_names}
    for path in SOURCES:
        tops = imports(path) - known
        if path.parts[1] == "plugins":  # which run inside of these
            tops -= {"vllm", "sglang"}
        names = {canonicalize_name(DISTRIBUTION.get(top, top)) for top in tops}
        assert names <= declared, f"{path} imports {names - declared}"


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.13"])
def test_every_requirement_has_one_exact_pin_that_satisfies_it(python: str, installed: Path):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = {"python_version": python, "extra": ""}
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(here)]
    pinned = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert len(pinned) == len(pins)
    for name, pin in pinned.items():
        assert re.fullmatch(r"==\d+(\.\d+)*(b\d+|\.post\d+)?", pin)  # no +cpu: other builds pass
        # unpinned, torch's newest release would come with gigabytes of CUDA
        assert not name.startswith(("nvidia-c", "cuda", "triton"))
    for wanted in requirements(installed):
        newer = python == "3.10" and wanted.name == "import-linter"
        if wanted.name != "radixcache" and not newer:  # the package's own: an extra with another
            version = pinned[canonicalize_name(wanted.name)].removeprefix("==")
            assert version in wanted.specifier


def test_a_development_install_serves_without_another_one(tmp_path: Path) -> None:
    told = run("make", "-n", f"VENV={tmp_path}", f"{tmp_path}/.stamp-dev", cwd=ROOT)
    assert f"touch {tmp_path}/.stamp-dev" in told and f" {tmp_path}/.stamp-server" in told
