"""What is installed, what importing it costs, and what it needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.forks import Forked
from tests.sources import FILES, MODULES, PACKAGES, ROOT, SOURCES, imports, installed_path

NOT_AT_HAND = {"flashinfer", "triton", "ray"}
"""Installed where there is a GPU, or a cluster."""


def import_each(installed: Path, elsewhere: Path) -> int:
    """Print the files of all modules, imported as if nothing of the project had been."""
    os.chdir(elsewhere)
    ours = {"radixcache", "runtime", "kernels", "bench"}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path = [str(installed), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in NOT_AT_HAND:
                raise
        else:
            print(module.__file__)
    return 0


# Enough where the same files are known to import.
FIND_EACH = """
import importlib.util, sys
for name in sys.argv[1:]:
    print(importlib.util.find_spec(name).origin)
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Standard output of a command, which must succeed."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What is installed.


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that none leaves its traces in the repository."""
    target = tmp_path_factory.mktemp("packaging") / "checkout"
    for folder in PACKAGES:
        skip = ignore_patterns("__pycache__", "*.egg-info")
        copytree(ROOT / folder, target / folder, symlinks=True, ignore=skip)
    for name in ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]:
        copy(ROOT / name, target)
    return target


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """The wheel, built from the source distribution."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "../dist", cwd=checkout)
    (built,) = (checkout.parent / "dist").glob("*.whl")
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
    assert {name.partition("/")[0] for name in names} == {
        "radixcache",
        wheel.name.rpartition("-py3")[0] + ".dist-info",
    }
    held = {name for name in names if name.startswith("radixcache/")}
    assert held == {installed_path(path).as_posix() for path in FILES}
    assert "radixcache/py.typed" in held


def test_a_wheel_built_without_the_sdist_is_the_same(checkout: Path, wheel: Path) -> None:
    target = checkout.parent / "direct"
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", target, ".", cwd=checkout)
    (direct,) = target.glob("*.whl")
    assert sorted(zipfile.ZipFile(direct).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_an_installed_wheel_imports_from_outside_the_repository(
    installed: Path, tmp_path: Path
) -> None:
    done = Forked(tmp_path, import_each, installed, tmp_path)  # torch need not be imported again
    assert done.wait(120) == 0, done.err.read_text()
    files = done.out.read_text().splitlines()
    assert files
    assert all(Path(file).is_relative_to(installed) for file in files)


def test_an_editable_install_imports_from_outside_the_repository(
    checkout: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps")
    # Dependencies and setuptools come from the environment that runs the tests. A path in a .pth
    # file brings its packages but not its own editable install of radixcache.
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=venv).strip()
    )
    (site / "outer.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip, "--ignore-installed", "--no-build-isolation", "-e", checkout, cwd=tmp_path)
    files = run(python, "-c", FIND_EACH, *MODULES, cwd=tmp_path, PYTHONPATH="")
    assert len(files.splitlines()) == len(MODULES)
    assert all(Path(file).is_relative_to(checkout) for file in files.splitlines())


# What a name means.


@pytest.mark.parametrize("folder", ["kernels", "runtime", "bench"])
def test_the_folders_at_the_top_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_with_the_root_on_the_path_kernels_is_still_the_hugging_face_package(
    tmp_path: Path,
) -> None:
    # transformers imports `kernels`; a regular package further down the path beats our bare folder.
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").touch()
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    code = "import kernels; print(kernels.__file__)"
    found = run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=path)
    assert Path(found.strip()) == tmp_path / "kernels/__init__.py"


# What importing costs.


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


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_the_package_imports_only_what_it_declares(path: Path, installed: Path) -> None:
    # So neither bench/peers nor tests, and no `kernels.x` where `radixcache.kernels.x` is meant.
    declared = {canonicalize_name(r.name) for r in requirements(installed)}
    for imported in imports(path):
        if imported.top not in {"radixcache", *sys.stdlib_module_names}:
            name = DISTRIBUTION.get(imported.top, imported.top)
            assert canonicalize_name(name) in declared


DISTRIBUTION = {
    "flashinfer": "flashinfer-python",
    "opentelemetry": "opentelemetry-sdk",  # one of three, whose modules are below one name
    "triton": "torch",  # which brings it
    "vl_convert": "vl-convert-python",
    "zmq": "pyzmq",
}


# What the constraints promise.


def requirements(installed: Path, *but: str) -> list[Requirement]:
    """Requirements of the package and its extras, `but` those of some."""
    (info,) = installed.glob("*.dist-info")
    lines = importlib.metadata.Distribution.at(info).requires or []
    return [
        Requirement(line)
        for line in lines
        if not any(f'extra == "{extra}"' in line.replace("'", '"') for extra in but)
    ]


def pins(python: str) -> dict[str, Requirement]:
    """The constraints that hold under a Python version, by package."""
    found: dict[str, Requirement] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert pin.name not in found
            found[canonicalize_name(pin.name)] = pin
    return found


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.13"])
def test_every_requirement_has_one_exact_pin_that_satisfies_it(
    python: str, installed: Path
) -> None:
    pinned = pins(python)
    for pin in pinned.values():
        assert re.fullmatch(
            r"==\d+(\.\d+)*(b\d+|\.post\d+)?", str(pin.specifier)
        )  # no +cpu: other builds pass
    for requirement in requirements(installed, "cuda"):  # that one follows the GPU's driver
        if requirement.name == "radixcache":  # an extra that includes another
            continue
        if python == "3.10" and requirement.name == "import-linter":  # it needs a newer one
            continue
        version = str(pinned[canonicalize_name(requirement.name)].specifier).removeprefix("==")
        assert version in requirement.specifier


def test_the_pins_keep_gpu_packages_away() -> None:
    pinned = pins("3.11")
    assert "torch" in pinned  # unpinned, its newest release would come with gigabytes of CUDA
    assert not [n for n in pinned if n.startswith(("nvidia", "cuda", "triton", "flashinfer"))]
