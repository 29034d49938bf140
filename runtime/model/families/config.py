"""Reads the settings of a config.json, and refuses those that a family has not read.

An unknown setting may change the forward pass, so a family runs in the loop only if its row in the
table reads every setting of its config, apart from those that change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from radixcache.kernels.spec import Unknown

Settings = Mapping[str, Any]

# Settings that do not change the forward pass, or only repeat others. Those of quantisation say how
# weights are stored, which `QuantizedCheckpoint` reads or refuses.
_INERT = frozenset(
    """
    _attn_implementation _experts_implementation _model_name_or_path _name_or_path architectures
    attention_dropout auto_map cache_implementation chunk_size_feed_forward dtype
    embd_pdrop hidden_dropout id2label initializer_range label2id model_type output_router_logits
    pretraining_tp problem_type quantization quantization_config resid_pdrop
    residual_dropout return_dict
    router_aux_loss_coef router_jitter_noise router_z_loss_coef torch_dtype transformers_version
    use_cache
""".split()
)

# What transformers 4 wrote of generation, and what trainers and tools write: no model of
# transformers that stands in the table reads any of these.
_OF_TOOLS = frozenset(
    """
    _attn_implementation_autoset _commit_hash _flash_attn_2_enabled attn_implementation
    bad_words_ids begin_suppress_tokens description diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    gradient_checkpointing is_decoder is_llama_config length_penalty license loss_type max_length
    min_length model_max_length neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pixel_shuffle_factor
    prefix pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torchscript
    transformers.js_config typical_p unsloth_fixed unsloth_version use_bfloat16 use_flash_attention
""".split()
)
_TOKENS = ("_token_id", "_token_index")  # ends of settings that name a token


class Lacks(Unknown):
    """A setting is not in a config.json, and transformers' config class may have a default."""

    def __init__(self, name: str) -> None:
        super().__init__(f"its config lacks {name!r}")


class Config:
    """The settings of a model, and which of them have been read."""

    def __init__(self, settings: Settings, *, complete: bool) -> None:
        """
        Args:
            complete: a setting that is not there is null; else reading it raises `Lacks`.
        """
        self._settings, self._complete, self._read = settings, complete, {*_INERT, *_OF_TOOLS}

    def get(self, name: str) -> Any:
        """A setting of any type."""
        if name not in self._settings and not self._complete:
            raise Lacks(name)
        return self.maybe(name)

    def maybe(self, name: str) -> Any:
        """A setting that no class has a default for: null if it is not there."""
        self._read.add(name)
        return self._settings.get(name)

    def ignore(self, *names: str) -> None:
        """These settings change nothing in this family, or nothing beside the others."""
        self._read.update(names)

    def agree(self, name: str, *known: Any) -> None:
        """A setting that, if it is there, must say what the family does anyway."""
        if (found := self.maybe(name)) is not None and found not in known:
            raise Unknown(f"its {name} is {found}")

    def size(self, name: str) -> int:
        """A setting that must be a positive whole number."""
        size = self.get(name)
        if type(size) is not int or size < 1:
            raise Unknown(f"its {name} is {size}")
        return size

    def count(self, name: str) -> int:
        """A setting that must be a whole number, null for 0."""
        return self.size(name) if self.get(name) else 0

    def number(self, name: str) -> float:
        number = self.get(name)
        if type(number) not in (int, float):
            raise Unknown(f"its {name} is {number}")
        return float(number)

    def softcap(self, name: str) -> float | None:
        """A setting that must be a positive number, or null."""
        if self.maybe(name) is None:
            return None
        if not 0 < (found := self.number(name)) < float("inf"):
            raise Unknown(f"its {name} is {found}")
        return found

    def flag(self, name: str | bool) -> bool:
        """A setting as a truth value, or that of the family."""
        return bool(self.get(name)) if isinstance(name, str) else name

    def denies(self, name: str) -> bool:
        """Whether a setting that is true where it is absent is there, false or null."""
        self._read.add(name)
        return name in self._settings and not self._settings[name]

    def layer_types(self, *known: str) -> list[str]:
        """The type of each layer, out of those that are known."""
        types, count = self.get("layer_types"), self.size("num_hidden_layers")
        if not isinstance(types, list) or len(types) != count or not set(types) <= {*known}:
            raise Unknown("its layers are of other types")
        return types

    def finish(self) -> None:
        """
        Raises:
            Unknown: a setting has not been read, and may change the forward pass.
        """
        for name, value in self._settings.items():
            read = name in self._read or name.endswith(_TOKENS)
            if not read and value is not None and value is not False:
                raise Unknown(f"its config has {name}")


def complete(settings: Settings, wraps: bool) -> tuple[str, Settings]:
    """The family and the settings of a config.json, with transformers' defaults.

    Its config class is imported, without its model. If it `wraps`, the text's settings are apart.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[settings["model_type"]]
    text = settings.get("text_config", settings) if wraps else settings
    if text.get("rope_parameters") is not None and text.get("rope_scaling"):
        raise Unknown("its config says RoPE twice")
    found: Settings = kind.from_dict(deepcopy({**settings})).to_dict()
    if wraps:
        outer = Config(settings, complete=True)
        of_text = {"rope_scaling", "rope_theta", *found["text_config"]}
        # Older configs have the text's settings beside the others. In newer ones those that the
        # text does not have are of images and sounds.
        outer.ignore(*(settings.keys() - of_text if "text_config" in settings else of_text))
        outer.ignore(*kind().to_dict())
        outer.finish()
        same = {name: settings.get(name) for name in ("eos_token_id", "tie_word_embeddings")}
        found = {**found["text_config"], **{name: each for name, each in same.items() if each}}
    return found["model_type"], found
