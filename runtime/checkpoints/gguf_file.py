"""The metadata and the tensor table of a GGUF file, which is mapped into memory.

Each count, length and offset is checked against the file's size before it is used; one that points
outside is an error of one sentence. So no file can make this allocate more than it holds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from radixcache.errors import ModelError

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_FORMATS[12] = "d"
_STRING, _ARRAY = 8, 9
_TYPES: dict[int, type] = {6: float, 7: bool, _STRING: str, 12: float}  # all others are int
_MOST_NESTED = 4
_MOST_DIMENSIONS = 4
_MOST_ALIGNED = 1 << 16

_Value = TypeVar("_Value", str, int, float, bool)


class Kind(NamedTuple):
    """A storage format of tensors: a block has `block` numbers in `size` bytes."""

    name: str
    block: int
    size: int


KINDS = {
    number: Kind(name, block, size)
    for number, name, block, size in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20)),
        *((6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34)),
        *((10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144)),
        *((13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210)),
        *((16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
        *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110)),
        *((22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2)),
        *((26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8), (29, "IQ1_M", 256, 56)),
        *((30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
        *((39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36)),
    )
}
"""Kinds by their numbers in the format."""


class Array(NamedTuple):
    """The place of an array of the metadata, whose values are read on demand."""

    kind: int
    length: int
    at: int


class GGUFTensor(NamedTuple):
    """`shape` is torch's, rows first; `data` are the bytes in the file."""

    kind: Kind
    shape: tuple[int, ...]
    data: memoryview


class GGUFFile:
    """A GGUF file of version 2 or 3, little-endian.

    Attributes:
        metadata: values by their keys; for an array, its place.
        tensors: by their names in the file, and in its other parts.

    Args:
        others: the other parts of a split file, in their order, which have more of its tensors.

    Raises:
        ModelError: it is none, it is cut off, or it contradicts itself.
    """

    def __init__(self, path: str | Path, others: Sequence[str | Path] = ()) -> None:
        self._path, self._at, self._others = path, 4, [*map(GGUFFile, others)]
        try:
            with open(path, "rb") as file:  # copied on write, for torch takes no read-only memory
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}") from None
        self._size = len(self._map)
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{path} is no GGUF file: it does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in (2, 3)
            found = "big-endian" if swapped else f"of version {version}"
            self._fail(f"it is {found}, where versions 2 and 3 in little-endian are read")
        tensors, keys = self._count(24), self._count(13)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in self.metadata:
                self._fail(f"it has the key {key[:80]!r} twice")
            self.metadata[key] = self._value(self._number("I"), 0)
        table = [self._entry() for _ in range(tensors)]
        alignment = self.get("general.alignment", int, 32)
        if not 1 <= alignment <= _MOST_ALIGNED:
            self._fail(f"its general.alignment is {alignment}")
        next_one = start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in sorted(table, key=lambda entry: entry[3]):
            size, begin = prod(shape) // kind.block * kind.size, start + offset
            if name in self.tensors:
                self._fail(f"it has the tensor {name[:80]!r} twice")
            if offset % alignment or begin + size > self._size:
                self._fail(f"the tensor {name[:80]!r} lies outside it, so it may be cut off")
            if begin != next_one:  # one before it is of another kind or shape than the table says
                self._fail(f"the tensor {name[:80]!r} does not begin where the one before it ends")
            next_one = begin + -(-size // alignment) * alignment
            data = memoryview(self._map)[begin : begin + size]
            self.tensors[name] = GGUFTensor(kind, shape, data)
        count = self.get("split.tensors.count", int, -1)  # of all parts
        for number, part in enumerate(self._others, 1):
            same = part.get("split.tensors.count", int, -1) == count
            is_next = part.get("split.no", int) == number and same
            if not is_next or part.tensors.keys() & self.tensors.keys():
                self._fail(f"{part._path} is another part than its name says")
            self.tensors |= part.tensors
        if self._others and count not in (-1, len(self.tensors)):
            self._fail(f"its parts have {len(self.tensors)} tensors, where it says {count}")

    @property
    def bits(self) -> float:
        """Average bits per weight."""
        tensors = self.tensors.values()
        return sum(8 * len(one.data) for one in tensors) / sum(prod(one.shape) for one in tensors)

    def get(self, key: str, kind: type[_Value], default: _Value | None = None) -> _Value:
        """A value of the metadata that must be of this type: `default`, if it has none."""
        value = self.metadata.get(key, default)
        if value is None:
            self._fail(f"it has no {key}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self._fail(f"its {key} is not of type {kind.__name__}")
        return value

    def array(self, key: str, kind: type[_Value]) -> list[_Value]:
        """An array of the metadata whose values must be of this type; none is empty."""
        found = self.metadata.get(key, [])
        if found == [] or (isinstance(found, Array) and found.length == 0):
            return []
        if not isinstance(found, Array) or _TYPES.get(found.kind, int) is not kind:
            self._fail(f"its {key} is no array of type {kind.__name__}")
        return self._values(found)

    def release(self) -> None:
        """Give the memory of what has been read back; whatever is read again comes from the file.

        Nothing that was written to tensors' data stays.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for part in (self, *self._others):
                part._map.madvise(mmap.MADV_DONTNEED)

    def _fail(self, reason: str) -> NoReturn:
        raise ModelError(f"the GGUF file {self._path} does not make sense: {reason}")

    def _take(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        at = self._at
        if size > self._size - at:
            self._fail("it is cut off")
        self._at = at + size
        return at

    def _number(self, form: str) -> Any:
        at = self._take(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._map, at)[0]

    def _count(self, least: int) -> int:
        """The number of what follows, of at least so many bytes each."""
        count: int = self._number("Q")
        if count > (self._size - self._at) // least:
            self._fail("it is cut off, or counts more than it holds")
        return count

    def _string(self) -> str:
        size = self._number("Q")
        at = self._take(size)
        try:
            return self._map[at : at + size].decode()
        except UnicodeDecodeError:
            self._fail("it has a text that is no UTF-8")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._format(kind))
        kind, begin = self._number("I"), self._at + 8
        if kind == _ARRAY:
            if depth == _MOST_NESTED:
                self._fail("it has arrays in arrays in arrays")
            return [self._value(_ARRAY, depth + 1) for _ in range(self._count(12))]
        if kind == _STRING:
            count, unpack = self._count(8), struct.Struct("<Q").unpack_from
            for _ in range(count):  # there may be half a million: nothing else is done here
                at = self._take(8)
                self._take(unpack(self._map, at)[0])
        else:
            size = struct.calcsize(self._format(kind))
            count = self._count(size)
            self._take(count * size)
        return Array(kind, count, begin)

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            self._fail(f"it has a value of type {kind}, which nobody knows")
        return _FORMATS[kind]

    def _values(self, array: Array) -> list[Any]:
        if array.kind != _STRING:
            form = f"<{array.length}{self._format(array.kind)}"
            return list(struct.unpack_from(form, self._map, array.at))
        found, at, unpack = [], array.at, struct.Struct("<Q").unpack_from
        for _ in range(array.length):  # they lie inside the file: `_value` has seen to it
            begin, at = at + 8, at + 8 + unpack(self._map, at)[0]
            found.append(self._map[begin:at])
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError:
            self._fail("it has a text that is no UTF-8")

    def _entry(self) -> tuple[str, Kind, tuple[int, ...], int]:
        """Name, kind, shape and offset of a tensor."""
        name, dimensions = self._string(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            self._fail(f"the tensor {name[:80]!r} has {dimensions} dimensions")
        columns_first = [self._number("Q") for _ in range(dimensions)]
        number, offset = self._number("I"), self._number("Q")
        if number not in KINDS:
            self._fail(f"the tensor {name[:80]!r} is of kind {number}, which nobody knows")
        kind, columns = KINDS[number], [*columns_first, 1][0]
        if min(columns_first, default=1) < 1 or columns % kind.block:
            self._fail(f"the tensor {name[:80]!r} of kind {kind.name} is of shape {columns_first}")
        return name, kind, tuple(reversed(columns_first)), offset
