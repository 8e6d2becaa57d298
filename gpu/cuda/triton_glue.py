"""What a layer does between its matrix products, in Triton kernels. Importing this imports triton."""

from __future__ import annotations

from .kernels import activation, blocks, norms, rope


class TritonGlue:
    """Implements `Glue`, each method in one launch and with no wait, so that all of them can be captured in a CUDA graph.

    Last dimensions are contiguous, blocks of a pool too. Norms and the activation round as `TorchGlue` does; rotation is in
    float32 until the store, where that rounds its angles to the dtype too.
    """

    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    rope_and_write = staticmethod(rope.rope_and_write)
    silu_mul = staticmethod(activation.silu_mul)
    copy_slots = staticmethod(blocks.copy_slots)
    gather_blocks = staticmethod(blocks.gather_blocks)
    scatter_blocks = staticmethod(blocks.scatter_blocks)
