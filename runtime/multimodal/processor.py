"""Makes an `Image` of what somebody gave, by transformers' own processor of the model."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from radixcache.errors import (
    ContextExceeded,
    InvalidRequest,
    MissingDependency,
    ModelError,
    first_sentence,
)
from radixcache.runtime.multimodal.families import ImageFamily
from radixcache.runtime.multimodal.image import Image, ImageSource, digest_of

if TYPE_CHECKING:
    import torch

_MOST_KNOWN = 256
"""Sources of which it is kept what they are to the model: some KiB each, and no pixels."""

_OF_TEXT = "input_ids attention_mask token_type_ids mm_token_type_ids text_replacement_offsets"


class ImageProcessor:
    """A model's processor, for one image at a time: its crops and tiles are its own.

    transformers and the tokenizer are read when they are first needed. Any thread may call.
    """

    def __init__(
        self, name_or_path: str | Path, family: ImageFamily, fingerprint: bytes, max_rows: int
    ) -> None:
        """
        Args:
            fingerprint: stands for the model in digests.
            max_rows: the model's context; an image of more rows is refused.
        """
        self._name_or_path, self._family = name_or_path, family
        self._fingerprint, self._max_rows = fingerprint, max_rows
        self._known: OrderedDict[tuple[str | None, bytes], Callable[[ImageSource], Image]] = (
            OrderedDict()
        )
        self._lock = RLock()  # no two threads may call a tokenizer

    @property
    def placeholder(self) -> str:
        """What the model's chat template writes for an image.

        Raises:
            ModelError: the checkpoint's processor cannot be read.
            MissingDependency: it needs a package that is not installed.
        """
        with self._lock:
            return self._loaded.placeholder

    @property
    def token(self) -> int:
        """The id that stands for a row in prompts; raises as `placeholder` does."""
        with self._lock:
            return self._loaded.token

    @property
    def _processor(self) -> Any:
        return self._loaded.processor

    @cached_property
    def _loaded(self) -> _Loaded:
        try:
            return _load(self._name_or_path, self._family.processor)
        except ImportError as error:
            needed = first_sentence(error)
            raise MissingDependency(f"images of this model need a package: {needed}") from None
        except Exception as error:
            named = f"the image processor of {self._name_or_path}"
            raise ModelError(f"{named} does not load: {first_sentence(error)}") from None

    def prepare(self, source: ImageSource, cache_salt: str | None = None) -> Image:
        """The image as the model reads it; a source that comes again, with the same salt, is not
        decoded again. Images of different salts have different digests.

        Raises:
            InvalidRequest: the processor refuses it, or it has more rows than the context.
            ModelError, MissingDependency: as `placeholder`.
        """
        salted = cache_salt, source.identity
        with self._lock:
            if salted not in self._known:
                self._known[salted] = self._look_at(source, cache_salt)
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(salted)
            return self._known[salted](source)

    def inputs(self, image: Image) -> dict[str, torch.Tensor]:
        """What the model's tower takes for an image: pixels, and sizes of them."""
        with self._lock:
            return self._process(image.source)[1]

    def _look_at(
        self, source: ImageSource, cache_salt: str | None
    ) -> Callable[[ImageSource], Image]:
        """All of an image but its source, which would keep the bytes of a file."""
        text, inputs = self._process(source)
        parts, grid = [repr(cache_salt).encode(), self._fingerprint], None
        parts += [self._loaded.settings, text.encode()]
        for name, tensor in sorted(inputs.items()):
            parts += [f"{name} {tensor.dtype} {[*tensor.shape]}".encode(), tensor.numpy().tobytes()]
        if self._family.axes:
            merge = self._processor.image_processor.merge_size
            _, height, width = (inputs["image_grid_thw"][0] // merge).tolist()
            grid = height, width
        return partial(
            Image, digest=digest_of(*parts), text=text, token=self._loaded.token,
            num_rows=text.count(self._loaded.row), grid=grid,
        )  # fmt: skip

    def _process(self, source: ImageSource) -> tuple[str, dict[str, torch.Tensor]]:
        """The text of an image, and its tensors."""
        loaded, picture = self._loaded, source.open()
        width, height = picture.size
        named = f"an image of {width} x {height} pixels"
        try:
            self._check(named, self._expected(height, width))
            found = loaded.processor(
                images=[picture], text=[loaded.placeholder], return_tensors="pt", padding=False,
                return_text_replacement_offsets=True,
                input_data_format="channels_last",  # of an image one or three pixels high, too
            )  # fmt: skip
            text: str = found["text_replacement_offsets"][0][0]["replacement"]
            self._check(named, text.count(loaded.row))
        except InvalidRequest:
            raise
        except Exception as error:  # what a size makes of a processor is its own affair
            reason = first_sentence(error)
            raise InvalidRequest(f"the model does not read {named}: {reason}") from None
        return text, {name: found[name] for name in found if name not in _OF_TEXT.split()}

    def _expected(self, height: int, width: int) -> int:
        """How many tokens an image of a size is, about: 1 where its processor cannot say."""
        try:
            told = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
            return int(told["num_image_tokens"][0])
        except (AttributeError, KeyError, TypeError, NotImplementedError):  # it is no public method
            return 1

    def _check(self, named: str, num_rows: int) -> None:
        if num_rows > self._max_rows:
            raise ContextExceeded.of(self._max_rows, f"{named} is {num_rows} tokens")
        if num_rows < 1:
            raise InvalidRequest(f"the model does not read {named}: it is too small")


class _Loaded(NamedTuple):
    """transformers' processor, whose parts for videos and sound are None, and what it says."""

    processor: Any
    placeholder: str
    token: int
    row: str
    settings: bytes


def _load(name_or_path: str | Path, named: str) -> _Loaded:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    kind = _class_of(*named.split("."))
    local: dict[str, Any] = {"trust_remote_code": False}
    images = AutoImageProcessor.from_pretrained(name_or_path, backend="pil", **local)
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **local)
    parts = {**dict.fromkeys(kind.get_attributes()), "image_processor": images}
    settings, _ = kind.get_processor_dict(name_or_path)
    processor = kind.from_args_and_dict([*(parts | {"tokenizer": tokenizer}).values()], settings)
    token = AutoConfig.from_pretrained(name_or_path, **local).image_token_id
    row = str(tokenizer.convert_ids_to_tokens(token))
    said = json.dumps(images.to_dict(), sort_keys=True, default=str)
    return _Loaded(processor, processor.image_token, token, row, said.encode())


def _class_of(folder: str, name: str) -> Any:
    """The class of a processor, which takes None for a part."""
    package = f"transformers.models.{folder}"
    try:
        module = import_module(f"{package}.processing_{folder}")
    except ImportError:  # torchvision, for a function that the image processor by PIL has, too
        needed = f"{package}.image_processing_{folder}"
        sys.modules[needed] = import_module(f"{package}.image_processing_pil_{folder}")
        try:
            module = import_module(f"{package}.processing_{folder}")
        finally:
            del sys.modules[needed]

    class Images(getattr(module, name)):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> None:
            """Videos would need torchvision."""

    return Images
