"""The native CPU kernels as a `Backend`: all layers of a step are one call.

Its kernels are in C++: `linear.h` has linears, `operators.h` norms, RoPE and activations,
`experts.h` experts, `recurrence.h` the recurrence, `model.h` the softcap of logits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from radixcache.kernels.backend import Layers
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.layers import NativeLayers
from radixcache.kernels.native.library import quiet_torch
from radixcache.kernels.torch.operators import TorchBackend


class NativeBackend(TorchBackend):
    """Exact: a row's results depend, to the bit, on its own tokens alone."""

    name = NativeAttention.name

    def whole(self) -> Layers:
        return NativeLayers(self.architecture, self.dtype, self.weights_by)

    def threads(self) -> AbstractContextManager[None]:
        return quiet_torch()
