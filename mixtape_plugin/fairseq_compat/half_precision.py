"""Training with --bf16, --fp16 and --amp: on any machine, and resumed as if it had not been interrupted."""

from __future__ import annotations

import sys

import torch
from fairseq import options
from fairseq.optim.amp_optimizer import AMPOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin
from fairseq.trainer import Trainer

from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.patching import replace


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

    replace(options, "parse_args_and_arch", wrapper)


def differentiate_attention_in_bfloat16() -> None:
    """Train in bfloat16 on a CPU without torch's flash attention, which takes seven times as long to differentiate in
    it as in float32. The switch is the whole process's: the next training in float32 puts it back."""

    def wrapper(init):
        def init_and_switch(self, cfg, *args, **kwargs):
            if not torch.cuda.is_available():
                torch.backends.cuda.enable_flash_sdp(not cfg.common.bf16)
            init(self, cfg, *args, **kwargs)

        return init_and_switch

    replace(Trainer, "__init__", wrapper)


def refuse_amp_beside_half_precision() -> None:
    """Refuse --amp with --bf16 or --fp16: the model would be of one, and the optimizer of the other.

    fairseq takes --amp with --bf16, and then has no float32 weights: each update is rounded to 8 bits.
    """

    def wrapper(init):
        def init_or_refuse(self, cfg, *args, **kwargs):
            for half in "bf16", "fp16":
                if cfg.common.amp and getattr(cfg.common, half):
                    raise UserError(f"--amp and --{half} exclude each other: --amp keeps float32 weights by itself")
            init(self, cfg, *args, **kwargs)

        return init_or_refuse

    replace(Trainer, "__init__", wrapper)


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
            copies = [weight.detach() for weight in weights(self)]
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

    replace(_FP16OptimizerMixin, "state_dict", saver)
    replace(_FP16OptimizerMixin, "load_state_dict", loader)


def keep_the_counts_of_the_loss_scale() -> None:
    """Resume an --fp16 training with what its loss scale counts: fairseq saves the scale alone, which then grew at
    other updates, so that others overflowed and were left out.
    """
    counts = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")

    def saver(state_dict):
        def state_dict_with_counts(self):
            if self.scaler is None:
                return state_dict(self)
            return {**state_dict(self), "loss_scaler": {name: getattr(self.scaler, name) for name in counts}}

        return state_dict_with_counts

    def loader(load_state_dict):
        def load_state_dict_with_counts(self, state_dict, optimizer_overrides=None):
            state_dict = dict(state_dict)
            counted = state_dict.pop("loss_scaler", {})  # none in older checkpoints
            load_state_dict(self, state_dict, optimizer_overrides)
            if self.scaler is not None:
                vars(self.scaler).update(counted)

        return load_state_dict_with_counts

    for mixin in _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin:
        replace(mixin, "state_dict", saver)
        replace(mixin, "load_state_dict", loader)


def let_amp_use_its_optimizer() -> None:
    """With --amp, divide gradients by the loss scale once, and save all that the optimizer has to save.

    fairseq unscales the gradients of torch's optimizer, and hands its own to the scaler for the step, which unscales
    those of an optimizer that it has not seen yet: once more. Adam hides that, SGD's steps are too small by the scale.
    And it saves the state of torch's optimizer, which is not all: nt_asgd has its phase, and weights of its own, and
    the scaler has its scale. Without CUDA, where the scaler is disabled, it now says that gradients are not finite.
    """

    def step(_):
        def step_of_torchs_optimizer(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()

        return step_of_torchs_optimizer

    def clipper(clip_grad_norm):
        def clip_grad_norm_or_say(self, max_norm, aggregate_norm_fn=None):
            if self.scaler.is_enabled():
                return clip_grad_norm(self, max_norm, aggregate_norm_fn)
            norm = self.fp32_optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)
            if not torch.isfinite(norm).all():
                raise FloatingPointError("gradients are Nan/Inf")
            return norm

        return clip_grad_norm_or_say

    def state_dict_with_scale(self):
        state, scale = self.fp32_optimizer.state_dict(), self.scaler.state_dict()
        return {**state, "grad_scaler": scale} if scale else state

    def load_state_dict_with_scale(self, state_dict, optimizer_overrides=None):
        state_dict = dict(state_dict)
        scale = state_dict.pop("grad_scaler", None)  # older checkpoints have none
        self.fp32_optimizer.load_state_dict(state_dict, optimizer_overrides)
        if scale:
            self.scaler.load_state_dict(scale)

    replace(AMPOptimizer, "step", step)
    replace(AMPOptimizer, "clip_grad_norm", clipper)
    replace(AMPOptimizer, "state_dict", lambda _: state_dict_with_scale)
    replace(AMPOptimizer, "load_state_dict", lambda _: load_state_dict_with_scale)
