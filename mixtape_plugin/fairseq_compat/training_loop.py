"""The loop over updates: how it ends, well or badly, and what is prepared before it saves."""

from __future__ import annotations

import math

from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

from mixtape_plugin.errors import AFTER_DIVERGENCE, UserError
from mixtape_plugin.fairseq_compat.patching import replace


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

    replace(Trainer, "train_step", wrapper)


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

    replace(checkpoint_utils, "save_checkpoint", wrapper)


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

    replace(Trainer, "get_lr", wrapper)
    replace(Trainer, "lr_step", wrapper)
