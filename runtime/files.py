"""Where the files of a model are on this machine."""

from __future__ import annotations


def find_file(name_or_path: str, file: str) -> str | None:
    """The path of a file of a folder or hub id, fetched if need be; None if it has none."""
    from transformers.utils.hub import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False}
    found: str | None = cached_file(name_or_path, file, **missing)
    return found
