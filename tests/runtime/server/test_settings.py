"""Where a server's settings come from, and what is said of those that make no sense."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import FastAPI

from radixcache.errors import InvalidRequest, MissingDependency
from radixcache.runtime import cli, commands
from radixcache.runtime.server import args
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.serve import configure
from radixcache.runtime.server.settings import SETTINGS, read_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def parse(flags: str) -> dict[str, Any]:
    """The flags as the command gives them to `read_settings`."""
    return commands._given(
        cli._parser().parse_args(["serve", *flags.split()]), ("config", *SETTINGS)
    )


def refusal(flags: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read_settings(parse(flags))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_flag_stands_before_the_environment_and_that_before_the_file(file, monkeypatch):
    file.write_text("port: 1\nhost: file\nmax-queued-requests: 5\nallowed_hosts: [a, b]\n")
    monkeypatch.setenv("RADIXCACHE_CONFIG", str(file))
    monkeypatch.setenv("RADIXCACHE_PORT", "2")
    monkeypatch.setenv("RADIXCACHE_HOST", "environment")
    _, options = read_settings(parse("--port 3"))
    assert (options.port, options.host) == (3, "environment")
    assert options.max_queued_requests == 5 and options.request_timeout == 600
    assert (options.shutdown_timeout, options.keep_alive_timeout) == (30, 75)
    assert configure(FastAPI(), keep_alive=options.keep_alive_timeout).timeout_keep_alive == 75
    assert options.allowed_hosts == ["a", "b"]
    _, options = read_settings(parse("--allowed-hosts one.example two.example --admin-key a"))
    assert (options.allowed_hosts, options.admin_key) == (["one.example", "two.example"], "a")


def test_lists_in_the_environment_are_written_with_commas(monkeypatch):
    monkeypatch.setenv("RADIXCACHE_ALLOWED_ORIGINS", "https://a.example, http://localhost:3000")
    monkeypatch.setenv("RADIXCACHE_MODEL", "a-model")
    monkeypatch.setenv("RADIXCACHE_HIDE_TEXTS", "true")
    _, options = read_settings({})
    assert options.allowed_origins == ["https://a.example", "http://localhost:3000"]
    assert options.hide_texts and options.served_model_name == ["a-model"]


FLAGS = [
    ("--no-enable-prefix-caching", "did you mean --cache none?"),
    ("--request-timeout 0", "--request-timeout: must be above 0, not 0"),
    ("--max-queued-requests -1", "--max-queued-requests: must be at least 0, not -1"),
    ("--allowed-origins app.example", "--allowed-origins: must be origins like https://app"),
    ("--allowed-origins https://a.example/", "with no slash at the end"),
    ("--allowed-media-domains a.example:80", "must be names without scheme, port or *"),
    ("--allowed-media-domains *.a.example", "must be names without scheme, port or *, not"),
    ("--allowed-hosts http://a.example", "must be names without scheme, port or *, not ['http://a"),
    ("--otlp-endpoint localhost:4317", "--otlp-endpoint: must be an address like http://127"),
    ("--kv-cache-memory-bytes 2gigs", "--kv-cache-memory-bytes: must be an amount like 2GB or"),
    ("--config /no/file", "no settings at /no/file: no such file"),
    ("--api-key-file /no/file", "cannot read /no/file: No such file"),
    ("--api-key a --admin-key a", "the admin key must not be the API key, which all clients have"),
    ("--api-key a --api-key-file b", "api_key and api_key_file are both given"),
]
VARIABLES = [
    ("PROT=8001", "RADIXCACHE_PROT is no setting of radixcache serve: did you mean RADIX"),
    ("CACHE=disk", "RADIXCACHE_CACHE: must be 'radix', 'hash-block' or 'none', not 'disk'"),
    ("API_KEY=", "the API key is empty"),
    ("API_KEY=one\ntwo", "the API key must be one line that a header can hold"),
    ("ADMIN_KEY=\ufeffkey", "the admin key must be one line that a header can hold"),
    ("HOST=", "RADIXCACHE_HOST: "),  # an empty one would be every address
    ("SERVED_MODEL_NAME=,", "RADIXCACHE_SERVED_MODEL_NAME: "),
    ("OTLP_ENDPOINT=http://", "RADIXCACHE_OTLP_ENDPOINT: must be an address"),
]
FILES = [
    ("prt: 8001", "'prt' in FILE is no setting of radixcache serve: did you mean port?"),
    ("port: many", "port in FILE: must be a valid integer, not 'many'"),
    ("# a comment\nport: [1", "the settings in FILE are no YAML mapping: line 2, expected"),
    ("kv-cache-memory-bytes: 2 gigs", "kv_cache_memory_bytes in FILE: must be an amount like 2GB"),
    ("config: b.yaml", "'config' in FILE: a file of settings cannot name another one"),
    ("[port, 1]", "the settings in FILE are no YAML mapping: "),
]


@pytest.mark.parametrize(("flags", "sentence"), FLAGS)
def test_a_flag_that_makes_no_sense_is_named(flags: str, sentence: str):
    assert sentence in refusal(flags)


@pytest.mark.parametrize(("variable", "sentence"), VARIABLES)
def test_a_variable_that_makes_no_sense_is_named(variable: str, sentence: str, monkeypatch):
    name, _, value = variable.partition("=")
    monkeypatch.setenv(f"RADIXCACHE_{name}", value)
    assert sentence in refusal("")


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_what_makes_no_sense_in_a_file_is_named(text: str, sentence: str, file: Path):
    file.write_text(text)
    assert sentence.replace("FILE", str(file)) in refusal(f"--config {file}")


def test_what_is_no_setting_of_the_server_says_nothing(file: Path, monkeypatch):
    monkeypatch.setenv("RADIXCACHE_DATA", "/data")
    monkeypatch.setenv("RADIXCACHE_MARCH", "x86-64-v3")
    file.write_text("# port: 8001\n")
    assert read_settings({"config": str(file)})[1].port == 8000


def test_keys_come_from_files_and_are_never_shown(file: Path, tmp_path: Path):
    file.write_text("user\n")
    boss = tmp_path / "boss"
    boss.write_text("boss")
    _, options = read_settings(parse(f"--api-key-file {file} --admin-key-file {boss}"))
    assert (options.api_key, options.admin_key) == ("user", "boss")
    file.write_text("api_key: ' user '\n")
    assert read_settings({"config": str(file)})[1].api_key == "user"
    file.write_text("api_key: 1234\n")
    assert "1234" not in refusal(f"--config {file}")
    boss.write_text("\n")
    assert refusal(f"--admin-key-file {boss}") == "the admin key is empty"


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "one", "--model", "two"]) == 2
    assert "two models are given: one and --model two" in capsys.readouterr().err


def test_what_is_wrong_is_told_before_torch_is_imported():
    """The port, the model, the dtype, a variable: whatever can be known without a model."""
    code = """
import os, socket, sys
from radixcache.runtime.cli import main
taken = socket.create_server(("127.0.0.1", 0))
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:1"
for flags in (
    f"--port {taken.getsockname()[1]}", "/no/model --port 0", "no-org/no-model --port 0",
    "--dtype int3", "--nosuch-flag",
):
    assert main(["serve", *flags.split()]) == 2, flags
heavy = {"torch", "transformers", "fastapi", "uvicorn"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    sentences = (
        "Address already in use",
        "no model at /no/model: no such folder",
        "no model at no-org/no-model: no such folder, and no model of that name in reach (",
        "invalid choice: 'int3'",
        "unrecognized arguments: --nosuch-flag (see radixcache serve --help)",
    )
    for line, sentence in zip(lines, sentences, strict=True):
        assert line.startswith("radixcache: error: ") and sentence in line


def test_traces_without_their_packages_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(args, "version", Mock(side_effect=PackageNotFoundError))
    with pytest.raises(MissingDependency, match="traces need opentelemetry-sdk: in a checkout, p"):
        ServerArgs(otlp_endpoint="http://127.0.0.1:4318")
