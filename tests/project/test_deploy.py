"""docs/deploy: that each file fits the project, as far as can be told without what reads it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from radixcache.runtime.cli import main
from tests.helpers.sources import ROOT

DEPLOY = ROOT / "docs" / "deploy"
UNIT = DEPLOY / "radixcache.service"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, without comments, continued lines in one."""
    text = (DEPLOY / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line]


def test_the_image_is_made_of_the_wheels_and_what_the_context_holds():
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    steps = "\n".join(rest for name, rest in instructions() if name == "RUN")
    sources = re.findall(r"source=([^,\s]+)", steps)
    assert {f"!{name}" for name in sources} == {*ignored[1:]} == {"!dist", "!constraints.txt"}
    assert not any(name in ("COPY", "ADD") for name, _ in instructions())
    # A package of the same name on an index must not be taken for this one.
    assert re.search(r"pip download [^&]*--no-index --find-links /dist [^&]*radixcache", steps)
    assert not re.search(r"pip install [^&]*\sradixcache", steps) and "g++" not in steps


def test_the_image_does_not_run_as_root_and_takes_its_versions_from_the_constraints():
    names = [name for name, _ in instructions()]
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users == ["radixcache"] and names.index("USER") < names.index("ENTRYPOINT")
    installs = [rest for _, rest in instructions() if "pip install" in rest]
    assert installs and all(
        rest.count("pip install") == rest.count("-c /constraints.txt") for rest in installs
    )
    (health,) = (rest for name, rest in instructions() if name == "HEALTHCHECK")
    assert "/health" in health and ":8000/" in health


def test_the_commands_take_the_flags_that_they_are_given(capsys: pytest.CaptureFixture[str]):
    (entry,) = (json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT")
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    for _, *given in (entry, shlex.split(start)):
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
