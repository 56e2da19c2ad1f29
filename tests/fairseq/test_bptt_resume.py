"""Trainings of language models that go on from a checkpoint, and those that go on to another phase."""

import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import make_dictionary, parse_log, run, start
from recipes import files
from test_training import KILLED_BEFORE_UPDATE_6, assert_same_parameters, loss_curve
from toy_text import lm_args, toy_text, trained_on_toy_text  # noqa: F401

from mixtape_plugin.errors import UserError
from mixtape_plugin.optim.nt_asgd import NTASGD
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingConfig, BpttLanguageModelingTask

# The history of the toy training does not matter here: the trigger is forced by its epoch, or by validation.
RESUMES = {
    "sgd": ["--nonmono", 5],
    "asgd": ["--averaging-epoch", 0],
    "trigger": ["--averaging-epoch", 1],
    "trigger with --amp": ["--averaging-epoch", 1, "--amp"],
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", RESUMES)
def test_resume_after_a_kill_in_mid_epoch_equals_an_uninterrupted_run(phase, text, tmp_path):
    """Killed after update 5, the last checkpoint being that of update 4: the hidden state is carried over."""
    more = [*RESUMES[phase], "--save-interval-updates", 4, "--max-epoch", 3, "--seed", 3, "--small-batch-size", 3]
    more += ["--context-dropout", 0.2, "--locked-context-dropout", "--gate-noise", 0.1]
    process = start(sys.executable, "-c", KILLED_BEFORE_UPDATE_6, *lm_args(text, tmp_path / "killed", *more))
    uninterrupted = run("train", *lm_args(text, tmp_path / "whole", *more)).log
    stdout, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr
    resumed = run("train", *lm_args(text, tmp_path / "killed", *more)).log
    assert min(loss_curve(resumed)) == 5
    assert loss_curve(parse_log(stdout), resumed) == loss_curve(uninterrupted)
    assert resumed["valid"][-1]["valid_loss"] == uninterrupted["valid"][-1]["valid_loss"]
    check_same_checkpoints(tmp_path / "whole", tmp_path / "killed", phase)


def test_a_resume_in_mid_epoch_by_another_number_of_processes_is_refused():
    task = BpttLanguageModelingTask(BpttLanguageModelingConfig(), make_dictionary())
    task.set_checkpoint_dict({"hidden_states": [], "walk": {}})  # of an epoch's end
    with pytest.raises(UserError, match="in the middle of an epoch by 2 processes, and cannot be resumed by 1: "):
        task.set_checkpoint_dict({"hidden_states": [{}, {}], "walk": {}})


def test_a_mid_epoch_checkpoint_of_an_older_version_is_taken():
    """It does not say which segments it has walked through."""
    task = BpttLanguageModelingTask(BpttLanguageModelingConfig(), make_dictionary())
    task.walk = {"seed": 3}
    states = {"train": [(torch.ones(2, 3), torch.zeros(2, 3))]}
    task.set_checkpoint_dict({"hidden_states": [states]})
    assert task.restored_states is states


def test_a_resume_in_mid_epoch_may_have_another_number_format():
    """The states that were saved are taken in that of the model."""
    task = BpttLanguageModelingTask(BpttLanguageModelingConfig(), make_dictionary())
    states = {"train": [(torch.rand(2, 3), torch.rand(2, 3))]}
    task.set_checkpoint_dict({"hidden_states": [states]})
    model = torch.nn.Linear(1, 1).bfloat16()
    model.decoder = SimpleNamespace(states={})
    task.begin_epoch(1, model)
    (found,) = model.decoder.states["train"]
    for part, saved in zip(found, states["train"][0]):
        assert torch.equal(part, saved.bfloat16()) and part.dtype == torch.bfloat16


WALK = {
    "--batch-size": 5,
    "--small-batch-size": 3,
    "--seed": 4,
    "--tokens-per-sample": 30,
    "--segment-length-std": 4.0,
    "--short-segment-probability": 0.5,
    "--min-segment-length": 6,
    "--max-segment-length": 40,
}


@pytest.mark.slow
def test_a_resume_in_mid_epoch_at_another_place_of_the_text_is_refused(text, tmp_path):
    run("train", *lm_args(text, tmp_path, "--max-update", 6, "--seed", 3))
    before = files(tmp_path)
    for option, value in WALK.items():
        with pytest.raises(
            UserError, match=f"in the middle of an epoch with {option} .*, and cannot be resumed with {value}:"
        ):
            run("train", *lm_args(text, tmp_path, "--max-update", 9, "--seed", 3, option, value))
    assert files(tmp_path) == before


@pytest.mark.slow
def test_a_resume_at_an_epochs_end_may_have_other_batches(text, tmp_path):
    """As the error message of one in mid-epoch advises."""
    run("train", *lm_args(text, tmp_path, "--max-epoch", 1, "--seed", 3))
    log = run("train", *lm_args(text, tmp_path, "--max-epoch", 2, "--seed", 3, "--batch-size", 5)).log
    assert min(loss_curve(log)) > 1 and log["valid"][-1]["epoch"] == 2


def check_same_checkpoints(whole, resumed, phase):
    paths = [folder / "checkpoint_last.pt" for folder in (whole, resumed)]
    whole, again = (torch.load(path, weights_only=True) for path in paths)
    assert_same_parameters(*paths, rtol=0, atol=0)
    state, other = whole["last_optimizer_state"], again["last_optimizer_state"]
    assert state["phase"] == other["phase"] == ("sgd" if phase == "sgd" else "asgd")
    assert state["history"] == other["history"]
    if phase != "sgd":
        assert all(torch.equal(raw, other_raw) for raw, other_raw in zip(state["raw"], other["raw"]))
        first = whole["model"]["decoder.embed_tokens.weight"]
        assert not torch.equal(first, state["raw"][0]), "the model holds the average, not the raw weights"


def let_validations_get_worse(patch):
    """Each worse than the one before: the trigger fires as soon as it may."""
    end_epoch = NTASGD.end_epoch
    patch.setattr(NTASGD, "end_epoch", lambda optimizer, loss: end_epoch(optimizer, len(optimizer.history) + loss * 0))


TRIGGERED = ["--nonmono", 1, "--seed", 3, "--batch-size", 8]


@pytest.fixture(scope="module")
def trained_whole(text, tmp_path_factory):
    """Five epochs, the third of which triggers averaging: the folder of their checkpoints and the log."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        let_validations_get_worse(patch)
        log = run("train", *lm_args(text, folder, *TRIGGERED, "--max-epoch", 5)).log
    return folder, log


@pytest.mark.parametrize("last", [2, 3, 4])
def test_resume_at_an_epochs_end_equals_an_uninterrupted_run(last, text, trained_whole, tmp_path, monkeypatch):
    """Before, at and after the epoch whose validation triggers averaging."""
    whole, uninterrupted = trained_whole
    let_validations_get_worse(monkeypatch)
    # A training that ended with epoch `last` left this, and no more: the later ones are not looked at.
    shutil.copy(whole / f"checkpoint{last}.pt", tmp_path / "checkpoint_last.pt")
    phase = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["last_optimizer_state"]["phase"]
    assert phase == ("sgd" if last < 3 else "asgd")
    resumed = run("train", *lm_args(text, tmp_path, *TRIGGERED, "--max-epoch", 5)).log
    curve = loss_curve(uninterrupted)
    assert loss_curve(resumed) == {update: curve[update] for update in loss_curve(resumed)}
    assert len(resumed["valid"]) == 5 - last
    check_same_checkpoints(whole, tmp_path, "asgd")


@pytest.mark.slow
def test_fine_tuning_ends_by_itself(text, trained, tmp_path, monkeypatch):
    let_validations_get_worse(monkeypatch)
    path, _ = trained
    more = ["--finetune-from-model", path, "--averaging-epoch", 0, "--stop-when-nonmonotone", "--nonmono", 2]
    log = run("train", *lm_args(text, tmp_path, *more, "--max-epoch", 9, "--no-epoch-checkpoints")).log
    assert len(log["valid"]) == 4
    log = run("train", *lm_args(text, tmp_path, *more, "--max-epoch", 9)).log
    assert "train_inner" not in log, "started again it has nothing to do"


@pytest.mark.slow
def test_a_learning_rate_by_validation_reaches_averaged_sgd(text, tmp_path):
    """--lr-scheduler reduce_lr_on_plateau lowers it after every second epoch here, also of a training that is resumed
    after each, and in mid-epoch."""
    plateau = "--lr-scheduler reduce_lr_on_plateau --lr-patience 1 --lr-threshold 0.9 --lr-shrink 0.5".split()
    more = [*plateau, "--averaging-epoch", 1, "--seed", 3]

    def rates(folder, *ends):
        logs = [run("train", *lm_args(text, tmp_path / folder, *more, *end)).log for end in ends]
        return [(line["epoch"], line["train_lr"]) for log in logs for line in log["train"]]

    expected = [(1, "5"), (2, "5"), (3, "5"), (4, "2.5"), (5, "2.5"), (6, "1.25"), (7, "1.25")]
    assert rates("whole", ["--max-epoch", 7]) == expected
    ends = [["--max-epoch", epoch] for epoch in (1, 2, 3, 4, 5)]
    assert rates("resumed", *ends, ["--max-update", 75], ["--max-epoch", 7]) == [*expected[:6], *expected[5:]]


@pytest.mark.slow
@pytest.mark.parametrize("epoch, averages", [(0, True), (1, False)])
def test_averaging_from_the_start_begins_in_mid_epoch_after_another_optimizer(epoch, averages, text, tmp_path):
    """A checkpoint of Adam within epoch 1: with --averaging-epoch 0 each later update is averaged."""
    adam = ["--optimizer", "adam", "--lr", 0.01, "--max-update", 4]
    run("train", *lm_args(text, tmp_path / "adam", *adam, "--seed", 3))
    before = ["--restore-file", tmp_path / "adam" / "checkpoint_last.pt", "--reset-optimizer"]
    more = [*before, "--averaging-epoch", epoch, "--max-update", 7, "--seed", 3]
    run("train", *lm_args(text, tmp_path / "asgd", *more))
    checkpoint = torch.load(tmp_path / "asgd" / "checkpoint_last.pt", weights_only=True)
    iterator = checkpoint["extra_state"]["train_iterator"]
    assert (iterator["epoch"], iterator["iterations_in_epoch"]) == (1, 4 + 7)
    optimizer = checkpoint["last_optimizer_state"]
    assert optimizer["phase"] == ("asgd" if averages else "sgd")
    if averages:
        assert {state["step"].item() for state in optimizer["optimizer"]["state"].values()} == {7}
        embedding = checkpoint["model"]["decoder.embed_tokens.weight"]
        assert not torch.equal(embedding, optimizer["raw"][0]), "the model holds the average, not the raw weights"
