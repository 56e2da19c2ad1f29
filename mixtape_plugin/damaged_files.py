"""What is wrong with a file, in one sentence: binarized data, dictionaries, checkpoints.

fairseq meets a damaged one somewhere in the middle, and ends in a traceback; :mod:`mixtape_plugin.fairseq_compat` asks
here first.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import IndexedDataset, MMapIndexedDataset, _code_to_dtype

from mixtape_plugin.errors import UserError

PREPROCESS_AGAIN = "run fairseq-preprocess again"


def check_dataset(path: str, impl: str, dictionary: Dictionary | None = None) -> None:
    """Raises UserError for binarized data, `path`.idx and `path`.bin, that cannot be read or hold ids of no symbol.

    Only `mmap` data are checked beyond their first bytes, which is what fairseq-preprocess writes unless told
    otherwise. Reads both files once.

    Args:
        path: the files without their endings; nothing is checked where one of them is missing.
        impl: fairseq's name of the format.
        dictionary: the ids have to be below its length.
    """
    if not MMapIndexedDataset.exists(path):
        return
    magic = {"cached": IndexedDataset._HDR_MAGIC, "lazy": IndexedDataset._HDR_MAGIC}
    magic = {**magic, "mmap": MMapIndexedDataset.Index._HDR_MAGIC}.get(impl, b"")
    with open(path + ".idx", "rb") as file:
        header = file.read(26)
    if not header.startswith(magic):
        raise UserError(f"{path}.idx is no index that fairseq-preprocess wrote, or is damaged: {PREPROCESS_AGAIN}")
    if impl == "mmap":
        _check_mmap_dataset(path, header, dictionary)


def _check_mmap_dataset(path: str, header: bytes, dictionary) -> None:
    """The same for `mmap`, whose .idx is a header of 26 bytes, then a size (4 bytes) and a place (8) a sentence.

    In the header are, after 9 bytes that name the format, the version (8), the numbers' type (1), and how many
    sentences there are (8).
    """
    index_file, data_file = path + ".idx", path + ".bin"
    damaged = f"{index_file} is cut off or damaged, at {os.path.getsize(index_file):,} bytes: {PREPROCESS_AGAIN}"
    if len(header) < 26:
        raise UserError(damaged)
    version, code, count = struct.unpack("<QBQ", header[9:])
    dtype = np.dtype(_code_to_dtype.get(code, float))
    if version != 1 or dtype.kind not in "iu" or os.path.getsize(index_file) != 26 + 12 * count:
        raise UserError(damaged)
    if count == 0:
        raise UserError(f"{data_file} holds no sentence: check the text that it was made from and {PREPROCESS_AGAIN}")
    sizes = np.fromfile(index_file, np.int32, count, offset=26)
    begins = np.fromfile(index_file, np.int64, count, offset=26 + sizes.nbytes)
    if sizes.min() < 0 or begins[0] != 0 or (np.diff(begins) != sizes[:-1].astype(np.int64) * dtype.itemsize).any():
        raise UserError(damaged)
    promised = int(begins[-1]) + int(sizes[-1]) * dtype.itemsize
    size = os.path.getsize(data_file)
    if size != promised:
        raise UserError(f"{data_file} has {size:,} bytes where {index_file} promises {promised:,}: {PREPROCESS_AGAIN}")
    if size == 0:
        raise UserError(f"{data_file} holds no token: check the text that it was made from and {PREPROCESS_AGAIN}")
    if dictionary is None:
        return
    ids = np.memmap(data_file, dtype, mode="r")
    if ids.min() < 0 or ids.max() >= len(dictionary):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise UserError(
            f"{data_file} holds the id {wrong}, and its dictionary has {len(dictionary)} symbols: one of the two is "
            f"damaged, or they do not belong together; {PREPROCESS_AGAIN}"
        )


def damaged_dictionary(path: str, error: Exception) -> UserError:
    """The sentence for a dictionary that fairseq could not load."""
    reason = str(error).split(". ")[0].encode("unicode_escape").decode()  # it quotes the line, whatever is in it
    return UserError(f"dictionary {path} is damaged ({reason}): restore it, or {PREPROCESS_AGAIN}")


def unreadable_checkpoint(path: str) -> UserError:
    """The sentence for a checkpoint that torch or fairseq could not read."""
    return UserError(f"{path} is damaged or is no checkpoint: it cannot be read")


def check_weights(path: str, state: dict) -> None:
    """Raises UserError for a checkpoint with a weight that is no number, or without weights.

    Args:
        path: of the checkpoint.
        state: what it holds.
    """
    if not isinstance(state.get("model"), dict):
        raise unreadable_checkpoint(path)
    for name, value in state["model"].items():
        if torch.is_tensor(value) and value.is_floating_point() and value.isnan().any():
            raise UserError(
                f"checkpoint {path} holds weights that are no numbers ({name}): it was saved when the training had "
                "diverged already; take an earlier one"
            )


def explain_misfit(path: str, error: Exception) -> None:
    """Raises UserError for a checkpoint whose parameters are not those of the model; does nothing for other errors.

    Args:
        path: of the checkpoint.
        error: of loading it.
    """
    first = _first_error(error)
    if isinstance(first, RuntimeError) and "loading state_dict" in str(first):
        differences = [" ".join(line.split()).rstrip(".") for line in str(first).splitlines()[1:]]
        more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
        raise UserError(
            f"checkpoint {path} does not fit the model ({differences[0]}{more}): give the options it was trained with, "
            "and its data folder, whose dictionary says how many symbols there are"
        ) from error


def explain_resume(path: str, error: Exception) -> None:
    """The same for a checkpoint that a training cannot go on from, for whatever it lacks or has otherwise."""
    explain_misfit(path, error)
    first = _first_error(error)
    if isinstance(first, (AssertionError, AttributeError, LookupError, TypeError, ValueError)):
        reason = " ".join(str(first).split())
        groups = "parameter group" in reason  # of torch: their number, or how many parameters one has
        cure = ": give --plif-lr-scale or --freeze-plif as it was, or --reset-optimizer" if groups else ""
        raise UserError(
            f"checkpoint {path} does not fit this training ({type(first).__name__}: {reason}){cure}"
        ) from error


def _first_error(error: Exception) -> Exception | None:
    """The error that others followed, or None where one of them is a sentence for the user already."""
    while True:
        if isinstance(error, UserError):
            return None
        if error.__context__ is None:
            return error
        error = error.__context__
