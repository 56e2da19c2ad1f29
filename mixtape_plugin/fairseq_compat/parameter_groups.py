"""Optimizers: a parameter's own weight decay and learning rate."""

from __future__ import annotations

import functools

import torch
from fairseq import optim
from fairseq.optim import FairseqOptimizer
from fairseq.optim.composite import FairseqCompositeOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.patching import replace


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

    def keeping_scales(load_state_dict):
        def load_state_dict_and_scale(self, state_dict, optimizer_overrides=None):
            load_state_dict(self, state_dict, optimizer_overrides)
            for group in self.param_groups:
                _scale_again(group, optimizer_overrides or {})

        return load_state_dict_and_scale

    def refusing(build_fp32_params):
        def build_fp32_params_or_refuse(cls, args, params, flatten=True):
            params = list(params)
            if flatten and any(_override(parameter, "lr_scale") != 1 for parameter in params):
                raise UserError(
                    "--fp16 makes all gradients one tensor, and --plif-lr-scale or --context-scale-lr-scale gives "
                    "parameters a learning rate of their own: add --fp16-no-flatten-grads, or use --bf16 or --amp"
                )
            if flatten and not torch.cuda.is_available():
                raise UserError(
                    "--fp16 makes all gradients one tensor on a GPU, and there is none: add --fp16-no-flatten-grads"
                )
            return build_fp32_params(args, params, flatten=flatten)

        return build_fp32_params_or_refuse

    replace(optim, "build_optimizer", with_groups)
    replace(FairseqOptimizer, "set_lr", scaled)
    replace(FairseqOptimizer, "load_state_dict", keeping_scales)
    original = _FP16OptimizerMixin.build_fp32_params
    _FP16OptimizerMixin.build_fp32_params = classmethod(functools.wraps(original)(refusing(original)))


def _override(parameter: torch.Tensor, name: str) -> float:
    return getattr(parameter, "optim_overrides", {}).get("optimizer", {}).get(name, 1)


def _scale_again(group: dict, optimizer_overrides: dict) -> None:
    """After a load, which brings the saved groups along, and gives one weight decay to all where it is overridden: the
    scales that the parameters ask for now."""
    for parameter in group["params"][:1]:  # all of a group ask for the same
        saved = 1 if "lr" in optimizer_overrides else group.get("lr_scale", 1)
        group["lr_scale"] = _override(parameter, "lr_scale")
        if group["lr_scale"] != saved:
            group["lr"] *= group["lr_scale"] / saved
        if "weight_decay" in optimizer_overrides:
            group["weight_decay"] *= _override(parameter, "weight_decay_scale")
    if group.get("lr_scale") == 1:
        del group["lr_scale"]


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
