"""Reads the pieces of a plan: from safetensors files, or from a GGUF file.

A source may find that a tensor is kept as several, such as codes and their scales. It lists them as
one tensor, and reads it as `Quantized`, of whose rows and columns a piece is taken like of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from radixcache.errors import ModelError
from radixcache.kernels.quantized import Quantized, Stored, dense
from radixcache.kernels.spec import Architecture, Unknown, Weight, Weights
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.model.checkpoint import Checkpoint, Read
from radixcache.runtime.model.gguf.blocks import read_tensor
from radixcache.runtime.model.weights.naming_gguf import name_gguf
from radixcache.runtime.model.weights.naming_hf import name_checkpoint
from radixcache.runtime.model.weights.plan import Naming, Piece, Tensors, plan_layer

_CORRECTION = "correction_bias"
_SCORE_HEADS = ("score.weight", "cls.output.weight")  # of checkpoints, of GGUF files


class ModelWeights(ABC):
    """The weights of a model by the names of its description; all are found before one is read."""

    def __init__(self, architecture: Architecture, tensors: Tensors, naming: Naming) -> None:
        """
        Raises:
            Unknown: the file has other weights than the description.
            ModelError: it has one of another shape.
        """
        self._architecture = architecture
        table = architecture.vocab_size, architecture.hidden_size
        self._embedding = tensors.use_one(naming.embeddings, table)
        self._last_norm = tensors.use_one(naming.last_norms, table[1:], naming.then)
        own_head = not architecture.tied or any(name in tensors.shapes for name in naming.heads)
        self._head = tensors.use_one(naming.heads, table) if own_head else None
        self._per_layer = {
            name: tensors.use_one([naming.per_layer[name]], shape)
            for name, shape in architecture.per_layer_shapes.items()
        }
        self._layers = [
            plan_layer(architecture, *layer, tensors) for layer in enumerate(naming.layers)
        ]
        found = [name for name in _SCORE_HEADS if name in tensors.shapes]
        wide = [(tensors.shapes[name][0], architecture.hidden_size) for name in found]
        self._score_head = tensors.use_one(found, wide[0]) if found else None
        for name in sorted(tensors.shapes.keys() - tensors.used):
            if not naming.is_spare(name) and 0 not in tensors.shapes[name]:
                raise Unknown(f"its checkpoint has other weights: it has {name}")

    @abstractmethod
    def read(self, piece: Piece) -> Weight:
        """A piece on the device of the steps, not yet changed: a vector as float32, a matrix in
        their dtype or as the file has it."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory of what was read: it is copied or packed, or comes from the file."""

    def embedding(self) -> Weight:
        """[vocab_size, hidden_size]."""
        return self._changed(self._embedding)

    def head(self) -> Weight | None:
        """[vocab_size, hidden_size]; None if the embedding is the head, too."""
        head = self._head and self._changed(self._head)
        if head is None or not self._architecture.tied:
            return head
        stored_twice = torch.equal(dense(head), dense(self.embedding()))
        return None if stored_twice else head

    def score_head(self) -> torch.Tensor | None:
        """[labels, hidden_size] float32 of a classification head, if there is one."""
        found = self._score_head and self._changed(self._score_head)
        return None if found is None else dense(found).float()

    def per_layer(self) -> Weights:
        """The weights of `Architecture.per_layer_shapes`."""
        return {name: self._changed(piece) for name, piece in self._per_layer.items()}

    def last_norm(self) -> torch.Tensor:
        """[hidden_size] float32."""
        self.release()
        return dense(self._changed(self._last_norm))

    def layer(self, number: int) -> Weights:
        """The weights of `Architecture.layer_shapes(number)`."""
        weights: Weights = {}
        self.release()  # the layer before is packed by now
        for name, pieces in self._layers[number].items():
            parts = [self._changed(piece) for piece in pieces]
            if name.startswith("experts."):
                weights[name] = parts
            else:
                dim = int(name == "conv")  # whose columns are the channels
                whole = len(parts) == 1
                weights[name] = parts[0] if whole else torch.cat([*map(dense, parts)], dim)
        return weights

    def _changed(self, piece: Piece) -> Weight:
        found = self.read(piece)
        if piece.then == "transpose":
            return dense(found).T.contiguous()
        if piece.then == "negative exp":
            return -dense(found).exp()
        if piece.then == "over root of size":
            scale = dense(found)
            return scale * scale.numel() ** -0.5
        return dense(found) + self._architecture.norm_offset if piece.then else found


class SafetensorsSource(ModelWeights):
    """A checkpoint's files. A tensor is read once for all of its pieces, which share its memory."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self._checkpoint = checkpoint
        self._read: dict[str, Read] = {}
        self._shapes = checkpoint.shapes
        tensors = Tensors(self._shapes, "checkpoint", "config")
        super().__init__(architecture, tensors, name_checkpoint(architecture, self._shapes))

    def read(self, piece: Piece) -> Weight:
        if (name := piece.tensor) not in self._read:
            self._read[name] = self._tensor(name)
        found: Any = self._read[name]
        if isinstance(found, torch.Tensor) and found.shape != piece.shape:
            found = found.reshape(piece.shape)
        found = _part(found if piece.expert is None else found[piece.expert], piece)
        return dense(found).float().contiguous() if piece.vector else found

    def layer(self, number: int) -> Weights:
        weights = super().layer(number)
        self.release()  # what was copied out of a tensor does not need it
        return weights

    def release(self) -> None:
        self._read.clear()

    def _tensor(self, name: str) -> Read:
        """A tensor, rounded to the dtype of the steps unless more of it counts.

        Raises:
            ModelError: it is not of the kind of number that it should be.
        """
        rounded = name.endswith((".weight", ".bias")) and not self._architecture.norm_offset
        vector = sum(n > 1 for n in self._shapes.get(name, ())) < 2 or name.endswith(_CORRECTION)
        found = self._checkpoint.tensor(name, exact=vector and not rounded)
        if isinstance(found, torch.Tensor) and not found.is_floating_point():
            raise ModelError(f"the checkpoint has {name} in {str(found.dtype)[6:]}")
        return found


class GGUFSource(ModelWeights):
    """A GGUF file; quantized matrices stay quantized, and on a CPU others are views of it."""

    def __init__(
        self, file: GGUFFile, architecture: Architecture, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`dtype` is that of matrices on a GPU."""
        self._file, self._device, self._dtype = file, device, dtype
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        tensors = Tensors(shapes, "GGUF file", "metadata")
        super().__init__(architecture, tensors, name_gguf(architecture, file))

    def read(self, piece: Piece) -> Weight:
        tensor = self._file.tensors[piece.tensor]._replace(shape=piece.shape)
        if piece.expert is not None:
            size = len(tensor.data) // piece.shape[0]
            data = tensor.data[piece.expert * size : (piece.expert + 1) * size]
            tensor = tensor._replace(shape=piece.shape[1:], data=data)
        found = _part(read_tensor(piece.tensor, tensor, piece.rows), piece._replace(rows=None))
        if piece.vector:
            return dense(found).to(self._device, torch.float32, copy=True)  # the file may close
        if isinstance(found, Stored):
            found.release = self._file.release
        if self._device.type == "cpu":
            return found
        if isinstance(found, Quantized):
            return found.to(self._device)
        return found.to(self._device, self._dtype)

    def release(self) -> None:
        self._file.release()


def _part(weight: Weight, piece: Piece) -> Weight:
    """The rows and columns of a weight that a piece is."""
    rows, columns = piece.rows, piece.columns
    if isinstance(weight, torch.Tensor):
        weight = weight if rows is None else weight[rows]
    elif rows is not None:
        weight = weight.rows(torch.arange(weight.shape[0])[rows])
    if columns is None:
        return weight
    if isinstance(weight, Quantized):
        moved = weight.columns(torch.arange(weight.shape[1])[columns])
        return weight.dense()[:, columns].contiguous() if moved is None else moved
    return weight[:, columns].contiguous()
