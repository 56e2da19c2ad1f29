"""The loop over updates: how it ends, well or badly, and what is prepared before it saves."""

from __future__ import annotations

import logging
import math
import sys
from types import SimpleNamespace

import torch
from fairseq import checkpoint_utils
from fairseq.models.ema.ema import EMA
from fairseq.optim import FairseqBMUF
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.trainer import Trainer

from mixtape_plugin.errors import AFTER_DIVERGENCE, UserError
from mixtape_plugin.fairseq_compat.patching import replace

logger = logging.getLogger(__name__)
PATIENCE = "early_stop"


def name_the_update_that_diverged() -> None:
    """Say in one sentence at which update gradients were no numbers, or fp16's loss scale came to its end.

    fairseq then runs the update once more, to find the module, and ends by torch's StopIteration where one gives
    anything else than tensors, as a Transformer's encoder does.
    """

    def wrapper(train_step):
        def train_step_or_say(self, *args, **kwargs):
            try:
                return train_step(self, *args, **kwargs)
            except (FloatingPointError, StopIteration) as failure:
                error = failure if isinstance(failure, FloatingPointError) else failure.__context__
                if "gradients are Nan/Inf" not in str(error) and "Minimum loss scale reached" not in str(error):
                    raise
                reason = str(error).split(". ")[0].rstrip(".")
                raise UserError(f"{reason} at update {self.get_num_updates() + 1}: {AFTER_DIVERGENCE}") from error

        return train_step_or_say

    replace(Trainer, "train_step", wrapper)


def leave_out_dummy_batches() -> None:
    """Let the last update of an epoch count every batch of every process, with --update-freq.

    fairseq fills up the processes that have a batch less with empty ones, and takes all of a process's part in an
    update for empty where its last batch is: the gradient counted, what it is divided by did not. Sharded models
    communicate in each batch, and keep theirs.
    """

    def wrapper(train_step):
        def train_step_of_real_batches(self, samples, *args, **kwargs):
            real = [sample for sample in samples if sample]
            return train_step(self, real if real and not self.is_fsdp else samples, *args, **kwargs)

        return train_step_of_real_batches

    replace(Trainer, "train_step", wrapper)


def let_optimizers_and_criterions_check_the_training() -> None:
    """Call `optimizer.check_training(task, cfg)` and `criterion.check_training(cfg, model)`, where they have it,
    as soon as the optimizer is built.

    One that --memory-efficient-bf16 and -fp16 cannot wrap is refused in a sentence.
    """

    def wrapper(build_optimizer):
        def build_checked_optimizer(self):
            try:
                build_optimizer(self)
            except ValueError as error:
                if "Unsupported optimizer" not in str(error):
                    raise
                raise UserError(
                    "--memory-efficient-bf16 and --memory-efficient-fp16 do not go with "
                    f"--optimizer {self.cfg.optimizer._name}, which needs weights in float32: use --bf16 or --fp16"
                ) from error
            optimizer = self._optimizer._optimizer if isinstance(self._optimizer, FairseqBMUF) else self._optimizer
            optimizer = getattr(optimizer, "fp32_optimizer", optimizer)
            if hasattr(optimizer, "check_training"):
                optimizer.check_training(self.task, self.cfg)
            if hasattr(self.get_criterion(), "check_training"):
                self.get_criterion().check_training(self.cfg, self.get_model())

        return build_checked_optimizer

    replace(Trainer, "_build_optimizer", wrapper)


def average_tied_parameters_once() -> None:
    """Let --store-ema average a parameter of several names, such as a tied embedding, once an update.

    fairseq goes through the names, and multiplies the average by the decay for each of them.
    """

    def wrapper(step):
        def step_of_each_tensor(self, new_model, updates=None):
            averages = self.fp32_params if self.config.ema_fp32 else self.model.state_dict()
            once, seen = {}, set()
            for name, value in new_model.state_dict().items():
                average = averages.get(name)
                place = average.data_ptr() if torch.is_tensor(average) else name
                if place not in seen:
                    once[name] = value
                    seen.add(place)
            # The averages are in place by now; modules load all of their names, or refuse.
            restore = self.restore
            self.restore = lambda state, **options: restore({**self.model.state_dict(), **state}, **options)
            try:
                return step(self, SimpleNamespace(state_dict=lambda: once), updates)
            finally:
                del self.restore

        return step_of_each_tensor

    replace(EMA, "_step_internal", wrapper)


def count_updates_of_the_average() -> None:
    """Let --ema-update-freq count the updates of the training: fairseq counts those since its last start."""

    def wrapper(step):
        def step_by_updates(self, new_model, updates=None):
            if updates is not None:
                self.update_freq_counter = (updates - 1) % self.config.ema_update_freq
            return step(self, new_model, updates)

        return step_by_updates

    replace(EMA, "step", wrapper)


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


def keep_the_count_of_patience() -> None:
    """Write into checkpoints what --patience counts, and take it up from there.

    fairseq-train keeps it in attributes of a function, `best` and `num_runs` without an improvement, and forgets it
    when it ends: a training that was interrupted got up to --patience validations more, and one that had stopped
    trained on when its command was run once more. Such a run now ends at once, unless its --patience is larger.
    """

    def counter():
        # of fairseq-train, or of `python -m fairseq_cli.train`; other programs have a loop of their own
        modules = map(sys.modules.get, ("fairseq_cli.train", "__main__"))
        return next((m.should_stop_early for m in modules if hasattr(m, "should_stop_early")), None)

    def save_wrapper(save_checkpoint):
        def save_with_count(self, filename, extra_state):
            count = {PATIENCE: dict(vars(counter()))} if counter() else {}
            return save_checkpoint(self, filename, {**extra_state, **count})

        return save_with_count

    def load_wrapper(load_checkpoint):
        def load_with_count(cfg, trainer, **kwargs):
            extra_state, epochs = load_checkpoint(cfg, trainer, **kwargs)
            if counter():
                # As with fairseq's best score: another training's, with its optimizer or meters reset, does not count.
                goes_on = extra_state is not None and trainer.get_num_updates() > 0 and not cfg.reset_meters
                count = (extra_state.get(PATIENCE) if goes_on else None) or {"best": None, "num_runs": 0}
                vars(counter()).update(count)
                trainer.out_of_patience = 0 < cfg.patience <= count["num_runs"]
                if trainer.out_of_patience:
                    logger.info(
                        f"this training ended since validation had not improved for {count['num_runs']} runs; "
                        f"more than --patience {cfg.patience} goes on, and so does --reset-meters"
                    )
            return extra_state, epochs

        return load_with_count

    replace(Trainer, "save_checkpoint", save_wrapper)
    replace(checkpoint_utils, "load_checkpoint", load_wrapper)


def resume_reduce_lr_on_plateau() -> None:
    """Let a resumed training lower its learning rate where the uninterrupted one does.

    fairseq saves an epoch's end before it tells the scheduler the validation loss, and never tells it after a resume;
    nor does it save for how many epochs there was no improvement.
    """

    def saver(state_dict):
        return lambda self: {**state_dict(self), "num_bad_epochs": self.lr_scheduler.num_bad_epochs}

    def loader(load_state_dict):
        def load_with_bad_epochs(self, state):
            load_state_dict(self, state)
            self.lr_scheduler.num_bad_epochs = state.get("num_bad_epochs", 0)  # older checkpoints have none
            self.resumed = True

        return load_with_bad_epochs

    def load_wrapper(load_checkpoint):
        def load_and_tell_the_loss(cfg, trainer, **kwargs):
            extra_state, epochs = load_checkpoint(cfg, trainer, **kwargs)
            resumed = getattr(trainer.lr_scheduler, "resumed", False)
            if resumed and extra_state["train_iterator"].get("iterations_in_epoch") == 0:
                trainer.lr_step(epochs.next_epoch_idx - 1, extra_state["val_loss"])
            return extra_state, epochs

        return load_and_tell_the_loss

    replace(ReduceLROnPlateauLRSchedule, "state_dict", saver)
    replace(ReduceLROnPlateauLRSchedule, "load_state_dict", loader)
    replace(checkpoint_utils, "load_checkpoint", load_wrapper)


def end_training_that_is_finished() -> None:
    """End fairseq-train's loop over epochs where its optimizer says that it is `finished`, or --patience is spent.

    That loop asks for nothing but the learning rate, and ends where it is not above --stop-min-lr: the trainer, which
    has no other use for what these methods return, tells it minus infinity.
    """

    def wrapper(learning_rate):
        def learning_rate_or_end(self, *args, **kwargs):
            lr = learning_rate(self, *args, **kwargs)
            optimizer = getattr(self.optimizer, "fp32_optimizer", self.optimizer)
            finished = getattr(optimizer, "finished", False) or getattr(self, "out_of_patience", False)
            return -math.inf if finished else lr

        return learning_rate_or_end

    replace(Trainer, "get_lr", wrapper)
    replace(Trainer, "lr_step", wrapper)
