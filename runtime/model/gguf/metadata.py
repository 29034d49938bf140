"""Reads the metadata of a GGUF file's architecture, with types checked."""

from __future__ import annotations

import re

import torch

from radixcache.errors import ModelError
from radixcache.kernels.spec import Unknown
from radixcache.runtime.checkpoints.gguf_file import Array, GGUFFile


class Metadata:
    """Looks metadata up by key, without the architecture's name that begins each key of the file.

    Attributes:
        layers: number of layers, without those that predict further tokens (MTP).
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name = file.get("general.architecture", str)
        self.layers = self.size("block_count") - self.size("nextn_predict_layers", 0)
        if not 0 < self.layers <= len(file.tensors):
            raise Unknown(f"its metadata has {self.layers} layers")

    def size(self, key: str, default: int | None = None) -> int:
        return self.file.get(f"{self.name}.{key}", int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 of the file as the decimal number that was converted, such as 0.1."""
        return decimal(self.file.get(f"{self.name}.{key}", float, default))

    def plain(self, key: str) -> int | float | bool:
        value = self.file.metadata.get(f"{self.name}.{key}")
        if type(value) is float:
            return decimal(value)
        kind = bool if type(value) is bool else int
        return self.file.get(f"{self.name}.{key}", kind)

    def has(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.file.metadata

    def flag(self, key: str, default: bool) -> bool:
        return self.file.get(f"{self.name}.{key}", bool, default)

    def per_layer(self, key: str, default: int | None = None) -> list[int]:
        """A size for each layer; the file may have a list, or one value for all."""
        name = f"{self.name}.{key}"
        if not isinstance(self.file.metadata.get(name), Array):
            return [self.size(key, default)] * self.layers
        found = self.file.array(name, int)[: self.layers]
        if len(found) < self.layers:
            raise Unknown(f"its {name} is for {len(found)} layers")
        return found

    def heads(self) -> tuple[int, list[int]]:
        """Query heads, and the KV heads of each layer."""
        heads = max(self.per_layer("attention.head_count"), default=0)
        return heads, self.per_layer("attention.head_count_kv", heads)

    def rows(self, part: str) -> int | None:
        """The number of rows of the first layer tensor named `part`; None if no layer has one."""
        pattern = rf"blk\.\d+\.{re.escape(part)}"
        shapes = (x.shape for n, x in self.file.tensors.items() if re.fullmatch(pattern, n))
        shape = next(shapes, None)
        return None if shape is None else shape[max(len(shape) - 2, 0)]

    def inner(self) -> int:
        """The size of a value head of the recurrent layers."""
        return self.size("ssm.inner_size") // max(self.size("ssm.time_step_rank"), 1)

    def is_array(self, key: str) -> bool:
        return isinstance(self.file.metadata.get(f"{self.name}.{key}"), Array)


def decimal(value: float) -> float:
    """The shortest decimal number whose float32 is that of `value`."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def floats(file: GGUFFile, name: str) -> list[float]:
    """A vector of the file."""
    if (tensor := file.tensors.get(name)) is None or tensor.kind.name != "F32":
        raise ModelError(f"the GGUF file has no tensor {name} of kind F32")
    found: list[float] = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).tolist()
    return found
