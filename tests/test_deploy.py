"""docs/deploy: that each file fits the project, as far as can be told without what reads it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

from radixcache.runtime.cli import main

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "docs" / "deploy"
UNIT = DEPLOY / "radixcache.service"


def command(line: str) -> list[str]:
    """What is given to `radixcache` in a command line."""
    words = shlex.split(line)
    at = next(i for i, word in enumerate(words) if word.endswith("radixcache"))
    return words[at + 1 :]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, without comments, continued lines in one."""
    text = (DEPLOY / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line]


def test_the_image_copies_what_there_is_and_what_the_context_holds():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    copied = [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]
    assert copied and {f"!{name}" for name in copied} == {n for n in ignored if n[0] == "!"}
    for name in copied:
        assert (ROOT / name).exists()


def test_a_package_can_be_built_of_what_the_image_copies(tmp_path: Path):
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                to = tmp_path / target / (source if target == "./" else "")
                if (ROOT / source).is_dir():
                    leave = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / source, to, symlinks=True, ignore=leave)
                else:
                    shutil.copy(ROOT / source, to)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        told = message_from_string(archive.read(metadata).decode())
    wanted = re.search(r"'\.\[([\w,]+)\]'", (DEPLOY / "Dockerfile").read_text())
    assert wanted is not None and {*wanted[1].split(",")} <= {*told.get_all("Provides-Extra", [])}


def test_the_image_does_not_run_as_root_and_takes_its_versions_from_the_constraints():
    names = [name for name, _ in instructions()]
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users == ["radixcache"] and names.index("USER") < names.index("ENTRYPOINT")
    installs = [rest for _, rest in instructions() if "pip install" in rest]
    assert installs and all(
        rest.count("pip install") == rest.count("-c constraints.txt") for rest in installs
    )
    (health,) = (rest for name, rest in instructions() if name == "HEALTHCHECK")
    assert "/health" in health and ":8000/" in health


def test_the_commands_take_the_flags_that_they_are_given(capsys: pytest.CaptureFixture[str]):
    (entry,) = (json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT")
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    for given in (entry[1:], command(start)):
        assert given[0] == "serve"
        assert main([*given, "--model", "/no/model", "--port", "0"]) == 2
        assert "no model at /no/model" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path):
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_prometheus_is_told_of_the_port_that_is_served():
    text = (DEPLOY / "prometheus.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    assert set(job) == {"job_name", "scrape_interval", "static_configs"}
    (with_key,) = yaml.safe_load(re.sub(r"# (auth|  cred)", r"\1", text))["scrape_configs"]
    assert with_key.keys() - job.keys() == {"authorization"}
