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
from typing import TYPE_CHECKING, Any

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

_MOST_KEPT = 256
"""Sources of which it is kept what they are to the model: some KiB each, and no pixels."""

_OF_TEXT = frozenset(
    "input_ids attention_mask token_type_ids mm_token_type_ids text_replacement_offsets".split()
)


class ImageProcessor:
    """A model's processor, for one image at a time: its crops and tiles are its own.

    transformers and the processor's files are read when they are first needed. Any thread may call.
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
        self._known: OrderedDict[bytes, Callable[[ImageSource], Image]] = OrderedDict()
        self._lock = RLock()  # tokenizers are not to be called by two threads

    @property
    def placeholder(self) -> str:
        """What the model's chat template writes for an image.

        Raises:
            ModelError: the model's processor cannot be read.
            MissingDependency: it needs a package that is not installed.
        """
        with self._lock:
            placeholder: str = self._processor.image_token
            return placeholder

    @property
    def token(self) -> int:
        """The id that stands for a row in prompts; raises as `placeholder` does."""
        with self._lock:
            return self._token

    def prepare(self, source: ImageSource) -> Image:
        """The image as the model reads it; what `source` is decoded for only once.

        Raises:
            InvalidRequest: the processor refuses it, or it has more rows than the context.
            ModelError, MissingDependency: as `placeholder`.
        """
        with self._lock:
            if source.identity not in self._known:
                self._known[source.identity] = self._look_at(source)
                if len(self._known) > _MOST_KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(source.identity)
            return self._known[source.identity](source)

    def inputs(self, image: Image) -> dict[str, torch.Tensor]:
        """What the model's tower takes for an image: pixels, and sizes of them; raises as
        `prepare` does."""
        with self._lock:
            return self._process(image.source)[1]

    def _look_at(self, source: ImageSource) -> Callable[[ImageSource], Image]:
        """All of an image but its source, which would keep the bytes of a file."""
        text, inputs = self._process(source)
        processor, grid = self._processor, None
        if self._family.axes:
            merged = inputs["image_grid_thw"][0, 1:] // processor.image_processor.merge_size
            grid = (int(merged[0]), int(merged[1]))
        settings = json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str)
        parts = [self._fingerprint, settings.encode(), text.encode()]
        for name, tensor in sorted(inputs.items()):
            parts += [f"{name} {tensor.dtype} {[*tensor.shape]}".encode(), tensor.numpy().tobytes()]
        return partial(
            Image, digest=digest_of(*parts), text=text, token=self._token,
            num_rows=text.count(self._row), grid=grid,
        )  # fmt: skip

    def _process(self, source: ImageSource) -> tuple[str, dict[str, torch.Tensor]]:
        """The text of an image, and its tensors."""
        processor, picture = self._processor, source.open()
        width, height = picture.size
        named = f"an image of {width} x {height} pixels"
        try:
            self._check(named, self._expected(height, width))
            found = processor(
                images=[picture], text=[processor.image_token], return_tensors="pt",
                return_text_replacement_offsets=True, padding=False,
                input_data_format="channels_last",  # of an image one or three pixels high, too
            )  # fmt: skip
        except InvalidRequest:
            raise
        except Exception as error:  # what a size makes of a processor is its own affair
            reason = first_sentence(error)
            raise InvalidRequest(f"the model does not read {named}: {reason}") from None
        text: str = found["text_replacement_offsets"][0][0]["replacement"]
        self._check(named, text.count(self._row))
        return text, {name: found[name] for name in found if name not in _OF_TEXT}

    def _expected(self, height: int, width: int) -> int:
        """How many rows an image of a size has, about: 1 where its processor cannot say.

        Raises:
            ValueError: the processor refuses the size.
        """
        try:
            told = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
            return int(told["num_image_tokens"][0])
        except (AttributeError, KeyError, TypeError, NotImplementedError):  # it is no public method
            return 1

    def _check(self, named: str, num_rows: int) -> None:
        """Refuse an image by the number of its rows."""
        if num_rows > self._max_rows:
            raise ContextExceeded.of(self._max_rows, f"{named} is {num_rows} tokens")
        if num_rows < 1:
            raise InvalidRequest(f"the model does not read {named}: it is too small")

    @cached_property
    def _processor(self) -> Any:
        """transformers' processor, whose parts for videos and sound are None."""
        from transformers import AutoTokenizer
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        kind = _class_of(self._family.processor)
        parts: dict[str, Callable[..., Any]] = {
            "image_processor": partial(AutoImageProcessor.from_pretrained, backend="pil"),
            "tokenizer": AutoTokenizer.from_pretrained,
        }
        settings, _ = self._read(kind.get_processor_dict)
        names = kind.get_attributes()
        found = [self._read(parts[name]) if name in parts else None for name in names]
        return self._read(lambda *_, **__: kind.from_args_and_dict(found, settings))

    @cached_property
    def _token(self) -> int:
        from transformers import AutoConfig

        token: int = self._read(AutoConfig.from_pretrained).image_token_id
        return token

    @cached_property
    def _row(self) -> str:
        """The token of a row, as it stands in texts."""
        row = self._processor.tokenizer.convert_ids_to_tokens(self._token)
        if not row:
            raise ModelError(f"the tokenizer of {self._name_or_path} has no token {self._token}")
        return str(row)

    def _read(self, read: Callable[..., Any]) -> Any:
        try:
            return read(self._name_or_path, trust_remote_code=False)
        except ImportError as error:
            raise _lacking(error) from None
        except Exception as error:
            reason = first_sentence(error)
            raise ModelError(
                f"the image processor of {self._name_or_path} does not load: {reason}"
            ) from None


def _lacking(error: ImportError) -> MissingDependency:
    needed = first_sentence(error)
    return MissingDependency(f"images of this model need a package that is not here: {needed}")


def _class_of(named: str) -> Any:
    """The class of a processor, that may be made without a part for videos.

    Raises:
        MissingDependency: it needs a package that is not installed.
    """
    folder, _, name = named.partition(".")
    package = f"transformers.models.{folder}"
    needed = f"{package}.image_processing_{folder}"
    try:
        try:
            module = import_module(f"{package}.processing_{folder}")
        except ImportError:  # torchvision, for a function that the processor by PIL has, too
            sys.modules[needed] = import_module(f"{package}.image_processing_pil_{folder}")
            try:
                module = import_module(f"{package}.processing_{folder}")
            finally:
                del sys.modules[needed]
    except ImportError as error:
        raise _lacking(error) from None

    class Images(getattr(module, name)):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> None:
            """A part for videos may be None."""

    return Images
