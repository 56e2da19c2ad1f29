"""NT-ASGD step by step against torch.optim.SGD and torch.optim.ASGD driven by hand, and against the formulas."""

import argparse
import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import reference_lm
import torch
import torch.nn.functional as F
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.optim.amp_optimizer import AMPOptimizer
from omegaconf import OmegaConf

from mixtape_plugin.errors import UserError
from mixtape_plugin.optim.nt_asgd import NTASGD
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingTask

LR, WEIGHT_DECAY = 0.5, 0.01
# Validation losses of epochs, and the epoch at whose end averaging starts with --nonmono 2: the first with more than
# two epochs before it that is worse than the best of all but the last two of these.
HISTORIES = {
    "never": ([9, 8, 7, 6, 5, 4, 3, 2], None),
    "worse from the start": ([1, 2, 3, 4, 5], 4),  # not earlier: there must be three before
    "one bad epoch": ([5, 4, 9, 3, 9, 2], 5),
    "the last two do not count": ([9, 8, 7, 7.5, 7.4, 7.3, 7.2], 6),
    "equal is not worse": ([5, 5, 5, 5, 5, 5.1], 6),
    "itself does not count": ([4, 3, 2, 2.5, 1, 1.5, 1.8], None),
}


def build_optimizer(parameters, **options):
    options = {
        "lr": [LR],
        "weight_decay": WEIGHT_DECAY,
        "nonmono": 2,
        "averaging_epoch": None,
        "stop_when_nonmonotone": False,
        **options,
    }
    return OPTIMIZER_REGISTRY["nt_asgd"](argparse.Namespace(**options), list(parameters))


def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def backward(model, segment):
    """The gradients of one segment, other data each."""
    generator = torch.Generator().manual_seed(segment)
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    model.zero_grad()
    F.cross_entropy(model(x), torch.randint(3, (5,), generator=generator)).backward()


def scale(segment):
    """The factor of a segment's learning rate: its length over the base."""
    return [1.0, 0.5, 1.1, 0.9, 0.45][segment % 5]


def train_step(model, optimizer, segment):
    backward(model, segment)
    optimizer.set_lr(LR * scale(segment))
    optimizer.step()
    optimizer.set_lr(LR)


def train_epoch(model, optimizer, epoch, loss, segments=4):
    """As a training goes: raw weights in the steps, the average through validation. Gives the weights of both."""
    optimizer.begin_epoch(epoch)
    optimizer.use_raw()
    for segment in range(segments):
        train_step(model, optimizer, epoch * segments + segment)
    raw = weights_of(model)
    optimizer.use_average()
    average = weights_of(model)
    optimizer.end_epoch(loss)
    return raw, average


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_bitwise(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(actual, expected)) and len(actual) == len(expected)


def by_hand(losses, start=None, segments=4):
    """The same training with torch's optimizers, averaging from the end of epoch `start` on."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    trace = []
    for epoch in range(1, len(losses) + 1):
        if epoch - 1 == start:
            optimizer = torch.optim.ASGD(model.parameters(), lr=LR, t0=0, lambd=0.0, weight_decay=WEIGHT_DECAY)
        for segment in range(segments):
            backward(model, epoch * segments + segment)
            optimizer.param_groups[0]["lr"] = LR * scale(epoch * segments + segment)
            optimizer.step()
        raw = weights_of(model)
        averaging = isinstance(optimizer, torch.optim.ASGD)
        trace.append((raw, [optimizer.state[p]["ax"].clone() for p in model.parameters()] if averaging else raw))
    return trace


@pytest.mark.parametrize("losses, start", HISTORIES.values(), ids=HISTORIES)
def test_trace_equals_torch_bitwise(losses, start):
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    expected = by_hand(losses, start)
    for epoch, loss in enumerate(losses, 1):
        assert optimizer.phase == ("sgd" if start is None or epoch <= start else "asgd")
        for found, wanted in zip(train_epoch(model, optimizer, epoch, loss), expected[epoch - 1]):
            assert_bitwise(found, wanted)
    assert optimizer.phase == ("sgd" if start is None else "asgd")


@pytest.mark.parametrize("nonmono", [1, 2, 5])
def test_trigger_equals_the_formula(nonmono):
    """On random histories: never within the first epochs, and before the new loss is in the history."""
    rng = np.random.default_rng(nonmono)
    starts = []
    for _ in range(30):
        optimizer = build_optimizer(build_model().parameters(), nonmono=nonmono)
        losses = (10 - 0.3 * np.arange(15) + rng.normal(size=15)).tolist()
        for epoch, loss in enumerate(losses, 1):
            expected = reference_lm.is_nonmonotone(losses[: epoch - 1], loss, nonmono)
            optimizer.begin_epoch(epoch)
            optimizer.end_epoch(loss)
            assert (optimizer.phase == "asgd") == expected
            if expected:
                starts.append(epoch)
                break
    assert len(starts) > 5 and min(starts) > nonmono + 1


@pytest.mark.parametrize("value", [1e9, float("inf")])
def test_the_first_epochs_never_trigger(value):
    optimizer = build_optimizer(build_model().parameters(), nonmono=5)
    for epoch in range(1, 7):
        optimizer.begin_epoch(epoch)
        optimizer.end_epoch(value if epoch > 1 else 1.0)
        assert optimizer.phase == "sgd"
    assert list(optimizer.history) == [1.0] + [value] * 5
    optimizer.end_epoch(1.1)
    assert optimizer.phase == "asgd"


def test_steps_equal_the_formulas():
    """Weights, and the average as the running mean of the iterates from the second on, with lr one step late."""
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    references = [weight.numpy() for weight in weights_of(model)]
    for segment in range(6):
        train_step(model, optimizer, segment)
        for n, parameter in enumerate(model.parameters()):
            lr = LR * scale(segment)
            references[n] = reference_lm.sgd_step(references[n], parameter.grad.numpy(), lr, WEIGHT_DECAY)
            np.testing.assert_allclose(parameter.detach(), references[n], rtol=1e-12, atol=1e-14)
    for loss in (1, 2, 3, 4):
        optimizer.end_epoch(loss)
    assert optimizer.phase == "asgd"

    averaged = [reference_lm.AveragedSGD(weight, WEIGHT_DECAY) for weight in references]
    iterates = []
    for segment in range(6, 17):
        optimizer.use_raw()
        train_step(model, optimizer, segment)
        iterates.append(weights_of(model))
        for parameter, expected in zip(model.parameters(), averaged):
            expected.step(parameter.grad.numpy(), LR * scale(segment))
            np.testing.assert_allclose(parameter.detach(), expected.weight, rtol=1e-12, atol=1e-14)
        optimizer.use_average()
        for n, (parameter, expected) in enumerate(zip(model.parameters(), averaged)):
            np.testing.assert_allclose(parameter.detach(), expected.average, rtol=1e-12, atol=1e-14)
            mean = torch.stack([iterate[n] for iterate in iterates[1:] or iterates]).mean(0)
            torch.testing.assert_close(parameter.detach(), mean, rtol=1e-6, atol=1e-6)  # torch's 1/n is a float32


def test_use_average_and_use_raw_are_a_round_trip():
    model = build_model()
    optimizer = build_optimizer(model.parameters(), averaging_epoch=0)
    parameters = list(model.parameters())
    raw, average = train_epoch(model, optimizer, 1, 5.0)
    assert all((a != b).any() for a, b in zip(raw, average))
    for _ in range(2):  # the same as often as one asks
        optimizer.use_average()
        assert_bitwise(weights_of(model), average)
    for _ in range(2):
        optimizer.use_raw()
        assert_bitwise(weights_of(model), raw)
    optimizer.use_average()
    assert_bitwise(weights_of(model), average)
    assert all(a is b for a, b in zip(parameters, model.parameters()))

    # In the SGD phase there is nothing to swap, and right after the trigger no average yet.
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    raw, average = train_epoch(model, optimizer, 1, 5.0)
    assert_bitwise(raw, average)
    model = build_model()
    optimizer = build_optimizer(model.parameters(), averaging_epoch=0)
    optimizer.begin_epoch(1)
    before = weights_of(model)
    for swap in (optimizer.use_average, optimizer.use_raw):
        swap()
        assert_bitwise(weights_of(model), before)


LOSSES = [5.0, 4.0, 3.0, 6.0, 5.0, 4.0]  # averaging from the end of epoch 4


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("stop", range(1, 6))
def test_a_resume_at_an_epochs_end_is_bitwise(stop, averaged, tmp_path):
    """Before, at and after the trigger; saved with the average in place, as in a training, or with the raw weights."""
    expected = []
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    for epoch, loss in enumerate(LOSSES, 1):
        expected.append(train_epoch(model, optimizer, epoch, loss))

    model = build_model()
    optimizer = build_optimizer(model.parameters())
    for epoch, loss in enumerate(LOSSES[:stop], 1):
        train_epoch(model, optimizer, epoch, loss)
    if not averaged:
        optimizer.use_raw()
    model, optimizer = save_and_load(model, optimizer, tmp_path)
    assert optimizer.phase == ("asgd" if stop >= 4 else "sgd") and list(optimizer.history) == LOSSES[:stop]
    for epoch in range(stop + 1, len(LOSSES) + 1):
        for found, wanted in zip(train_epoch(model, optimizer, epoch, LOSSES[epoch - 1]), expected[epoch - 1]):
            assert_bitwise(found, wanted)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("epochs", [1, 4])
def test_a_resume_in_the_middle_of_an_epoch_is_bitwise(epochs, averaged, tmp_path):
    """After the second segment of the next epoch; epoch 5 averages."""
    model = build_model()
    optimizer = build_optimizer(model.parameters())
    for epoch, loss in enumerate(LOSSES[:epochs], 1):
        train_epoch(model, optimizer, epoch, loss)
    optimizer.begin_epoch(epochs + 1)
    optimizer.use_raw()
    for segment in (100, 101):
        train_step(model, optimizer, segment)
    if averaged:
        optimizer.use_average()
    resumed, resumed_optimizer = save_and_load(model, optimizer, tmp_path)
    resumed_optimizer.begin_epoch(epochs + 1)
    for a_model, an_optimizer in ((model, optimizer), (resumed, resumed_optimizer)):
        an_optimizer.use_raw()
        for segment in (102, 103):
            train_step(a_model, an_optimizer, segment)
    assert_bitwise(weights_of(resumed), weights_of(model))
    optimizer.use_average(), resumed_optimizer.use_average()
    assert_bitwise(weights_of(resumed), weights_of(model))


def save_and_load(model, optimizer, folder, **options):
    """Model and optimizer through a file, into new objects that begin elsewhere."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    model = build_model()
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = build_optimizer(model.parameters(), **options)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


def test_saving_does_not_move_the_training():
    """With the average in place and without."""
    weights = []
    for saves in (False, True):
        model = build_model()
        optimizer = build_optimizer(model.parameters(), averaging_epoch=0)
        for epoch in (1, 2):
            train_epoch(model, optimizer, epoch, 5.0)
            if saves:
                optimizer.state_dict()
                optimizer.use_raw()
                optimizer.state_dict()
        optimizer.use_raw()
        weights.append(weights_of(model))
    assert_bitwise(*weights)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_averaging_epoch(start):
    """ET-ASGD: from the epoch after N, whatever validation says; 0 from the first step."""
    losses = [5.0, 4.0, 3.0, 2.0, 1.0]
    model = build_model()
    optimizer = build_optimizer(model.parameters(), averaging_epoch=start)
    expected = by_hand(losses, start)
    for epoch, loss in enumerate(losses, 1):
        for found, wanted in zip(train_epoch(model, optimizer, epoch, loss), expected[epoch - 1]):
            assert_bitwise(found, wanted)
        assert optimizer.phase == ("asgd" if epoch > start else "sgd")


def test_averaging_epoch_overrules_the_trigger():
    """A given epoch is given: a bad validation before it does not start averaging."""
    optimizer = build_optimizer(build_model().parameters(), averaging_epoch=10)
    for epoch, loss in enumerate([1, 2, 3, 4, 5, 6], 1):
        optimizer.begin_epoch(epoch)
        optimizer.end_epoch(loss)
    assert optimizer.phase == "sgd"


def test_begin_epoch_again_does_not_restart_the_average():
    """A resume in the middle of an epoch calls it a second time."""
    weights = []
    for again in (False, True):
        model = build_model()
        optimizer = build_optimizer(model.parameters(), averaging_epoch=1)
        train_epoch(model, optimizer, 1, 5.0)
        optimizer.begin_epoch(2)
        for segment in range(10, 14):
            train_step(model, optimizer, segment)
            if again and segment == 12:
                optimizer.begin_epoch(2)
        optimizer.use_average()
        weights.append(weights_of(model))
    assert_bitwise(*weights)


@pytest.mark.parametrize("losses, end", HISTORIES.values(), ids=HISTORIES)
def test_fine_tuning_stops_where_averaging_would_start(losses, end, tmp_path):
    model = build_model()
    optimizer = build_optimizer(model.parameters(), averaging_epoch=0, stop_when_nonmonotone=True)
    going_on = build_optimizer(build_model().parameters(), averaging_epoch=0)
    for epoch, loss in enumerate(losses, 1):
        for each in (optimizer, going_on):
            each.begin_epoch(epoch)
            assert each.phase == "asgd"
            assert not each.finished
            each.end_epoch(loss)
        if epoch == end:
            assert optimizer.finished
            for stop in True, False:  # a training that has ended goes on without the option
                _, resumed = save_and_load(model, optimizer, tmp_path, stop_when_nonmonotone=stop)
                assert resumed.finished == stop
            break
    assert optimizer.finished == (end is not None)
    assert not going_on.finished
    optimizer.set_lr(LR)
    assert optimizer.get_lr() == LR, "the end is no learning rate"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nonmono": 0}, "--nonmono 0 "),
        ({"averaging_epoch": -1}, "--averaging-epoch -1 "),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 "),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        build_optimizer(build_model().parameters(), **options)


@pytest.mark.parametrize("name, more", [("nt_asgd", {}), ("sgd", {"momentum": 0.0})])
def test_amp_divides_by_its_scale_once(name, more, enabled_loss_scale):
    """With a scaler that is enabled, as it is on a GPU: a step of SGD is lr times the gradient."""
    weight = torch.nn.Parameter(torch.zeros(3))
    cfg = {
        "optimizer": {"_name": name, "lr": [LR], "weight_decay": 0.0, **more},
        "common": {"fp16_init_scale": 128, "min_loss_scale": 1e-4},
    }
    optimizer = AMPOptimizer.build_optimizer(OmegaConf.create(cfg), [weight])
    optimizer.backward((weight * torch.tensor([1.0, 2.0, 3.0])).sum())
    assert weight.grad.tolist() == [128, 256, 384], "the scale is there"
    optimizer.clip_grad_norm(0)
    optimizer.step()
    assert weight.tolist() == [-LR, -2 * LR, -3 * LR]


def test_amp_keeps_its_scale(enabled_loss_scale):
    cfg = {
        "optimizer": {"_name": "nt_asgd", "lr": [LR], "weight_decay": 0.0},
        "common": {"fp16_init_scale": 128, "min_loss_scale": 1e-4},
    }
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    trained, resumed = (AMPOptimizer.build_optimizer(OmegaConf.create(cfg), [weight]) for weight in weights)
    trained.backward((weights[0] * math.inf).sum())
    trained.clip_grad_norm(0)
    trained.step()
    assert trained.scaler.get_scale() == 64
    resumed.load_state_dict(trained.state_dict())
    assert resumed.scaler.get_scale() == 64


def test_another_optimizers_state_is_refused():
    with pytest.raises(UserError, match="another optimizer's state, not nt_asgd's: give --reset-optimizer"):
        build_optimizer(build_model().parameters()).load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("lr", [-0.1, math.inf, math.nan])
def test_learning_rate_is_checked(lr):
    with pytest.raises(UserError, match=f"--lr .*{lr}.* is not allowed: 0 or more"):
        build_optimizer(build_model().parameters(), lr=OmegaConf.create([1.0, lr]))  # as fairseq-train hands it over


def test_the_first_validation_text_alone_decides_about_averaging():
    """Of --valid-subset valid,test the test text must not."""
    heard, optimizer = [], NTASGD.__new__(NTASGD)
    optimizer.end_epoch = heard.append
    task = SimpleNamespace(epoch=1, validations=0, epoch_ended=True, optimizer=optimizer)
    for loss in 3.0, 5.0:
        BpttLanguageModelingTask.post_validate(task, None, {}, {"nll_loss": SimpleNamespace(avg=loss)})
    assert heard == [3.0]


def test_averaging_goes_by_the_likelihood():
    """Not by the loss with label smoothing."""
    heard, optimizer = [], NTASGD.__new__(NTASGD)
    optimizer.end_epoch = heard.append
    task = SimpleNamespace(epoch=1, validations=0, epoch_ended=True, optimizer=optimizer)
    losses = {"loss": SimpleNamespace(avg=9.0), "nll_loss": SimpleNamespace(avg=3.0)}
    BpttLanguageModelingTask.post_validate(task, None, {}, losses)
    assert heard == [3.0]


def test_averaging_goes_by_the_loss_of_a_criterion_that_reports_no_likelihood():
    """As fairseq's cross_entropy."""
    heard, optimizer = [], NTASGD.__new__(NTASGD)
    optimizer.end_epoch = heard.append
    task = SimpleNamespace(epoch=1, validations=0, epoch_ended=True, optimizer=optimizer)
    BpttLanguageModelingTask.post_validate(task, None, {}, {"loss": SimpleNamespace(avg=3.0)})
    assert heard == [3.0]


def test_validations_in_the_middle_of_an_epoch_do_not_decide_about_averaging():
    heard, optimizer = [], NTASGD.__new__(NTASGD)
    optimizer.end_epoch = heard.append
    for loss, ended in (3.0, False), (4.0, True):
        task = SimpleNamespace(epoch=1, validations=0, epoch_ended=ended, optimizer=optimizer)
        BpttLanguageModelingTask.post_validate(task, None, {}, {"nll_loss": SimpleNamespace(avg=loss)})
    assert heard == [4.0]


@pytest.mark.parametrize(
    "options, leaves_out",
    [
        ({"max_epoch": 10, "validate_interval": 10}, None),  # fairseq validates after the tenth
        ({"max_epoch": 9, "validate_interval": 10}, "--validate-interval 10 with --max-epoch 9"),
        ({"max_update": 10, "validate_after_updates": 10}, None),
        ({"max_update": 9, "validate_after_updates": 10}, "--validate-after-updates 10"),
        ({"disable_validation": True}, "--disable-validation"),
    ],
)
def test_a_training_without_validation_is_refused(options, leaves_out):
    validation = {"disable_validation": False, "validate_interval": 1, "validate_after_updates": 0}
    end = {"use_bmuf": False, "max_epoch": 0, "max_update": 0}
    groups = {
        name: {option: options.get(option, value) for option, value in group.items()}
        for name, group in {"dataset": validation, "optimization": end}.items()
    }
    task = BpttLanguageModelingTask.__new__(BpttLanguageModelingTask)
    for given, sentence in (
        ({}, f"which {leaves_out} leaves out: give --averaging-epoch$"),
        ({"averaging_epoch": 3}, None),
        ({"averaging_epoch": 3, "stop_when_nonmonotone": True}, f"^--stop-when-.* {leaves_out} leaves out: give one$"),
    ):
        optimizer = build_optimizer(build_model().parameters(), **given)
        refused = leaves_out and sentence
        with pytest.raises(UserError, match=sentence) if refused else contextlib.nullcontext():
            optimizer.check_training(task, OmegaConf.create(groups))
