"""SGD that turns into averaged SGD (Merity et al. 2018, algorithm 1)."""

import logging
from dataclasses import dataclass, field
from typing import List, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.tasks import FairseqTask
from omegaconf import II, DictConfig
from torch import nn

from mixtape_plugin.errors import UserError, check_values

logger = logging.getLogger(__name__)


@dataclass
class NTASGDConfig(FairseqDataclass):
    weight_decay: float = field(default=0.0, metadata={"help": "L2 penalty on all weights"})
    nonmono: int = field(
        default=5,
        metadata={"help": "n: averaging starts when validation is worse than some one more than n validations ago"},
    )
    averaging_epoch: Optional[int] = field(
        default=None,
        metadata={"help": "start averaging after this epoch, whatever validation says; 0: from the first update"},
    )
    stop_when_nonmonotone: bool = field(
        default=False,
        metadata={"help": "fine-tuning: end the training where --nonmono would start averaging, once it averages"},
    )
    lr: List[float] = II("optimization.lr")


@register_optimizer("nt_asgd", dataclass=NTASGDConfig)
class NTASGD(FairseqOptimizer):
    """torch's SGD, then torch's ASGD with t0 = 0 and λ = 0: w ← w − η g, and the average of the w.

    Averaging starts at the end of the first validated epoch with more than n earlier ones whose validation loss is
    above min(losses of all but the last n of them), n = ``--nonmono`` (NT-ASGD), or after ``--averaging-epoch``
    (ET-ASGD).

    Training moves the raw weights; :meth:`use_average` puts their average into the parameters, :meth:`use_raw` takes
    it out again. A checkpoint has the average as its model, and the raw weights among the optimizer's state.

    As torch's ASGD and so the authors' runs have it, a step's η is the learning rate of the step before, and the
    average begins with the second step.

    A parameter with fairseq's ``lr_scale`` (``--plif-lr-scale``, ``--context-scale-lr-scale``) has that many times the
    learning rate, in both phases.

    Needs ``--task bptt_language_modeling``, which says when an epoch begins and when a validation ends, and swaps the
    weights; and validation, or ``--averaging-epoch``. fairseq-train ends its loop over epochs where :attr:`finished`
    is true (:func:`~mixtape_plugin.fairseq_compat.training_loop.end_training_that_is_finished`).

    Raises:
        UserError: ``--nonmono`` below 1, ``--averaging-epoch``, ``--weight-decay`` or ``--lr`` below 0 or not finite;
            another task; ``--use-bmuf``; a training without validation and without ``--averaging-epoch`` or with
            ``--stop-when-nonmonotone``; a checkpoint of another optimizer.
    """

    def __init__(self, cfg: NTASGDConfig, params: List[nn.Parameter]):
        super().__init__(cfg)
        check_values(
            cfg,
            {
                "nonmono": (cfg.nonmono >= 1, "at least 1"),
                "averaging_epoch": (cfg.averaging_epoch is None or cfg.averaging_epoch >= 0, "0 or more, or left out"),
                "weight_decay": (cfg.weight_decay >= 0, "0 or more"),
                "lr": (min(cfg.lr) >= 0, "0 or more"),
            },
        )
        self._sgd = self._optimizer = torch.optim.SGD(params, **self.optimizer_config)
        self.history = []  # validation losses, one at the end of each validated epoch
        self.finished = False
        self._raw = None

    @property
    def optimizer_config(self) -> dict:
        return {"lr": self.cfg.lr[0], "weight_decay": self.cfg.weight_decay}

    @property
    def supports_flat_params(self) -> bool:
        return True

    @property
    def phase(self) -> str:
        """ "sgd" or "asgd"."""
        return "asgd" if isinstance(self._optimizer, torch.optim.ASGD) else "sgd"

    def check_training(self, task: FairseqTask, cfg: DictConfig) -> None:
        """Raises UserError for a training in which this would be SGD to its end."""
        if not hasattr(task, "begin_save"):
            raise UserError(
                f"--optimizer nt_asgd needs --task bptt_language_modeling, not {type(task).__name__}: "
                "use --optimizer sgd with it"
            )
        if cfg.optimization.use_bmuf:
            raise UserError("--optimizer nt_asgd does not go with --use-bmuf, which averages by itself")
        data, training = cfg.dataset, cfg.optimization
        leaving_out = None
        if data.disable_validation:
            leaving_out = "--disable-validation"
        elif 0 < training.max_epoch < data.validate_interval:
            leaving_out = f"--validate-interval {data.validate_interval} with --max-epoch {training.max_epoch}"
        elif 0 < training.max_update < data.validate_after_updates:
            leaving_out = f"--validate-after-updates {data.validate_after_updates}"
        if leaving_out and self.cfg.averaging_epoch is None:
            raise UserError(
                f"--optimizer nt_asgd starts averaging by validation, which {leaving_out} leaves out: "
                "give --averaging-epoch"
            )
        if leaving_out and self.cfg.stop_when_nonmonotone:
            raise UserError(f"--stop-when-nonmonotone ends by validation, which {leaving_out} leaves out: give one")

    def begin_epoch(self, epoch: int) -> None:
        """Starts averaging if its time has come by ``--averaging-epoch``; epochs count from 1."""
        starts = self.cfg.averaging_epoch is not None and epoch > self.cfg.averaging_epoch
        if starts and self.phase == "sgd":
            logger.info(f"epoch {epoch}: averaged SGD from here on")
            self._start_averaging()

    def end_epoch(self, valid_loss: float) -> None:
        """Takes an epoch's validation loss, in any unit, and starts averaging or ends the training if that is due."""
        n = self.cfg.nonmono
        if len(self.history) > n and valid_loss > min(self.history[:-n]):
            reason = (
                f"validation loss {valid_loss:.4f} is above the lowest of all but the last {n} epochs "
                f"({min(self.history[:-n]):.4f})"
            )
            if self.phase == "asgd" and self.cfg.stop_when_nonmonotone:
                logger.info(f"{reason}: --stop-when-nonmonotone ends the training")
                self.finished = True
            elif self.phase == "sgd" and self.cfg.averaging_epoch is None:
                logger.info(f"{reason}: averaged SGD from here on")
                self._start_averaging()
        self.history.append(valid_loss)

    def _start_averaging(self):
        kept = ("params", "lr", "weight_decay", "lr_scale")
        groups = [{name: group[name] for name in kept if name in group} for group in self.param_groups]
        self._optimizer = torch.optim.ASGD(groups, t0=0, lambd=0)
        self._sgd.param_groups = self._optimizer.param_groups  # where reduce_lr_on_plateau sets the learning rate

    @torch.no_grad()
    def use_average(self) -> bool:
        """Puts the averaged weights in place, for validation and saving; nothing before averaging.

        Returns:
            whether the parameters have changed.
        """
        if self._raw is not None or not self._optimizer.state or self.phase == "sgd":
            return False
        self._raw = [parameter.clone() for parameter in self.params]
        for parameter in self.params:
            if parameter in self._optimizer.state:
                parameter.copy_(self._optimizer.state[parameter]["ax"])
        return True

    @torch.no_grad()
    def use_raw(self) -> bool:
        """Puts the raw weights back, for training; nothing where they are in place.

        Returns:
            whether the parameters have changed.
        """
        if self._raw is None:
            return False
        for parameter, raw in zip(self.params, self._raw):
            parameter.copy_(raw)
        self._raw = None
        return True

    def state_dict(self) -> dict:
        return {
            "phase": self.phase,
            "optimizer": self._optimizer.state_dict(),
            "raw": self._raw,
            "history": self.history,
            "finished": self.finished,
        }

    def load_state_dict(self, state_dict: dict, optimizer_overrides: Optional[dict] = None) -> None:
        """Takes up a training where :meth:`state_dict` left it; the model holds the weights it held then."""
        if "phase" not in state_dict:
            raise UserError("the checkpoint has another optimizer's state, not nt_asgd's: give --reset-optimizer")
        if state_dict["phase"] == "asgd":
            self._start_averaging()
        super().load_state_dict(state_dict["optimizer"], optimizer_overrides)
        self._sgd.param_groups = self._optimizer.param_groups
        raw = state_dict["raw"]
        self._raw = raw and [weight.to(parameter) for weight, parameter in zip(raw, self.params)]
        self.history = list(state_dict["history"])
        self.finished = state_dict["finished"] and self.cfg.stop_when_nonmonotone


def find_nt_asgd(optimizer: FairseqOptimizer) -> Optional[NTASGD]:
    """The :class:`NTASGD` inside what fairseq trains with, or None for another optimizer."""
    found = getattr(optimizer, "fp32_optimizer", optimizer)
    return found if isinstance(found, NTASGD) else None


def swap_weights(optimizer: FairseqOptimizer, average: bool) -> None:
    """Puts the average, or the raw weights, into the model that fairseq trains with ``optimizer``.

    Nothing where they are in place, or with another optimizer than ``nt_asgd``.
    """
    nt_asgd = find_nt_asgd(optimizer)
    if nt_asgd is None:
        return
    swapped = nt_asgd.use_average() if average else nt_asgd.use_raw()
    if swapped and hasattr(optimizer, "_sync_fp32_params_to_fp16"):  # --fp16, --bf16: the model's weights are copies
        optimizer._sync_fp32_params_to_fp16()
