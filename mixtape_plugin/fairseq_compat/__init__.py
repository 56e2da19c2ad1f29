"""Every repair of the installed fairseq, each with its reason.

What only some releases have broken is looked at first; the other repairs are for fairseq 0.12, the last one.

:func:`mixtape_plugin.register` calls :func:`apply` first. Warnings printed before that cannot be silenced.
"""

from __future__ import annotations

from mixtape_plugin.fairseq_compat.checkpoints import (
    broadcast_plain_options,
    copy_checkpoints_whole,
    explain_checkpoints_that_do_not_fit,
    load_checkpoints_safely,
    say_which_checkpoint_is_not_written,
    unpack_archives_into_their_folder,
)
from mixtape_plugin.fairseq_compat.command_line import (
    ask_for_the_task_of_a_language_model,
    ask_for_the_task_of_a_validation,
    refuse_language_models_that_mask_what_a_search_needs,
    refuse_models_of_another_kind,
    refuse_options_that_no_model_has,
)
from mixtape_plugin.fairseq_compat.data import (
    end_reading_before_the_interpreter,
    keep_batches_after_a_resume,
    keep_last_batch,
    provide_removed_numpy_names,
    refuse_blocks_that_would_be_skipped,
    refuse_broken_data,
    shuffle_after_the_curriculum,
)
from mixtape_plugin.fairseq_compat.half_precision import (
    differentiate_attention_in_bfloat16,
    keep_float32_weights_in_checkpoints,
    keep_the_counts_of_the_loss_scale,
    let_amp_use_its_optimizer,
    refuse_amp_beside_half_precision,
    train_bf16_without_xla,
)
from mixtape_plugin.fairseq_compat.options_as_python import evaluate_values_only
from mixtape_plugin.fairseq_compat.parameter_groups import heed_optim_overrides
from mixtape_plugin.fairseq_compat.training_loop import (
    average_tied_parameters_once,
    count_updates_of_the_average,
    end_training_that_is_finished,
    keep_the_count_of_patience,
    leave_out_dummy_batches,
    let_optimizers_and_criterions_check_the_training,
    name_the_update_that_diverged,
    prepare_every_process_for_a_checkpoint,
    resume_reduce_lr_on_plateau,
)
from mixtape_plugin.fairseq_compat.warning_filters import silence_known_deprecations


def apply() -> None:
    """Make every repair that the installed fairseq needs; calling it again changes nothing.

    Raises:
        ImportError: it failed before, and some functions of fairseq are replaced already.
    """
    if getattr(apply, "failed", None):
        raise ImportError("this fairseq could not be repaired: mend it and start Python anew") from apply.failed
    if getattr(apply, "done", False):
        return
    apply.done = True
    try:
        repair()
    except Exception as error:
        apply.failed = error
        raise


def repair() -> None:
    silence_known_deprecations()
    provide_removed_numpy_names()
    keep_last_batch()
    keep_batches_after_a_resume()
    shuffle_after_the_curriculum()
    end_reading_before_the_interpreter()
    load_checkpoints_safely()
    unpack_archives_into_their_folder()
    evaluate_values_only()
    explain_checkpoints_that_do_not_fit()
    broadcast_plain_options()
    copy_checkpoints_whole()
    say_which_checkpoint_is_not_written()
    refuse_broken_data()
    refuse_blocks_that_would_be_skipped()
    train_bf16_without_xla()
    differentiate_attention_in_bfloat16()
    refuse_amp_beside_half_precision()
    ask_for_the_task_of_a_language_model()
    ask_for_the_task_of_a_validation()
    refuse_language_models_that_mask_what_a_search_needs()
    refuse_options_that_no_model_has()
    refuse_models_of_another_kind()
    name_the_update_that_diverged()
    keep_float32_weights_in_checkpoints()
    keep_the_counts_of_the_loss_scale()
    let_amp_use_its_optimizer()
    heed_optim_overrides()
    leave_out_dummy_batches()
    average_tied_parameters_once()
    count_updates_of_the_average()
    let_optimizers_and_criterions_check_the_training()
    prepare_every_process_for_a_checkpoint()
    keep_the_count_of_patience()
    resume_reduce_lr_on_plateau()
    end_training_that_is_finished()
