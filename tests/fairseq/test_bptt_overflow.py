"""Language models whose loss or gradient is not finite: one sentence, and the last good checkpoint survives."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import run
from recipes import files
from test_training import assert_same_parameters
from toy_text import NO_DROPOUT, lm_args, toy_text, trained_on_toy_text  # noqa: F401

from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.language_model import load_language_model
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingTask


@pytest.fixture
def no_loss_scale(monkeypatch):
    """--amp as it is without CUDA, on machines that have it, too."""
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda **options: torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--amp"]])
def test_loss_that_is_not_finite_keeps_the_last_checkpoint(flags, text, tmp_path, no_loss_scale):
    run("train", *lm_args(text, tmp_path, "--max-epoch", 1, *flags))
    last = tmp_path / "checkpoint_last.pt"
    before = last.read_bytes()
    state = torch.load(last, weights_only=True)
    updates = state["optimizer_history"][-1]["num_updates"]
    state["model"]["decoder.output_projection.bias"][5] = math.inf
    torch.save(state, tmp_path / "poisoned.pt")
    more = ["--restore-file", tmp_path / "poisoned.pt", "--max-epoch", 2, *flags]
    with pytest.raises(UserError, match=rf"the loss is nan at update {updates + 1} \(epoch 2\)"):
        run("train", *lm_args(text, tmp_path, *more))
    assert last.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("save", [[], ["--save-interval-updates", 1]])
def test_validation_loss_that_is_not_finite_keeps_the_last_checkpoint(save, text, tmp_path):
    """Weights that a finite gradient has thrown away: the training loss before it was fine."""
    whole_epochs = "--tokens-per-sample 500 --segment-length-std 0 --short-segment-probability 0".split()
    run("train", *lm_args(text, tmp_path, *whole_epochs, "--max-epoch", 1))
    before = files(tmp_path)
    more = ["--lr", 1e38, "--reset-optimizer", "--reset-lr-scheduler", "--max-epoch", 3]
    with pytest.raises(UserError, match=r"the validation loss is (nan|inf) in epoch 2: lower --lr"):
        run("train", *lm_args(text, tmp_path, *whole_epochs, *more, *save))
    assert files(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--amp"]])
def test_gradients_that_are_not_finite_are_one_sentence(flags, text, tmp_path, monkeypatch, no_loss_scale):
    train_step = BpttLanguageModelingTask.train_step

    def poison(task, sample, model, criterion, optimizer, update_num, *args, **kwargs):
        result = train_step(task, sample, model, criterion, optimizer, update_num, *args, **kwargs)
        if update_num == 3:
            next(model.parameters()).grad.fill_(math.nan)
        return result

    monkeypatch.setattr(BpttLanguageModelingTask, "train_step", poison)
    with pytest.raises(UserError, match="^gradients are Nan/Inf at update 4: lower --lr"):
        run("train", *lm_args(text, tmp_path, "--max-epoch", 1, "--save-interval-updates", 2, *flags))
    assert (tmp_path / "checkpoint_1_2.pt").exists()


@pytest.mark.slow
def test_a_loss_that_overflows_is_left_to_the_loss_scale(text, tmp_path, monkeypatch, enabled_loss_scale):
    """--amp, enabled as on a GPU, tries the update again with a smaller scale and the hidden state that it had."""
    more = [*NO_DROPOUT, *"--amp --max-epoch 1 --update-freq 2 --seed 3".split()]
    expected = run("train", *lm_args(text, tmp_path / "smooth", *more)).log["train_inner"]
    train_step, skipped = BpttLanguageModelingTask.train_step, []

    def overflow(task, sample, model, criterion, optimizer, update_num, *args, **kwargs):
        if update_num == 3 and not skipped:
            skipped.append(optimizer.scaler.get_scale())
            criterion.register_forward_hook(lambda _, __, output: (output[0] * math.inf, *output[1:]))
        elif skipped:
            criterion._forward_hooks.clear()
        return train_step(task, sample, model, criterion, optimizer, update_num, *args, **kwargs)

    monkeypatch.setattr(BpttLanguageModelingTask, "train_step", overflow)
    log = run("train", *lm_args(text, tmp_path / "overflow", *more)).log["train_inner"]
    assert skipped and float(log[-1]["loss_scale"]) == skipped[0] / 2
    assert [line["num_updates"] for line in log] == [line["num_updates"] for line in expected]
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("smooth", "overflow")]
    assert_same_parameters(*paths, rtol=0, atol=0)


@pytest.mark.slow
def test_an_update_given_up_in_an_epochs_first_segment_leaves_no_state(text, trained):
    """--fp16 goes on with the segment after it, whose hidden state is not that of the epoch before."""
    model, task = load_language_model(str(trained[0]), str(text))
    task.epoch, model.decoder.states = 2, {"train": "of the epoch before"}

    def overflow(model, sample):
        model.decoder.states["train"] = "of the segment"
        return torch.tensor(math.inf), 1, {}

    optimizer = SimpleNamespace(scaler=object(), backward=lambda loss: None)
    sample = {"net_input": {"first_segment": True}, "segment": 0, "lr_scale": 1, "last_segment": False, "nsentences": 4}
    task.train_step(sample, model, overflow, optimizer, 9)
    assert model.decoder.states == {}
