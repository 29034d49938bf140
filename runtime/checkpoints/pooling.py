"""What a checkpoint makes of the row of a text's last token: a vector, a score, or neither.

Read from sentence-transformers' `modules.json` and the folders it names, from the architecture of
config.json, and from a GGUF file's `pooling_type`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from radixcache.errors import ModelError
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.checkpoints.model_files import find_file

_PARTS = {"Transformer", "Pooling", "Normalize", "LogitScore"}
_PROMPTS = "config_sentence_transformers.json"
_GGUF = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}


@dataclass(frozen=True)
class Pooling:
    """What becomes of rows.

    Attributes:
        task: what the checkpoint was made for; None of a language model, which does either where it
            is asked by name.
        normalize: whether vectors have length 1.
        prompt: what goes before each text.
        judges: the tokens whose logits make a score: that of the first, less that of the second, if
            there is one. None where a head does.
        labels: what its outputs mean, if that is said.
        template: the text of a query and a document, with {query} and {document}; None where the
            chat template, or nothing, says it.
    """

    task: Literal["embed", "score"] | None = None
    normalize: bool = True
    prompt: str = ""
    judges: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    template: str | None = None

    @property
    def has_head(self) -> bool:
        """Whether a classification head makes the score."""
        return self.task == "score" and self.judges is None


def read_pooling(name_or_path: str | Path, settings: Mapping[str, Any]) -> Pooling:
    """The pooling of a folder or hub id, whose config.json has `settings`.

    Raises:
        ModelError: it pools in a way that is not that of a text's last token, or has files that
            are not understood.
    """
    name = str(name_or_path)
    architecture = str((settings.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        return Pooling("score")
    modules = _read(name, "modules.json", [])
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _PARTS]:
        raise _refusal(name, f"its modules.json has a {unknown[0]}, which nothing here reads")
    if "LogitScore" in kinds:
        found = _read(name, f"{modules[kinds.index('LogitScore')].get('path')}/config.json", {})
        ids = [found.get("true_token_id"), found.get("false_token_id")]
        judges = tuple(token for token in ids if token is not None)
        if not judges or ids[0] is None or not all(type(token) is int for token in judges):
            raise _refusal(name, f"its LogitScore has the tokens {ids}")
        return Pooling("score", judges=judges)
    if "Pooling" not in kinds:
        return Pooling()
    found = _read(name, f"{modules[kinds.index('Pooling')].get('path')}/config.json", {})
    modes = [key[13:] for key, value in found.items() if key[:13] == "pooling_mode_" and value]
    modes = modes or [str(found.get("pooling_mode"))]
    if modes != ["lasttoken"]:
        raise _refusal(name, _not_last(" and ".join(modes)))
    if _read(name, "sentence_bert_config.json", {}).get("do_lower_case"):
        raise _refusal(name, "its texts are to be in lower case (do_lower_case)")
    said = _read(name, _PROMPTS, {})
    prompts, chosen = said.get("prompts") or {}, said.get("default_prompt_name")
    prompt = "" if chosen is None else isinstance(prompts, dict) and prompts.get(str(chosen))
    if not isinstance(prompt, str):
        raise _refusal(name, f"its {_PROMPTS} has no prompt {chosen!r}")
    return Pooling("embed", "Normalize" in kinds, prompt)


def gguf_pooling(file: GGUFFile) -> Pooling:
    """The pooling of a GGUF file; `ModelError` as in `read_pooling`."""
    name = file.get("general.architecture", str)
    kind = file.get(f"{name}.pooling_type", int, 0)
    if kind == 3:
        return Pooling("embed")
    if kind == 4:
        key, template = f"{name}.classifier.output_labels", "tokenizer.chat_template.rerank"
        labels = tuple(file.array(key, str)) if key in file.metadata else ()
        written = file.get(template, str) if template in file.metadata else None
        return Pooling("score", labels=labels, template=written)
    if kind:
        raise _refusal(name, _not_last(_GGUF.get(kind, str(kind))))
    return Pooling()


def _not_last(mode: str) -> str:
    reason = "takes the rows of other tokens than the last, which a cached prefix does not keep"
    return f"its pooling ({mode}) {reason}"


def _refusal(name: str, reason: str) -> ModelError:
    return ModelError(f"the model {name} does not embed here: {reason}")


def _read(name: str, file: str, none: Any) -> Any:
    """A JSON file of a model; `none`, whose type it has, if there is no such file."""
    if (path := find_file(name, file)) is None:
        return none
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    entries = found if isinstance(found, list) else []
    if type(found) is not type(none) or not all(isinstance(entry, dict) for entry in entries):
        raise _refusal(name, f"its {file} is not what sentence-transformers writes")
    return found
