"""Every repair of the installed fairseq, each with its reason; each does nothing where it is not needed.

:func:`mixtape_plugin.register` calls :func:`apply` first. Warnings printed before that cannot be silenced.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import pickle
import re
import sys
import types
import warnings

import numpy as np
import torch
from fairseq import checkpoint_utils, optim, options
from fairseq.data import Dictionary, data_utils, indexed_dataset, language_pair_dataset, token_block_dataset
from fairseq.distributed import utils as distributed_utils
from fairseq.modules import dynamic_crf_layer
from fairseq.optim import FairseqOptimizer
from fairseq.optim.composite import FairseqCompositeOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin
from fairseq.tasks import translation
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from mixtape_plugin.damaged_files import (
    check_dataset,
    check_weights,
    damaged_dictionary,
    explain_misfit,
    explain_resume,
    unreadable_checkpoint,
)
from mixtape_plugin.errors import AFTER_DIVERGENCE, UserError

TRUST_CHECKPOINTS = "MIXTAPE_TRUST_CHECKPOINTS"


def apply() -> None:
    """Make every repair that the installed fairseq needs; calling it again changes nothing."""
    if getattr(apply, "done", False):
        return
    apply.done = True
    silence_known_deprecations()
    provide_removed_numpy_names()
    keep_last_batch()
    load_checkpoints_safely()
    explain_checkpoints_that_do_not_fit()
    broadcast_plain_options()
    refuse_broken_data()
    train_bf16_without_xla()
    name_the_update_that_diverged()
    keep_float32_weights_in_checkpoints()
    heed_optim_overrides()
    prepare_every_process_for_a_checkpoint()
    end_training_that_is_finished()


def _replace(owner, name: str, make_wrapper) -> None:
    """Set `owner.name` to `make_wrapper(original)`, keeping the original's name and docstring."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make_wrapper(original)))


# ----------------------------------------------------------------------------------------------- checkpoints


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


# Measured: what checkpoints written by fairseq-train and fairseq-hydra-train hold beside tensors and plain Python.
# The allow-list is a matter of what a *constructor or state* can do, for the file chooses the arguments. None of
# these runs code, imports, looks up an attribute or reads a file.
SAFE_GLOBALS = [
    argparse.Namespace,  # the model's options ("cfg.model"), and all options in older checkpoints ("args")
    distributed_utils._TensorPlaceholder,  # rank 0 hands a checkpoint to the other ranks through torch.save
    (_CheckpointArray, "numpy.ndarray"),  # n-gram counts among the meters of --eval-bleu
    (_CheckpointDtype, "numpy.dtype"),
    (_reconstruct_array, "numpy._core.multiarray._reconstruct"),
    (_reconstruct_array, "numpy.core.multiarray._reconstruct"),  # the same, written with numpy 1
]


def loads_weights_only() -> bool:
    """Whether torch.load takes tensors and an allow-list by default (torch 2.6), and never runs a pickle."""
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2]) >= (2, 6)


def load_checkpoints_safely() -> None:
    """Load checkpoints by allow-list, and say in one sentence why one is refused.

    torch 2.6 and later load with weights_only=True, but fairseq's own checkpoints hold a few more classes
    (`SAFE_GLOBALS`). Older torch runs any pickle: there a checkpoint is loaded only for a user who sets
    MIXTAPE_TRUST_CHECKPOINTS=1. The allow-list guards the reading of the file, not what fairseq then does with the
    options in it: `fconv`, say, and the character embeddings of `transformer_lm` evaluate some as Python.
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
                raise unreadable_checkpoint(path) from error
            check_weights(path, state)
            return state

        return load_or_explain

    for name in ("load_checkpoint_to_cpu", "load_ema_from_checkpoint"):
        if hasattr(checkpoint_utils, name):
            _replace(checkpoint_utils, name, explain_refusal)


def explain_checkpoints_that_do_not_fit() -> None:
    """Name the checkpoint, and what differs, where it does not fit the model or the training.

    fairseq asks to "ensure that the architectures match", at the end of two tracebacks.
    """

    def resume(load_checkpoint):
        def resume_or_explain(self, filename, *args, **kwargs):
            try:
                return load_checkpoint(self, filename, *args, **kwargs)
            except Exception as error:
                explain_resume(filename, error)
                raise

        return resume_or_explain

    def evaluate(load_model_ensemble_and_task):
        def load_or_explain(filenames, *args, **kwargs):
            try:
                return load_model_ensemble_and_task(filenames, *args, **kwargs)
            except Exception as error:
                explain_misfit(" or ".join(filenames), error)
                raise

        return load_or_explain

    _replace(Trainer, "load_checkpoint", resume)
    _replace(checkpoint_utils, "load_model_ensemble_and_task", evaluate)


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
        _replace(distributed_utils, "broadcast_object", wrapper)


# ------------------------------------------------------------------------------------------------------ data


class _NumpyWithRemovedNames(types.ModuleType):
    """numpy, plus the names in its `__dict__`."""

    def __getattr__(self, name):
        return getattr(np, name)


def provide_removed_numpy_names() -> None:
    """Give np.int, np.float (gone since numpy 1.24) and np.compat.long (since 2.0) to the modules that use them.

    Only those modules see them: other libraries ask numpy itself what it has.
    """
    removed = {"int": int, "float": float, "compat": types.SimpleNamespace(long=int)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy 1.20 to 1.23 warn about np.int when asked for it
        missing = {name: value for name, value in removed.items() if not hasattr(np, name)}
    if not missing:
        return
    numpy = _NumpyWithRemovedNames("numpy")
    vars(numpy).update(missing)
    for module in (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer):
        module.np = numpy


def keep_last_batch() -> None:
    """Batch every sentence: fairseq-fixed drops the last batch unless its size divides by bsz_mult.

    Batches are consecutive pieces of `indices`, so what is missing is the end of it: one batch, which obeyed the
    limits on tokens and sentences when it was made.
    """
    five = np.arange(5)
    if len(data_utils.batch_by_size(five, None, np.ones_like(five), required_batch_size_multiple=8)) == 1:
        return

    def wrapper(batch_by_size):
        def batch_all_by_size(indices, *args, **kwargs):
            if not isinstance(indices, np.ndarray):
                indices = np.fromiter(indices, dtype=np.int64, count=-1)
            if len(indices) == 0:
                return []
            batches = batch_by_size(indices, *args, **kwargs)
            batched = sum(len(batch) for batch in batches)
            return batches if batched == len(indices) else list(batches) + [indices[batched:]]

        return batch_all_by_size

    _replace(data_utils, "batch_by_size", wrapper)


def refuse_broken_data() -> None:
    """Name the file and the way out where binarized data or a dictionary is damaged or missing.

    fairseq reads garbage or ends in a traceback of numpy.
    """

    def check_dataset_first(make_dataset):
        def make_checked_dataset(path, impl, fix_lua_indexing=False, dictionary=None):
            check_dataset(path, impl, dictionary)
            return make_dataset(path, impl, fix_lua_indexing, dictionary)

        return make_checked_dataset

    def check_dictionary(add_from_file):
        def add_from_existing_file(self, f):
            if isinstance(f, str) and not os.path.exists(f):
                raise UserError(f"dictionary {f} does not exist: give the folder that fairseq-preprocess wrote")
            try:
                return add_from_file(self, f)
            except Exception as error:
                if not isinstance(f, str):  # fairseq opens the file and calls this again
                    raise
                raise damaged_dictionary(f, error) from error

        return add_from_existing_file

    def check_folder(infer_language_pair):
        def infer_from_existing_folder(path):
            if not os.path.isdir(path):
                raise UserError(f"data folder {path} does not exist: give the one that fairseq-preprocess wrote")
            return infer_language_pair(path)

        return infer_from_existing_folder

    def check_target(load_langpair_dataset):
        def load_with_target(data_path, split, src, src_dict, tgt, *args, **kwargs):
            dataset = load_langpair_dataset(data_path, split, src, src_dict, tgt, *args, **kwargs)
            if dataset.tgt is None and kwargs.get("combine"):  # only training combines the shards of a split
                pair = (
                    f"{src}-{tgt}" if os.path.exists(f"{data_path}/{split}.{src}-{tgt}.{src}.idx") else f"{tgt}-{src}"
                )
                raise UserError(f"{data_path} lacks {split}.{pair}.{tgt}.bin or .idx: run fairseq-preprocess again")
            return dataset

        return load_with_target

    _replace(indexed_dataset, "make_dataset", check_dataset_first)
    _replace(translation, "load_langpair_dataset", check_target)
    _replace(Dictionary, "add_from_file", check_dictionary)
    _replace(data_utils, "infer_language_pair", check_folder)


def train_bf16_without_xla() -> None:
    """Let --bf16 run on CPU and GPU: fairseq takes it for --tpu, and fails where torch_xla is not installed."""
    try:
        import torch_xla  # noqa: F401
    except ImportError:
        pass
    else:
        return

    def wrapper(parse_args_and_arch):
        def parse_bf16_without_tpu(parser, input_args=None, *args, **kwargs):
            parsed = parse_args_and_arch(parser, input_args, *args, **kwargs)
            namespace = parsed[0] if isinstance(parsed, tuple) else parsed
            if getattr(namespace, "bf16", False) and "--tpu" not in (sys.argv if input_args is None else input_args):
                namespace.tpu = False
            return parsed

        return parse_bf16_without_tpu

    _replace(options, "parse_args_and_arch", wrapper)


# --------------------------------------------------------------------------------------- what the user reads


def name_the_update_that_diverged() -> None:
    """Say in one sentence at which update gradients were no numbers, or fp16's loss scale came to its end."""

    def wrapper(train_step):
        def train_step_or_say(self, *args, **kwargs):
            try:
                return train_step(self, *args, **kwargs)
            except FloatingPointError as error:
                if "gradients are Nan/Inf" not in str(error) and "Minimum loss scale reached" not in str(error):
                    raise
                reason = str(error).split(". ")[0].rstrip(".")
                raise UserError(f"{reason} at update {self.get_num_updates() + 1}: {AFTER_DIVERGENCE}") from error

        return train_step_or_say

    _replace(Trainer, "train_step", wrapper)


def keep_float32_weights_in_checkpoints() -> None:
    """Resume a training in half precision with the float32 weights it had.

    With --fp16 and --bf16 the optimizer works on float32 copies, but only the rounded weights are saved, so that a
    resumed training is another one: a weight in bfloat16 has 8 bits. The copies go into the optimizer's state.
    """

    def weights(optimizer):
        copies = optimizer.fp32_params
        return list(copies.values()) if isinstance(copies, dict) else list(copies)

    def saver(state_dict):
        def state_dict_with_weights(self):
            copies = [weight.detach().clone() for weight in weights(self)]
            return {**state_dict(self), "float32_weights": copies}

        return state_dict_with_weights

    def loader(load_state_dict):
        @torch.no_grad()
        def load_state_dict_with_weights(self, state_dict, optimizer_overrides=None):
            copies = state_dict.get("float32_weights", ())  # none in older checkpoints
            state_dict = {name: value for name, value in state_dict.items() if name != "float32_weights"}
            load_state_dict(self, state_dict, optimizer_overrides)
            for weight, copy in zip(weights(self), copies):
                weight.copy_(copy)

        return load_state_dict_with_weights

    _replace(_FP16OptimizerMixin, "state_dict", saver)
    _replace(_FP16OptimizerMixin, "load_state_dict", loader)


def heed_optim_overrides() -> None:
    """Let every optimizer heed a parameter's own `optim_overrides = {"optimizer": {"weight_decay_scale": …,
    "lr_scale": …}}`.

    fairseq's composite optimizer alone does. Gradients that fairseq flattens for --fp16 on a GPU are one parameter,
    and keep one weight decay; a learning rate of its own is refused there.
    """

    def with_groups(build_optimizer):
        def build_optimizer_with_groups(*args, **kwargs):
            optimizer = build_optimizer(*args, **kwargs)
            if not isinstance(optimizer, FairseqCompositeOptimizer):
                _split_by_override(optimizer.optimizer)
            return optimizer

        return build_optimizer_with_groups

    def scaled(set_lr):
        def set_scaled_lr(self, lr):
            set_lr(self, lr)
            for group in self.param_groups:
                if "lr_scale" in group:
                    group["lr"] *= group["lr_scale"]

        return set_scaled_lr

    def refusing(build_fp32_params):
        def build_fp32_params_or_refuse(cls, args, params, flatten=True):
            params = list(params)
            if flatten and any(_override(parameter, "lr_scale") != 1 for parameter in params):
                raise UserError(
                    "--fp16 makes all gradients one tensor, and --plif-lr-scale gives the slopes of plif a learning "
                    "rate of their own: add --fp16-no-flatten-grads, or use --bf16 or --amp"
                )
            return build_fp32_params(args, params, flatten=flatten)

        return build_fp32_params_or_refuse

    _replace(optim, "build_optimizer", with_groups)
    _replace(FairseqOptimizer, "set_lr", scaled)
    original = _FP16OptimizerMixin.build_fp32_params
    _FP16OptimizerMixin.build_fp32_params = classmethod(functools.wraps(original)(refusing(original)))


def _override(parameter: torch.Tensor, name: str) -> float:
    return getattr(parameter, "optim_overrides", {}).get("optimizer", {}).get(name, 1)


def _split_by_override(optimizer: torch.optim.Optimizer) -> None:
    """Move parameters with a `weight_decay_scale` or `lr_scale` into parameter groups of their own, after the others:
    the learning rate of the first group is the one that fairseq asks for."""
    for group in list(optimizer.param_groups):
        scales = {}
        for parameter in group["params"]:
            decay_scale = _override(parameter, "weight_decay_scale") if "weight_decay" in group else 1
            scales.setdefault((decay_scale, _override(parameter, "lr_scale")), []).append(parameter)
        if scales.keys() <= {(1, 1)}:
            continue
        group["params"] = scales.pop((1, 1), [])
        for (decay_scale, lr_scale), parameters in scales.items():
            own = {**group, "params": parameters}
            if decay_scale != 1:
                own["weight_decay"] = decay_scale * group["weight_decay"]
            if lr_scale != 1:
                own.update(lr=lr_scale * group["lr"], lr_scale=lr_scale)
            optimizer.add_param_group(own)


def prepare_every_process_for_a_checkpoint() -> None:
    """Call `task.begin_save(model, optimizer)`, where a task has it, on every process before one of them saves.

    fairseq asks a task for what it wants to save on the saving process alone, where nothing can be collected.
    """

    def wrapper(save_checkpoint):
        def save_prepared_checkpoint(cfg, trainer, *args, **kwargs):
            if hasattr(trainer.task, "begin_save") and not cfg.no_save:
                trainer.task.begin_save(trainer.get_model(), trainer.optimizer)
            return save_checkpoint(cfg, trainer, *args, **kwargs)

        return save_prepared_checkpoint

    _replace(checkpoint_utils, "save_checkpoint", wrapper)


def end_training_that_is_finished() -> None:
    """End fairseq-train's loop over epochs where its optimizer says that it is `finished`.

    That loop asks for nothing but the learning rate, and ends where it is not above --stop-min-lr: the trainer, which
    has no other use for what these methods return, tells it minus infinity.
    """

    def wrapper(learning_rate):
        def learning_rate_or_end(self, *args, **kwargs):
            lr = learning_rate(self, *args, **kwargs)
            optimizer = getattr(self.optimizer, "fp32_optimizer", self.optimizer)
            return -math.inf if getattr(optimizer, "finished", False) else lr

        return learning_rate_or_end

    _replace(Trainer, "get_lr", wrapper)
    _replace(Trainer, "lr_step", wrapper)


# (beginning of the message as a regular expression, category); each was seen in a log of fairseq-train or -generate.
KNOWN_DEPRECATIONS = [
    (r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental", UserWarning),
    (r"\nThe version_base parameter is not specified", UserWarning),
    (r"In '.*': Usage of deprecated keyword in package header", UserWarning),
    (r"\n'config' is validated against ConfigStore schema with the same name", UserWarning),
    (r"\nThe strict flag in the compose API is deprecated", UserWarning),
    (r"'pin_memory' argument is set as true but no accelerator is found", UserWarning),
    (r"`torch\.cuda\.amp\.autocast\(args\.\.\.\)` is deprecated", FutureWarning),
    (r"`torch\.cuda\.amp\.GradScaler\(args\.\.\.\)` is deprecated", FutureWarning),
    (r"Support for mismatched key_padding_mask and attn_mask is deprecated", UserWarning),
]


def silence_known_deprecations() -> None:
    """Silence, by name, the deprecations that fairseq meets in newer hydra and torch: they fill every log."""
    for message, category in KNOWN_DEPRECATIONS:
        warnings.filterwarnings("ignore", message=message, category=category)
