"""Imports FlashInfer with our settings, and explains why it does not run."""

from __future__ import annotations

import os
import shutil
from typing import Any

from radixcache.errors import first_line


def load_flashinfer() -> Any:
    """The package, with the norms that are compiled once and kept, unless the variable is set: its
    default where CuTe DSL is installed is compiled in each process.

    Raises:
        ImportError: it is not installed.
    """
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    import flashinfer

    return flashinfer


def explain_failure(error: Exception) -> str:
    """One sentence: why FlashInfer does not run, and what to do."""
    if isinstance(error, ImportError):
        return f"FlashInfer is not installed ({error}): pip install '.[cuda]' in a checkout"
    remedy = ""
    if shutil.which("nvcc") is None:
        remedy = (
            "; there is no nvcc to compile its kernels with: install the CUDA toolkit, or fetch "
            "built ones with `flashinfer download-kernels`"
        )
    return f"FlashInfer, from the extra 'cuda', does not run here: {first_line(error)}{remedy}"
