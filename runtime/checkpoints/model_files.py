"""Finds the files of a model, on this machine or on the hub."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from radixcache.errors import ModelError, first_sentence

BUNDLED_MODEL = Path(__file__).parents[1] / "tabletalk"
"""The default model: it answers questions about tables of people."""

INDEX = "model.safetensors.index.json"
"""Says which file of a checkpoint has which tensor."""

_HUB_SECONDS = 10.0
_WEIGHTS = (".safetensors", ".bin")


def check_model(name_or_path: str | Path | None) -> None:
    """Refuse a name without a model, quickly and without torch; None is the bundled one.

    Raises:
        ModelError: a folder without a config or a single GGUF file, without weights, or without a
            file that its index names, or a part of its GGUF file; another kind of file; or a name
            that is neither a folder nor, as far as can be told, on the hub.
    """
    if name_or_path is None:
        return
    source, gguf = split_gguf(str(name_or_path))
    path, file = Path(source), gguf or "config.json"
    if path.is_dir():
        if not (path / file).is_file():
            either = " and no GGUF file" if file == "config.json" else ""
            raise ModelError(f"no model at {name_or_path}: the folder has no {file}{either}")
        index, whole = path / INDEX, path / "model.safetensors"
        named, by = parts_of(gguf) if gguf else [], "is one of its parts"
        if index.is_file() and not gguf and not whole.exists():
            named, by = shards(index), "its index names"
        if lost := [name for name in named if not (path / name).is_file()]:
            raise ModelError(f"the model at {name_or_path} lacks {lost[0]}, which {by}")
        if not gguf and not any(file.suffix in _WEIGHTS for file in path.iterdir()):
            raise ModelError(f"no model at {name_or_path}: the folder has no .safetensors file")
    elif path.exists():
        raise ModelError(
            f"no model at {name_or_path}: a model is a folder with a config.json and weights, "
            "or a GGUF file"
        )
    else:
        _check_hub(str(name_or_path), source, file)


@cache  # the hub is asked only once for a model that it has
def _check_hub(name_or_path: str, source: str, file: str) -> None:
    if (problem := _problem_of_hub(source, file)) is not None:
        raise ModelError(
            f"no model at {name_or_path}: no such folder, and no model of that name in reach"
            f"{problem}"
        )


def shards(index: str | Path) -> list[str]:
    """The files of a checkpoint that its index names.

    Raises:
        ModelError: it is no index, or names a file outside of the checkpoint's folder.
    """
    try:
        names = [*dict.fromkeys(json.loads(Path(index).read_text("utf-8"))["weight_map"].values())]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is no index of weights: {first_sentence(error)}") from None
    for name in names:
        beside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in name
        if not beside or not name.endswith((".safetensors", ".bin")):
            raise ModelError(f"{index} is no index of weights: {name!r} is no file of weights")
    return names


def parts_of(gguf: str) -> list[str]:
    """The names of all parts of a GGUF file; its own, if it is not split.

    >>> parts_of("model-00002-of-00002.gguf")
    ['model-00001-of-00002.gguf', 'model-00002-of-00002.gguf']
    """
    found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})(\.gguf)", gguf, re.I | re.A)
    name, count, suffix = found.groups() if found else (gguf, "0", "")
    parts = [f"{name}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1)]
    return parts or [gguf]


def split_gguf(name_or_path: str) -> tuple[str, str | None]:
    """The folder or hub id of a model, and the GGUF file there that is named, or its first part.

    A folder without other weights that holds one such file stands for that file. A file of another
    name is one by its first bytes.

    >>> split_gguf("org/name/model-q8_0.gguf")
    ('org/name', 'model-q8_0.gguf')

    Raises:
        ModelError: a folder that holds several.
    """
    path = Path(name_or_path)
    if not path.is_dir() and (path.suffix.lower() == ".gguf" or _begins_as_gguf(path)):
        return str(path.parent), parts_of(path.name)[0]
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return name_or_path, None
    names = [file.name for file in path.iterdir() if file.suffix.lower() == ".gguf"]
    found = sorted({parts_of(name)[0] for name in names})
    if len(found) > 1:
        raise ModelError(
            f"the folder {name_or_path} holds several GGUF files; name one: {', '.join(found)}"
        )
    return name_or_path, found[0] if found else None


def _begins_as_gguf(path: Path) -> bool:
    with suppress(OSError, ValueError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def find_gguf(name_or_path: str) -> list[str]:
    """The paths of the parts of the GGUF file of that name, fetched if need be; of most files it is
    one; none for another kind of model.

    Raises:
        ModelError: a part is not there, or cannot be fetched.
    """
    source, gguf = split_gguf(name_or_path)
    if gguf is None:
        return []
    try:
        named = parts_of(gguf)
        found = [path for part in named if (path := find_file(source, part)) is not None]
        if len(found) == len(named):
            return found
        reason = "there is no such file, or not all of its parts"
    except Exception as error:  # what the hub or the network makes of the library that asks
        reason = first_sentence(error)
    raise ModelError(f"the model at {name_or_path} does not load: {reason}")


def _problem_of_hub(name: str, file: str) -> str | None:
    """Why the hub has no such model, asked once: transformers would ask six times."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, re.ASCII):
        return ""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, file), str):
            get_hf_file_metadata(hf_hub_url(name, file), timeout=_HUB_SECONDS)
    except HfHubHTTPError as error:  # it has answered; loading the model says what
        absent = isinstance(error, RepositoryNotFoundError) and not isinstance(
            error, GatedRepoError
        )
        return "" if absent else None
    except Exception as error:  # whatever the network makes of the library that asks
        return f" ({first_sentence(error)})"
    return None


def find_file(name_or_path: str, file: str) -> str | None:
    """The path of a file of a folder or hub id, fetched if need be; None if it has none."""
    if (folder := Path(name_or_path)).is_dir():
        return str(folder / file) if (folder / file).is_file() else None
    from transformers.utils.hub import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False}
    found: str | None = cached_file(name_or_path, file, **missing)
    return found


def read_settings(name_or_path: str | Path, file: str = "config.json") -> dict[str, Any] | None:
    """A folder's config.json, or another such file; None where transformers has to say what it is:
    for a hub id, or a file that is not there, refers to another or is no JSON object."""
    path = Path(name_or_path) / file
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    marks = ('"configuration_files"', '"__float__"')  # of transformers' own
    plain = isinstance(found, dict) and not any(mark in text for mark in marks)
    return found if plain and (file != "config.json" or "model_type" in found) else None
