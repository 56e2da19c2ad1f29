"""Checkpoints: none may run code, one that is refused is named with the reason, and a copy is whole."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import platform
import re
import shutil
import tarfile
from types import SimpleNamespace
from typing import Iterable, Optional

import torch
from fairseq import checkpoint_utils, file_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import BaseFairseqModel
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from mixtape_plugin.damaged_files import check_weights, explain_misfit, explain_resume, unreadable_checkpoint
from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.patching import replace
from mixtape_plugin.fairseq_compat.safe_globals import SAFE_GLOBALS
from mixtape_plugin.files import write_whole
from mixtape_plugin.output_layers import OutputLayer, find_output_layer

logger = logging.getLogger(__name__)
TRUST_CHECKPOINTS = "MIXTAPE_TRUST_CHECKPOINTS"


def loads_weights_only() -> bool:
    """Whether torch.load takes tensors and an allow-list by default (torch 2.6), and never runs a pickle."""
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) >= (2, 6)


def load_checkpoints_safely() -> None:
    """Load checkpoints by allow-list, and say in one sentence why one is refused.

    torch 2.6 and later load with weights_only=True, but fairseq's own checkpoints hold a few more classes
    (`SAFE_GLOBALS`). Older torch runs any pickle: there a checkpoint is loaded only for a user who sets
    MIXTAPE_TRUST_CHECKPOINTS=1. The allow-list guards the reading of the file; of the options in it, which fairseq
    evaluates in part as Python, :mod:`mixtape_plugin.fairseq_compat.options_as_python` takes care.
    """
    if loads_weights_only():
        torch.serialization.add_safe_globals(SAFE_GLOBALS)

    def explain_refusal(load):
        def load_or_explain(path, *args, **kwargs):
            if not loads_weights_only() and os.environ.get(TRUST_CHECKPOINTS) != "1":
                raise UserError(
                    f"checkpoint {path} is not loaded, because torch {torch.__version__} would run any code in it: "
                    f"use torch 2.6 or later, or set {TRUST_CHECKPOINTS}=1 if you trust every checkpoint you load"
                )
            try:
                state = load(path, *args, **kwargs)
            except (UserError, FileNotFoundError, PermissionError, MemoryError):
                raise
            except pickle.UnpicklingError as error:
                found = re.search(r"GLOBAL ([\w.]+(\([^)]*\))?)|function (<.*?>)", str(error))
                if found:
                    raise UserError(
                        f"checkpoint {path} is not loaded: it holds a pickled {found[1] or found[3]}, which is not on "
                        "the list of classes that a fairseq checkpoint needs, and unpickling it could run code"
                    ) from error
                raise unreadable_checkpoint(path) from error
            except Exception as error:  # whatever torch's reader, and fairseq after it, come to think of
                if load.__name__ == "load_ema_from_checkpoint" and error.args in (("extra_state",), ("ema",)):
                    raise UserError(
                        f"checkpoint {path} holds no moving average: it was trained without --store-ema"
                    ) from error
                if "allocate memory" in str(error):  # which torch has as a RuntimeError
                    raise UserError(f"checkpoint {path} does not fit into the memory that is left: {error}") from error
                if isinstance(error, OSError) and error.errno:
                    raise UserError(f"checkpoint {path} cannot be read: {error.strerror}") from error
                raise unreadable_checkpoint(path) from error
            check_weights(path, state)
            return state

        return load_or_explain

    for name in ("load_checkpoint_to_cpu", "load_ema_from_checkpoint"):
        if hasattr(checkpoint_utils, name):
            replace(checkpoint_utils, name, explain_refusal)


def unpack_archives_into_their_folder() -> None:
    """Refuse members of an archive, as ``from_pretrained("model.tar.gz")`` takes one, that would lie outside of it.

    Before Python 3.14 ``extractall`` writes a member wherever its name, or a link that came before, leads.
    """

    class Archive(tarfile.TarFile):
        def extractall(self, path):
            if not hasattr(tarfile, "data_filter"):
                raise UserError(
                    f"archive {self.name} is not unpacked: Python {platform.python_version()} cannot keep its members "
                    "inside their folder, a later patch of it can; unpack it yourself, and give the folder"
                )
            try:
                super().extractall(path, filter="data")
            except getattr(tarfile, "FilterError", ()) as error:
                raise UserError(f"archive {self.name} is not unpacked: {error}") from error

    file_utils.tarfile = SimpleNamespace(open=Archive.open)


def explain_checkpoints_that_do_not_fit() -> None:
    """Name the checkpoint, and what differs, where it does not fit the model or the training.

    fairseq asks to "ensure that the architectures match", at the end of two tracebacks.
    """

    def load(load_state_dict):
        def load_or_explain(self, state_dict, strict=True, *args, **kwargs):
            if strict:  # a moving average is put in place at each update, and is not
                refuse_to_make_one(self, state_dict)
            try:
                return load_state_dict(self, state_dict, strict, *args, **kwargs)
            except RuntimeError:
                check_output_layer_parameters(self, state_dict)
                raise

        return load_or_explain

    def resume(load_checkpoint):
        def resume_or_explain(self, filename, reset_optimizer=False, *args, **kwargs):
            read, saved = checkpoint_utils.load_checkpoint_to_cpu, []

            def read_and_note(*args, **kwargs):  # the one place where the file's options can be seen
                state = read(*args, **kwargs)
                saved.append(state["cfg"].get("model") if state.get("cfg") else state.get("args"))
                if filename == self.cfg.checkpoint.finetune_from_model:
                    averages = (state.get("extra_state", {}).get(name) for name in ("ema", "ema_fp32_params"))
                    begin_other_parameters_anew(filename, state["model"], self.get_model(), averages)
                if self.cfg.ema.store_ema and "ema" not in state.setdefault("extra_state", {}):
                    logger.info(f"{filename} has no average: --store-ema begins one with its weights")
                    state["extra_state"]["ema"] = dict(state["model"])  # which fairseq has deleted when it wants them
                return state

            checkpoint_utils.load_checkpoint_to_cpu = read_and_note
            try:
                extra_state = load_checkpoint(self, filename, reset_optimizer, *args, **kwargs)
            except Exception as error:
                explain_resume(filename, error)
                raise
            finally:
                checkpoint_utils.load_checkpoint_to_cpu = read
            for options in saved:
                check_output_layer(filename, options, self.get_model(), new_training=reset_optimizer)
            return extra_state

        return resume_or_explain

    def evaluate(load_model_ensemble_and_task):
        def load_or_explain(filenames, *args, **kwargs):
            try:
                return load_model_ensemble_and_task(filenames, *args, **kwargs)
            except Exception as error:
                explain_misfit(" or ".join(filenames), error)
                raise

        return load_or_explain

    replace(BaseFairseqModel, "load_state_dict", load)
    replace(Trainer, "load_checkpoint", resume)
    replace(checkpoint_utils, "load_model_ensemble_and_task", evaluate)


def check_output_layer_parameters(model: BaseFairseqModel, weights: dict) -> None:
    """Raises UserError where the weights are of another output layer than the model's.

    Args:
        model: nothing is checked where it has no output layer of this plugin.
        weights: name -> value, of the whole model.
    """
    layer = find_output_layer(model)
    if layer is None:
        return
    prefix = prefix_of(layer, model)
    found = {name[len(prefix) :]: tuple(value.shape) for name, value in weights.items() if name.startswith(prefix)}
    wanted = {name: tuple(value.shape) for name, value in layer.state_dict().items()}

    def differing(shapes, other):
        return ", ".join(f"{name} {[*shape]}" for name, shape in shapes.items() if other.get(name) != shape)

    if found and "bias" in wanted and "bias" not in found:
        raise UserError(
            "the checkpoint is of fairseq's own model, or another without an output layer of this plugin (it has no "
            f"bias there): for --output-layer {layer.config.output_layer} begin a new training with its weights, "
            "--finetune-from-model, in a --save-dir of its own"
        )
    if found and found != wanted:
        raise UserError(
            f"the checkpoint's output layer does not fit --output-layer {layer.config.output_layer}: it holds "
            f"{differing(found, wanted) or 'nothing more'}, the model wants "
            f"{differing(wanted, found) or 'nothing more'}; give the output-layer options (and the dictionary) it was "
            "trained with"
        )


def prefix_of(layer: OutputLayer, model: BaseFairseqModel) -> str:
    """What the names of a layer's parameters begin with in its model."""
    return next(name for name, module in model.named_modules() if module is layer) + "."


def check_output_layer(path: str, options: object, model: BaseFairseqModel, new_training: bool) -> None:
    """Raises UserError where a checkpoint is of another output layer, or of the same with another map, whose parameters
    have the same names and shapes; a new training may begin from its weights, and a line of the log says so.

    Args:
        path: of the checkpoint.
        options: of the model that was saved; nothing is known where they do not name an output layer.
        model: what is trained.
        new_training: with an optimizer that begins anew.
    """
    layer = find_output_layer(model)
    if layer is None:
        return
    for option in ("output_layer", *layer.fixed_options):
        given, saved = getattr(layer.config, option), getattr(options, option, None)
        if saved not in (None, given):
            flag = f"--{option.replace('_', '-')}"
            if not new_training:
                raise UserError(
                    f"checkpoint {path} was trained with {flag} {saved}, not {given}: go on with {saved}, or give "
                    "another --save-dir; --finetune-from-model begins a new training from its weights"
                )
            logger.warning(f"{path} was trained with {flag} {saved}; its weights begin a training with {given}")
            if option == "output_layer":
                return  # of another, options of this one say nothing


def begin_other_parameters_anew(
    path: str, weights: dict, model: BaseFairseqModel, averages: Iterable[Optional[dict]] = ()
) -> None:
    """Gives a checkpoint's weights, with which a new training begins, the model's own initial values of what its output
    layer has and the checkpoint's has not, or has in another shape; a line of the log names them.

    So a network with one output layer, or fairseq's own Transformer, can go on with another. Of the rest of the network
    all must be there. An output embedding that is tied to the input's in the model has the values of the latter.

    Args:
        path: of the checkpoint.
        weights: name -> value, changed in place.
        model: what is trained.
        averages: of the weights (``--store-ema``), None where there is none; changed in the same way.

    Raises:
        UserError: embeddings that are one in the model are several in the checkpoint.
    """
    layer = find_output_layer(model)
    if layer is None:
        return
    prefix = prefix_of(layer, model)
    wanted = {prefix + name: value for name, value in layer.state_dict().items()}
    saved = {name: value for name, value in weights.items() if name.startswith(prefix)}
    tied = tied_to_the_rest(model, prefix)
    kept = {name for name, value in saved.items() if name in wanted and value.shape == wanted[name].shape}
    replaced = []
    for name, others in tied.items():
        found = [weights[other] for other in others if other in weights]
        if not all(torch.equal(found[0], other) for other in found):
            raise UserError(
                f"{path} holds different {' and '.join(others)}, which --share-all-embeddings makes one: leave it out"
            )
        if found and name in saved and not torch.equal(saved[name], found[0]):
            replaced.append(f"{name[len(prefix) :]}, which is tied, becomes {others[0]}")
    anew = [name for name in wanted if name not in kept and name not in tied]
    for values in (weights, *filter(None, averages)):
        for name in saved.keys() - kept:
            values.pop(name, None)
        values.update((name, wanted[name].detach().cpu().clone()) for name in anew)
        values.update((name, values[others[0]]) for name, others in tied.items() if others[0] in values)
    if anew or replaced or saved.keys() - kept - tied.keys():
        names = ", ".join(name[len(prefix) :] for name in anew) or "nothing"
        logger.warning(
            f"{path} begins a training with --output-layer {layer.config.output_layer}; of its parameters these begin "
            f"anew: {'; '.join([names, *replaced])}"
        )


def refuse_to_make_one(model: BaseFairseqModel, weights: dict) -> None:
    """Raises UserError where the output embedding is tied in the model, and another than the input's in the weights: it
    would become the one that is loaded last."""
    layer = find_output_layer(model)
    if layer is None:
        return
    for name, others in tied_to_the_rest(model, prefix_of(layer, model)).items():
        for other in others:
            left, right = weights.get(name), weights.get(other)
            both = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.shape == right.shape
            if both and not torch.equal(left, right.to(left)):
                raise UserError(
                    f"the checkpoint's {name} differs from its {other}, and in the model they are one: leave out "
                    "--share-decoder-input-output-embed, --share-all-embeddings, or what else ties them"
                )


def tied_to_the_rest(model: BaseFairseqModel, prefix: str) -> dict[str, list[str]]:
    """The parameters whose names begin with ``prefix`` and that others are one with, and the names of those."""
    parameters = model.state_dict(keep_vars=True)
    tied = {}
    for name, value in parameters.items():
        if not name.startswith(prefix):
            continue
        others = [other for other in parameters if parameters[other] is value and not other.startswith(prefix)]
        if others:
            tied[name] = others
    return tied


def copy_checkpoints_whole() -> None:
    """Let a copy of a checkpoint appear whole or not at all.

    fairseq writes an epoch's first checkpoint beside its place and renames it, but copies it over the best and the last
    one before: an interruption, or a full disk, leaves these cut off, and nothing for a resume.
    """

    def wrapper(copy):
        def copy_whole(src_path, dst_path, overwrite=False):
            if "://" in str(dst_path):  # not on this machine's disks
                return copy(src_path, dst_path, overwrite)
            try:
                write_whole(dst_path, lambda part: shutil.copyfile(src_path, part))
            except OSError as error:
                raise not_written(dst_path, error) from error
            return True

        return copy_whole

    copy = functools.wraps(PathManager.copy)(wrapper(PathManager.copy))
    PathManager.copy = staticmethod(copy)


def say_which_checkpoint_is_not_written() -> None:
    """Say in one sentence that a checkpoint cannot be written, as on a full disk, and leave no part of it there.

    fairseq writes it beside its place, so what is there is whole; but it ends in five tracebacks that name no file.
    """

    def wrapper(save):
        def save_or_say(obj, filename, *args, **kwargs):
            try:
                save(obj, filename, *args, **kwargs)
            except Exception as failure:  # torch raises its own where the disk's is the reason
                error = failure
                while error is not None and not isinstance(error, OSError):
                    error = error.__context__
                if error is None or not isinstance(filename, str):
                    raise
                with contextlib.suppress(OSError):
                    os.remove(f"{filename}.tmp")
                raise not_written(filename, error) from failure

        return save_or_say

    replace(checkpoint_utils, "torch_persistent_save", wrapper)


def not_written(path: str, error: OSError) -> UserError:
    return UserError(f"{path} is not written ({error.strerror or error}): what was there before is as it was")


def broadcast_plain_options() -> None:
    """Hand a checkpoint's options to the other processes as plain Python, as they are in the file.

    On a resume, rank 0 sends what it loaded through torch.save and torch.load. fairseq has made an omegaconf tree
    of the options by then, which the allow-list does not hold; the other ranks do not read them.
    """

    def wrapper(broadcast_object):
        def broadcast_with_plain_options(obj, *args, **kwargs):
            if isinstance(obj, dict) and OmegaConf.is_config(obj.get("cfg")):
                obj = {**obj, "cfg": OmegaConf.to_container(obj["cfg"], enum_to_str=True)}
            return broadcast_object(obj, *args, **kwargs)

        return broadcast_with_plain_options

    if loads_weights_only():
        replace(distributed_utils, "broadcast_object", wrapper)
