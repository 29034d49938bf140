"""Writes the model that all engines run.

python -m bench.peers.engines.random_model FOLDER SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

from radixcache.bench.probes.random_llama import save_random_llama

if __name__ == "__main__":
    size = save_random_llama(Path(sys.argv[1]), int(sys.argv[2]))
    print(f"random Llama, {size / 1e6:.0f} M parameters, float32")
