"""Block hashes, byte for byte as vLLM 0.33 computes them.

A block's hash is H((parent's hash, its token ids, extra keys or None)), so that it names the whole
prefix that ends with the block; the parent of a first block is a hash of the seed. H serialises
(pickle or CBOR) and digests (SHA-256 or XXH3). Only full blocks have a hash.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

from radixcache.errors import InvalidRequest, MissingDependency

HashAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
"""Digest and serialisation; without a suffix the serialisation is pickle's."""

ExtraKey = tuple[str, Any] | tuple[str, str, Any]

_FIXED_SEED = "vllm-none-hash"
_NO_EMBEDDING = hashlib.sha256(b"").digest()


class Image(NamedTuple):
    """`length` placeholder tokens from position `offset` on stand for the content `identifier`."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class BlockNamespace:
    """A namespace with all that vLLM mixes into block hashes; a plain string is the cache salt.

    >>> namespace = BlockNamespace(lora=("a", "/p"), salt="s", images=(Image("cat", 20, 8),))
    >>> namespace.keys(0, 16)
    (('lora', 'a', '/p'), ('cache_salt', 's'))
    >>> namespace.keys(16, 32)
    (('lora', 'a', '/p'), ('mm', 'cat', 4))
    """

    salt: str | None = None
    """Requests share blocks only within one salt; "" is none. Enters the first block's hash."""
    lora: tuple[str, str] | None = None
    """Name and path of the adapter; enters every block's hash."""
    images: tuple[Image, ...] = ()
    """Multimodal inputs by offset, apart from each other; each enters the blocks it overlaps."""
    prompt_embeds: tuple[bytes, ...] = ()
    """For a prompt given as embeddings: the SHA-256 of each block's part of them."""

    def keys(self, start: int, end: int) -> tuple[ExtraKey, ...] | None:
        """The extra keys of the block at positions [start, end). O(log images + keys)."""
        keys: list[ExtraKey] = []
        if self.lora is not None:
            keys.append(("lora", *self.lora))
        if self.images:
            first = bisect_right(self.images, start, key=lambda i: i.offset + i.length)
            for image in self.images[first:]:
                if image.offset >= end:
                    break
                keys.append(("mm", image.identifier, image.offset - start))
        if self.salt and start == 0:
            keys.append(("cache_salt", self.salt))
        if self.prompt_embeds:
            block = start // (end - start)
            given = block < len(self.prompt_embeds)
            keys.append(("prompt_embeds", self.prompt_embeds[block] if given else _NO_EMBEDDING))
        return tuple(keys) or None


def as_block_namespace(namespace: Hashable) -> BlockNamespace | None:
    """The namespace as one that has keys; None if it has none at all.

    Raises:
        InvalidRequest: neither None, a string, nor a `BlockNamespace`.
    """
    if namespace is None or namespace == "":
        return None
    if isinstance(namespace, str):
        return BlockNamespace(salt=namespace)
    if isinstance(namespace, BlockNamespace):
        return namespace
    raise InvalidRequest(
        f"a namespace of the hash-block cache is a string (the cache salt) or a BlockNamespace, "
        f"not {namespace!r}"
    )


def hash_function(algorithm: HashAlgorithm) -> Callable[[object], bytes]:
    """H of the module's docstring: 32 bytes for SHA-256, 16 for XXH3.

    >>> hash_function("sha256")("vllm-none-hash").hex()[:16]
    '066b1e8987e02713'

    Raises:
        InvalidRequest: no such algorithm.
        MissingDependency: it needs a package that is not installed.
    """
    if algorithm not in get_args(HashAlgorithm):
        names = ", ".join(get_args(HashAlgorithm))
        raise InvalidRequest(f"hash_algorithm must be one of {names}, not {algorithm!r}")
    try:
        dumps = _cbor() if algorithm.endswith("_cbor") else _pickle
        digest = _xxh3() if algorithm.startswith("xxhash") else _sha256
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"hash_algorithm={algorithm!r} needs {error.name}: "
            "pip install '.[hash-block]' in a checkout"
        ) from error
    return lambda content: digest(dumps(content))


def first_parent(algorithm: HashAlgorithm) -> bytes:
    """What stands for the parent's hash of a first block (vLLM's NONE_HASH).

    The hash of PYTHONHASHSEED if that is set. Else of a fixed text for SHA-256, and of random bytes
    for XXH3, because collisions of that one can be computed by whoever knows the seed.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        seed = os.urandom(32).hex() if algorithm.startswith("xxhash") else _FIXED_SEED
    return hash_function(algorithm)(seed)


def _pickle(content: object) -> bytes:
    return pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _cbor() -> Callable[[object], bytes]:
    return partial(import_module("cbor2").dumps, canonical=True)


def _xxh3() -> Callable[[bytes], bytes]:
    digest: Callable[[bytes], bytes] = import_module("xxhash").xxh3_128_digest
    return digest
