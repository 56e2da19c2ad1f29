"""The classes that may stand in a checkpoint beside tensors and plain Python."""

from __future__ import annotations

import argparse
import pickle
import re

import numpy as np
from fairseq.distributed import utils as distributed_utils


class _CheckpointDtype:
    """Stands in for numpy.dtype while a checkpoint is read: numbers only, and only their byte order can be set.

    The real one accepts a state that makes it a record of Python objects, so that bytes of the file would be
    taken for pointers.
    """

    def __init__(self, code, align=False, copy=True):
        if not isinstance(code, str) or not re.fullmatch(r"b1|[iu][1248]|f[248]", code):
            raise pickle.UnpicklingError(f"GLOBAL numpy.dtype({code!r}) is not a plain number")
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        self.dtype = self.dtype.newbyteorder(state[1])


class _CheckpointArray(np.ndarray):
    """Stands in for numpy.ndarray while a checkpoint is read: it starts empty and takes plain numbers only.

    The real one builds an array of Python objects on top of any bytes. Saved again, it is a plain array.
    """

    def __new__(cls, *_):
        return super().__new__(cls, 0)

    def __setstate__(self, state):
        _, shape, dtype, fortran_order, data = state
        if type(dtype) is not _CheckpointDtype or not isinstance(data, bytes):
            raise pickle.UnpicklingError("GLOBAL numpy.ndarray does not hold plain numbers")
        super().__setstate__((1, shape, dtype.dtype, fortran_order, data))

    def __reduce__(self):
        return self.view(np.ndarray).__reduce__()


def _reconstruct_array(*_):
    return _CheckpointArray()


def _scalar(dtype, data):
    array = _CheckpointArray()
    array.__setstate__((1, (), dtype, False, data))
    return array[()]


def _no_bytes(*args):
    if args:
        raise pickle.UnpicklingError("GLOBAL bytes is not empty")
    return b""


# Measured: what checkpoints written by fairseq-train and fairseq-hydra-train hold beside tensors and plain Python; and
# single numbers of numpy, which a criterion of somebody's own may log.
# The allow-list is a matter of what a *constructor or state* can do, for the file chooses the arguments. None of
# these runs code, imports, looks up an attribute or reads a file.
SAFE_GLOBALS = [
    argparse.Namespace,  # the model's options ("cfg.model"), and all options in older checkpoints ("args")
    distributed_utils._TensorPlaceholder,  # rank 0 hands a checkpoint to the other ranks through torch.save
    (_CheckpointArray, "numpy.ndarray"),  # n-gram counts among the meters of --eval-bleu
    (_CheckpointDtype, "numpy.dtype"),
    (_reconstruct_array, "numpy._core.multiarray._reconstruct"),
    (_reconstruct_array, "numpy.core.multiarray._reconstruct"),  # the same, written with numpy 1
    (_no_bytes, "builtins.bytes"),  # of an empty array
    (_scalar, "numpy._core.multiarray.scalar"),
    (_scalar, "numpy.core.multiarray.scalar"),
]
