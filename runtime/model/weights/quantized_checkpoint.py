"""A checkpoint whose quantised tensors are listed, and read, as the weights that they stand for.

A weight's format is known by its tensors, whatever layers the config lists: what a layer leaves out
is as it was. The config names the method, which must be one that writes such tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from radixcache.errors import ModelError, first_sentence
from radixcache.kernels.spec import Unknown
from radixcache.runtime.model.checkpoint import FLOATS, Checkpoint, Read, Shape, is_spare
from radixcache.runtime.model.compatibility import Quantization, modelopt
from radixcache.runtime.model.weights.quantized_formats import FORMATS, INPUTS, Format, Stem

_T = TypeVar("_T")

_METHODS = {"", *(method for form in FORMATS for method in form.methods)}
_MARKS = {part.rstrip("?") for form in FORMATS for part in form.parts} - {"weight"}
_SAYS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("awq", "version"): ("gemm", "GEMM"), ("gptq", "is_marlin_format"): (False,),
    ("gptq", "checkpoint_format"): ("gptq", "gptq_v2"), ("gptq", "format"): ("gptq", "gptq_v2"),
    ("mlx", "mode"): ("affine",), ("fp8", "fmt"): ("e4m3",),
    ("compressed-tensors", "transform_config"): ({},),
}  # fmt: skip
"""What settings must say, if they say anything: others change what the tensors mean."""


class QuantizedCheckpoint(Checkpoint):
    """A checkpoint whose weights are read from the tensors of their formats, and others as ever."""

    def __init__(self, stored: Checkpoint, name_or_path: str | Path, said: Quantization) -> None:
        """
        Raises:
            Unknown: the method is none of ours.
            ModelError: some tensors are in no format of the method, or do not fit each other.
        """
        super().__init__(stored.files, stored.device, stored.dtype)
        self._headers = stored.headers
        self._shapes = {name: shape for name, (_, shape) in self._headers.items()}
        groups: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name in self._headers:
            if not is_spare(name):
                stem, part = self._split(name)
                groups[stem][part] = name
        coded = {stem for stem, parts in groups.items() if self._is_coded(parts)}
        if coded and not said.name:
            said = modelopt(name_or_path)
        if said.name not in _METHODS or (coded and not said.name):
            raise Unknown(f"its weights are quantised by {said.named}")
        self._refused = f"the model at {name_or_path} does not load: nothing here reads weights"
        self._refused += f" quantised by {said.named}"
        for (method, key), known in _SAYS.items():
            found = said.settings.get(key)
            if method == said.name and found is not None and found not in known:
                raise ModelError(f"{self._refused} whose {key} is {str(found)[:100]}")
        for name, shape in self._shapes.items():  # MLX may have changed norms with them
            if said.name == "mlx" and "conv" in name and shape[-1:] == (1,) != shape[-2:-1]:
                raise ModelError(f"{self._refused} with convolutions in its own order ({name})")
        self._stems: dict[str, tuple[Format, Stem]] = {}
        self._bits = self._count = 0
        self._plain, self._made = set[str](), set[str]()
        for stem, parts in groups.items():
            if stem in coded:
                self._take(stem, parts, said)
            elif any(len(self._shapes[name]) > 1 and "bias" not in name for name in parts.values()):
                self._plain.add(stem.rpartition(".")[2])
        inputs = {f"{part}?" for stem in coded for part in groups[stem]} & INPUTS.keys()
        rounds = re.search("activation_scheme|input_activations': {", str(said.settings))
        self._rounds = bool(inputs or rounds)

    def _take(self, name: str, parts: dict[str, str], said: Quantization) -> None:
        """List the weight that these tensors stand for in their place."""
        bias, parts = parts.get("bias"), {part: parts[part] for part in parts.keys() - {"bias"}}
        if bias is not None and said.name == "gptq" and not self.stored(bias).any():
            del self._shapes[bias]  # its packers gave one to every layer
        dtypes = {part: self._headers[stored][0] for part, stored in parts.items()}
        form = next((form for form in FORMATS if form.fits(said.name, dtypes)), None)
        if form is None:
            found = ", ".join(f"{part} in {dtype}" for part, dtype in sorted(dtypes.items()))
            raise ModelError(f"{self._refused} ({name} has {found})")
        shapes = {part: self._shapes.pop(stored) for part, stored in parts.items()}
        own = said.settings.get(name)  # of this layer, as MLX has it
        settings = own if isinstance(own, dict) else said.settings
        target = name if name in self._headers else f"{name}.weight"
        self._stems[target] = form, Stem(shapes, lambda part: self.stored(parts[part]), settings)
        self._shapes[target] = self._try(target, form.shape)
        bits = (int(re.findall(r"\d+", dtypes[part])[0]) * prod(shapes[part]) for part in parts)
        self._bits, self._count = self._bits + sum(bits), self._count + prod(self._shapes[target])

    @property
    def shapes(self) -> dict[str, Shape]:
        return {**self._shapes}

    def tensor(self, name: str, exact: bool = False) -> Read:
        """A quantised weight as `Quantized`, or in the dtype of the steps.

        Raises:
            ModelError: its tensors do not fit each other, or make numbers that are not finite.
        """
        if name not in self._stems:
            return super().tensor(name, exact)
        form = self._stems[name][0]
        found: Any = self._try(name, form.weight)
        for weight in found if isinstance(found, list) else [found]:
            tables = [weight] if isinstance(weight, torch.Tensor) else weight.tables()[1:]
            if not all(bool(table.isfinite().all()) for table in tables):
                raise ModelError(f"{self._refused} ({name} has values that are not finite)")
        if isinstance(found, torch.Tensor):
            self._made.add(form.name)
            found = found.to(self.dtype)
        return found

    @property
    def kept(self) -> str:
        """The formats, the files' bits a weight, and what is dense, for `PagedModel.kept`."""
        if not self._stems:
            return ""
        names = ", ".join(sorted({form.name for form, _ in self._stems.values()}))
        dense = [f"{name} becomes {str(self.dtype)[6:]}" for name in sorted(self._made)]
        partly = {stem.removesuffix(".weight").rpartition(".")[2] for stem in self._stems}
        plain = [f"some of {name}" if name in partly else name for name in sorted(self._plain)]
        dense += [f"{', '.join(plain)} not quantised"] if plain else []
        dense += ["its rounding of activations is left out"] if self._rounds else []
        bits, told = self._bits / self._count, f" ({'; '.join(dense)})" if dense else ""
        return f" of {names} in {bits:.1f} bits a weight{told}"

    def _try(self, name: str, read: Callable[[Stem], _T]) -> _T:
        try:
            return read(self._stems[name][1])
        except Exception as error:  # whatever nonsense raises, here and in torch
            raise ModelError(f"{self._refused} ({name}: {first_sentence(error)})") from None

    def _split(self, name: str) -> tuple[str, str]:
        """The name of a layer and of a part of its weight; a tensor of experts is a layer, too."""
        whole = name.removesuffix("_scale_inv")
        is_whole = whole in self._headers and f"{whole}_scale_inv" in self._headers
        if is_whole and not whole.endswith(".weight"):
            return whole, f"weight{name[len(whole) :]}"
        if self._headers[name][0] == "U8" and name.endswith(("_blocks", "_scales")):
            return name[:-7], name[-6:]
        stem, dot, part = name.partition(".weight.")
        stem, _, part = (stem, dot, f"weight.{part}") if dot else name.rpartition(".")
        return stem, part

    def _is_coded(self, parts: Mapping[str, str]) -> bool:
        dtypes = {part: self._headers[name][0] for part, name in parts.items()}
        floats8 = any(dtype.startswith("F8") for dtype in dtypes.values())
        return floats8 or dtypes.get("weight", "F32") not in FLOATS or not _MARKS.isdisjoint(dtypes)
