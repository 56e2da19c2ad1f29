"""Fused losses: what an output layer's eager loss computes, in less time, without scores of all tokens at once.

Tokens are gone through in chunks. A chunk's scores are written into a buffer, turned into their own gradient in place,
and multiplied into the gradients of features and weights at once: nothing of the size tokens × vocabulary outlives its
chunk, and nothing is computed twice. :mod:`~mixtape_plugin.kernels.torch_ops` holds what is done to scores elementwise,
:mod:`~mixtape_plugin.kernels.triton_ops` the same for an NVIDIA GPU.
"""
