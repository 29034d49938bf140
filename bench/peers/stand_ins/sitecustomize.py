"""Empty modules for those that SGLang imports and a text model on a CPU does not need.

Python imports this file as it starts, where its folder is in PYTHONPATH: in SGLang's own processes,
too. torchvision's and torchaudio's CPU and CUDA builds do not mix; sgl_kernel is for GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Nothing(type):
    """The metaclass of classes in which every name is the class itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Empty(ModuleType):
    """A module in which every name is such a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ("torchvision", "torchaudio", "sgl_kernel"):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


with suppress(ImportError):
    import transformers.utils.import_utils  # noqa: F401  (it must not see the stand-ins)

sys.meta_path.append(_StandIns())
