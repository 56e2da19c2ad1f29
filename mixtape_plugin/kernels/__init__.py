"""Fused losses: what an output layer's eager loss computes, in less time, without scores of all tokens at once.

Tokens are gone through in chunks. A chunk's scores are written into a buffer, turned into their own gradient in place,
and multiplied into the gradients of features and weights at once: nothing of the size tokens × vocabulary outlives its
chunk, and nothing is computed twice.

:class:`~mixtape_plugin.kernels.common.FusedLoss` goes through the chunks; ``softmax.py``, ``mixture_of_softmaxes.py``
and ``mixtape.py`` fill in what happens to one, with the maps of ``curves.py`` and the gates of ``sigmoid_tree.py``.
What is done to scores elementwise is in ``torch_ops.py``, the same for an NVIDIA GPU in ``triton_ops.py``, and
``dispatch.py`` chooses between them; ``precision.py`` says in which types.
"""
