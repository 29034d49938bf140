"""Which processor the kernels are compiled for."""

from __future__ import annotations

from radixcache.kernels.native import build as native_build

COMPILER = """#!/bin/sh
said="$*"
while [ "$1" != -o ]; do shift; done
printf '%s' "$said" > "$2"
"""


def test_a_level_of_the_processor_can_be_asked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "c++").write_text(COMPILER)
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.delenv("RADIXCACHE_MARCH", raising=False)
    usual = native_build.build()
    monkeypatch.setenv("RADIXCACHE_MARCH", "x86-64-v3")
    asked = native_build.build()
    assert "=native" in usual.read_text() and "-march=x86-64-v3" not in usual.read_text()
    assert "-march=x86-64-v3" in asked.read_text() and "=native" not in asked.read_text()
    monkeypatch.delenv("RADIXCACHE_MARCH")
    assert native_build.build() == usual
