"""What a test needs that runs the compiled CPU kernels."""

from __future__ import annotations

import pytest

from radixcache.kernels.native.library import problem

needs_kernels = pytest.mark.skipif(problem() is not None, reason=str(problem()))
