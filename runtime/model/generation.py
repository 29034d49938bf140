"""What a checkpoint says of generation: the tokens that end a text, and the default sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixcache.errors import ModelError, first_sentence
from radixcache.runtime.checkpoints.model_files import read_settings

_FILE = "generation_config.json"
_SAID = {
    *("_from_model_config", "transformers_version", "use_cache"),
    *("output_attentions", "output_hidden_states"),
}
"""Names that change nothing here."""


@dataclass
class GenerationDefaults:
    """Some of transformers' `GenerationConfig`, by its names; None where a model says nothing."""

    bos_token_id: Any = None
    eos_token_id: Any = None
    pad_token_id: Any = None
    do_sample: Any = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    max_new_tokens: Any = None


def read_defaults(name_or_path: str | Path) -> GenerationDefaults:
    """Those of a folder or hub id; transformers, which validates, reads what has more settings.

    Raises:
        ModelError: its generation config makes no sense.
    """
    known = GenerationDefaults.__dataclass_fields__.keys() | _SAID
    folder, found = Path(name_or_path), read_settings(name_or_path, _FILE)
    if folder.is_dir() and not (folder / _FILE).exists():
        found = {}
    if found is not None and found.keys() <= known:
        limit = found.get("max_new_tokens")
        if limit is None or (type(limit) is int and limit > 0):
            return GenerationDefaults(**{k: v for k, v in found.items() if k not in _SAID})
    from transformers.generation.configuration_utils import GenerationConfig

    try:
        config: Any = GenerationConfig.from_pretrained(str(name_or_path))
    except OSError:  # it has none
        return GenerationDefaults()
    except Exception as error:  # whatever nonsense raises in transformers
        reason = f"its generation config does not make sense ({first_sentence(error)})"
        raise ModelError(f"the model at {name_or_path} does not load: {reason}") from None
    return config
