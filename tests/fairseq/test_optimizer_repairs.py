"""Repairs of fairseq: float32 weights survive a resume in half precision; a parameter's own weight decay and learning
rate."""

import contextlib
from argparse import Namespace

import pytest
import torch
from conftest import run, train_args
from fairseq import optim
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from fairseq.optim.fp16_optimizer import FP16Optimizer, MemoryEfficientFP16Optimizer
from omegaconf import OmegaConf
from toy_text import lm_args, toy_text  # noqa: F401

from mixtape_plugin.damaged_files import explain_resume
from mixtape_plugin.errors import UserError
from mixtape_plugin.optim.nt_asgd import NTASGD
from mixtape_plugin.output_layers import OutputLayerConfig, build_output_layer

# ------------------------------------------------------------------------------------- a resume in half precision


def assert_same_training(one, other):
    """All that a training goes on from, in two folders, bit for bit."""
    states = [torch.load(folder / "checkpoint_last.pt", weights_only=True) for folder in (one, other)]
    for name in "model", "last_optimizer_state":
        assert_equal(*(state[name] for state in states), name)
    assert states[0]["optimizer_history"][-1] == states[1]["optimizer_history"][-1]
    assert states[0]["last_optimizer_state"]["float32_weights"]


def assert_equal(value, other, name):
    assert type(value) is type(other), name
    if isinstance(value, torch.Tensor):
        assert torch.equal(value, other), name
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        assert len(value) == len(other), name
        for key, part in items:
            assert_equal(part, other[key], f"{name}.{key}")
    else:
        assert value == other, name


def updates(folder):
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    return state["optimizer_history"][-1]["num_updates"]


# The learning rate is too low for bfloat16's 8 bits; a resume with rounded weights would stand still.
TRANSFORMER = "--bf16 --lr 1e-4 --context-scale 2 --weight-decay 0.01 --max-update 6 --max-tokens 1024"
LANGUAGE_MODEL = "--bf16 --averaging-epoch 1 --lr 0.1 --max-epoch 3 --seed 3 --batch-size 12"
PLIF = f"{LANGUAGE_MODEL} --hidden-sizes 12,8 --output-layer plif --plif-pieces 1000 --plif-lr-scale 0.2"
END = "--disable-validation --no-epoch-checkpoints"


@pytest.fixture(scope="module")
def trained(data, text, tmp_path_factory):
    """The arguments of a Transformer's training and of a language model's, and the folders of their ends."""
    folder = tmp_path_factory.mktemp("trained")
    args = {
        "transformer": lambda save_dir: train_args(data, save_dir, *f"{TRANSFORMER} {END}".split()),
        "language model": lambda save_dir: lm_args(text, save_dir, *f"{LANGUAGE_MODEL} {END}".split()),
        "plif": lambda save_dir: lm_args(text, save_dir, *f"{PLIF} {END}".split()),
    }
    for name, make in args.items():
        run("train", *make(folder / name))
    return args, folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, stop",
    [
        ("transformer", "--max-update=2"),  # of 4 an epoch
        ("language model", "--max-update=2"),  # before averaging, which begins with the second epoch
        ("transformer", "--max-epoch=1"),
        ("language model", "--max-epoch=1"),
        ("language model", "--max-update=8"),
        ("language model", "--max-epoch=2"),
        ("plif", "--max-update=2"),
        ("plif", "--max-update=8"),
    ],
)
def test_a_training_resumed_in_bf16_equals_an_uninterrupted_one(name, stop, trained, tmp_path):
    """In the middle of an epoch, and at its end."""
    args, folder = trained
    run("train", *args[name](tmp_path), stop)
    assert 0 < updates(tmp_path) < updates(folder / name)
    run("train", *args[name](tmp_path))
    assert_same_training(folder / name, tmp_path)


@pytest.mark.parametrize(
    "window, tolerance, large",
    [
        (3, 0.0, ()),  # it grows after three batches without an overflow, and shrinks with one
        (3, 0.3, ()),  # as before, if the batches since its last change are counted through an interruption
        (100, 0.3, (5, 7, 8)),  # it shrinks with the third of these: then 30% of the batches so far have one
    ],
)
@pytest.mark.parametrize("optimizer_class", [FP16Optimizer, MemoryEfficientFP16Optimizer])
def test_a_loss_scale_goes_on_as_it_was(optimizer_class, window, tolerance, large):
    """Whenever the training is interrupted.

    Args:
        large: batches whose gradients overflow.
    """

    def build(weight):
        parameter = torch.nn.Parameter(weight.clone())
        common = {"fp16_scale_window": window, "fp16_init_scale": 128, "fp16_scale_tolerance": tolerance, "bf16": False}
        common.update(threshold_loss_scale=None, min_loss_scale=1e-4, fp16_no_flatten_grads=True, tpu=False)
        config = {
            "optimizer": {"_name": "adam", "lr": [1e-3], **OPTIMIZERS["adam"], "fp16_adam_stats": False},
            "optimization": {"update_freq": [1]},
            "distributed_training": {"distributed_world_size": 1},
            "common": {**common, "model_parallel_size": 1},
        }
        config = OmegaConf.create(config)
        return parameter, optimizer_class.build_optimizer(config, [parameter])

    def scales(stop):
        parameter, optimizer = build(torch.full((4,), 100.0).half())
        found = []
        for batch in range(12):
            if batch == stop:
                state, weight = optimizer.state_dict(), parameter.detach()
                parameter, optimizer = build(weight)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            optimizer.backward((1e4 if batch in large else 1) * parameter.float().pow(2).sum())
            with contextlib.suppress(OverflowError):
                optimizer.clip_grad_norm(0.0)
                optimizer.step()
            found.append(optimizer.scaler.loss_scale)
        return found

    whole = scales(stop=None)
    assert whole[-1] < max(whole) and (len({*whole}) == 2 if large else len({*whole}) >= 3)
    for stop in range(1, 12):
        assert scales(stop) == whole


# ------------------------------------------------------------------------------------- weight decay by parameter

COMMON = {"lr": [0.1], "weight_decay": 0.1, "momentum": 0.9}
OPTIMIZERS = {
    "adam": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "use_old_adam": True, "tpu": False},
    "adamax": {"adamax_betas": "(0.9, 0.999)", "adamax_eps": 1e-8, "no_bias_correction": False},
    "sgd": {},
    "nag": {},
    "adagrad": {},
    "nt_asgd": {"nonmono": 1, "averaging_epoch": None, "stop_when_nonmonotone": False},
}


def build_layer(**options):
    torch.manual_seed(0)
    config = OutputLayerConfig(output_layer="mos", num_components=2, context_scale=3.0, **options)
    return build_output_layer(config, feature_dim=4, vocab_size=9)


def step_without_gradient(optimizer, parameters, steps=3):
    """Nothing but weight decay moves a weight whose gradient is zero."""
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(optimizer, FP16Optimizer):
            optimizer._needs_sync = True
            optimizer._unscale_grads()
        optimizer.step()


def assert_decayed(layer, before):
    for name, parameter in layer.named_parameters():
        if name == "context_scale":
            assert parameter.tolist() == [3]
        elif before[name].any():  # biases are zero
            assert parameter.norm() < 0.995 * before[name].norm(), name


def copy_parameters(layer):
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_leaves_the_context_scale_alone(name):
    layer = build_layer()
    parameters, before = list(layer.parameters()), copy_parameters(layer)
    optimizer = optim.build_optimizer(Namespace(optimizer=name, **COMMON, **OPTIMIZERS[name]), parameters)
    step_without_gradient(optimizer, parameters)
    assert_decayed(layer, before)
    assert {id(p) for p in optimizer.params} == {id(p) for p in parameters}


def test_weight_decay_leaves_the_context_scale_alone_when_averaging():
    """Steps of SGD, then of ASGD; both the raw weights and their average."""
    layer = build_layer()
    parameters = list(layer.parameters())
    options = Namespace(optimizer="nt_asgd", **COMMON, **OPTIMIZERS["nt_asgd"])
    optimizer = optim.build_optimizer(options, parameters)
    step_without_gradient(optimizer, parameters)
    for loss in 1.0, 2.0, 3.0:
        optimizer.end_epoch(loss)
    assert isinstance(optimizer, NTASGD) and optimizer.phase == "asgd"
    before = copy_parameters(layer)
    step_without_gradient(optimizer, parameters)
    assert_decayed(layer, before)
    assert optimizer.use_average()
    assert_decayed(layer, before)


def test_weight_decay_leaves_the_context_scale_alone_in_bf16():
    """Where the optimizer works on float32 copies of the parameters."""
    layer = build_layer().bfloat16()
    parameters, before = list(layer.parameters()), copy_parameters(layer)
    config = {"_name": "adam", **COMMON, **OPTIMIZERS["adam"], "fp16_adam_stats": False}
    del config["momentum"]
    common = {"bf16": True, "fp16_scale_window": 1}
    optimizer = FP16Optimizer.build_optimizer(OmegaConf.create({"optimizer": config, "common": common}), parameters)
    step_without_gradient(optimizer, parameters)
    assert_decayed(layer, before)


# ------------------------------------------------------------------------------------- learning rate by parameter

SCALE, RATES = 0.01, (0.1, 0.07, 0.05)


def build_plif(**options):
    torch.manual_seed(0)
    config = OutputLayerConfig(output_layer="plif", plif_pieces=8, plif_lr_scale=SCALE, **options)
    return build_output_layer(config, feature_dim=4, vocab_size=9)


def build_scaled(name, layer):
    return optim.build_optimizer(Namespace(optimizer=name, **COMMON, **OPTIMIZERS[name]), list(layer.parameters()))


def set_gradients(layer, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def steps(optimizer, layer, rates):
    """A step at each learning rate; the parameters after them."""
    for step, rate in enumerate(rates):
        optimizer.set_lr(rate)
        set_gradients(layer, step)
        optimizer.step()
    return copy_parameters(layer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slopes_have_a_learning_rate_of_their_own(name):
    """They move as in a training at that rate alone, all others as in one without a scale."""
    optimizer = build_scaled(name, layer := build_plif())
    scaled, rate = steps(optimizer, layer, RATES), optimizer.get_lr()
    expected = {}
    for factor in 1, SCALE:
        plain = build_plif()
        del plain.slopes_raw.optim_overrides
        expected[factor] = steps(build_scaled(name, plain), plain, [factor * rate for rate in RATES])
    assert rate == RATES[-1]
    for parameter, value in scaled.items():
        torch.testing.assert_close(value, expected[SCALE if parameter == "slopes_raw" else 1][parameter])
    assert not torch.equal(*(expected[factor]["slopes_raw"] for factor in expected))


def test_slopes_have_a_learning_rate_of_their_own_by_hand():
    """SGD, w − η(g + λw), then averaged SGD, whose step has the rate of the one before; the average begins with its
    second step. Saved and loaded in between."""
    optimizer = build_scaled("nt_asgd", layer := build_plif())
    expected = copy_parameters(layer)
    rates = {name: SCALE if name == "slopes_raw" else 1 for name in expected}

    def by_hand(step, rate):
        set_gradients(layer, step)
        for name, parameter in layer.named_parameters():
            expected[name] = expected[name] - rates[name] * rate * (parameter.grad + 0.1 * expected[name])

    for step, rate in enumerate(RATES):
        by_hand(step, rate)
    for name, value in steps(optimizer, layer, RATES).items():
        torch.testing.assert_close(value, expected[name])

    for loss in 1.0, 2.0, 3.0:
        optimizer.end_epoch(loss)
    other = build_plif()
    other.load_state_dict(layer.state_dict())
    resumed = build_scaled("nt_asgd", other)
    resumed.load_state_dict(optimizer.state_dict())
    raw = []
    for step, rate in enumerate([RATES[0], *RATES[:-1]]):
        by_hand(step, rate)
        raw.append(expected["slopes_raw"])
    for averaging, model in (optimizer, layer), (resumed, other):
        assert averaging.phase == "asgd"
        for name, value in steps(averaging, model, RATES).items():
            torch.testing.assert_close(value, expected[name])
        assert averaging.use_average()
        torch.testing.assert_close(model.slopes_raw.detach(), (raw[1] + raw[2]) / 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_context_scale_has_a_learning_rate_of_its_own(name):
    """Beside a weight decay of its own, and as in a training at that rate alone."""
    optimizer = build_scaled(name, layer := build_layer(context_scale_lr_scale=SCALE))
    scaled = steps(optimizer, layer, RATES)
    expected = {}
    for factor in 1, SCALE:
        plain = build_layer()
        expected[factor] = steps(build_scaled(name, plain), plain, [factor * rate for rate in RATES])
    for parameter, value in scaled.items():
        torch.testing.assert_close(value, expected[SCALE if parameter == "context_scale" else 1][parameter])
    assert not torch.equal(*(expected[factor]["context_scale"] for factor in expected))


@pytest.mark.parametrize("overrides, lr", [({"weight_decay": 0.3}, 0.1), ({"weight_decay": 0.3, "lr": 0.4}, 0.4)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resume_takes_the_scales_of_its_own_options(name, overrides, lr):
    """A saved optimizer brings its groups along: what a parameter asks for now counts, not what it asked for then.
    At once, since not every schedule sets the rate anew."""
    saved = build_scaled(name, build_plif(context_scale=2.0))
    layer = build_plif(context_scale=2.0)
    layer.slopes_raw.optim_overrides = {"optimizer": {"lr_scale": 0.5}}
    resumed = build_scaled(name, layer)
    saved.set_lr(0.1)
    resumed.load_state_dict(saved.state_dict(), overrides)
    loaded = {p: group["lr"] for group in resumed.param_groups for p in group["params"]}
    resumed.set_lr(0.2)
    rates = {p: group["lr"] for group in resumed.param_groups for p in group["params"]}
    decays = {p: group["weight_decay"] for group in resumed.param_groups for p in group["params"]}
    for parameter_name, parameter in layer.named_parameters():
        assert loaded[parameter] == pytest.approx(0.5 * lr if parameter_name == "slopes_raw" else lr)
        assert rates[parameter] == (0.1 if parameter_name == "slopes_raw" else 0.2)
        assert decays[parameter] == (0 if parameter_name == "context_scale" else 0.3)


def test_a_resume_with_other_groups_names_the_options():
    saved = build_scaled("sgd", build_plif())
    plain = build_plif()
    del plain.slopes_raw.optim_overrides
    with pytest.raises(ValueError) as error:
        build_scaled("sgd", plain).load_state_dict(saved.state_dict())
    with pytest.raises(UserError, match="--plif-lr-scale or --freeze-plif .* --reset-optimizer"):
        explain_resume("last.pt", error.value)


# ------------------------------------------------------------------------------------- an exponential moving average


@pytest.mark.parametrize("dtype, fp32", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
def test_a_tied_parameter_is_averaged_once(dtype, fp32):
    """Under all its names, also where float32 copies of the average are kept and saved."""
    model = torch.nn.Module()
    model.first, model.own = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    model.second = model.first
    model.third = torch.nn.Linear(2, 3, bias=False)
    model.third.weight = model.first.weight
    model.to(dtype)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    ema = EMA(model, EMAConfig(ema_decay=0.75, ema_fp32=fp32))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 2.0)
    for expected in 1.25, 1.4375:
        ema.step(model)
        for state in ema.get_model().state_dict(), ema.fp32_params:
            for name, value in state.items():
                assert value.unique().tolist() == [expected], name


# ------------------------------------------------------------------------------------- copies


def test_copies_in_float32_keep_the_learning_rate_and_flat_ones_are_refused():
    layer = build_plif().bfloat16()
    config = {"_name": "sgd", **COMMON, "momentum": 0.0, "weight_decay": 0.0}
    build = {
        kind: OmegaConf.create({"optimizer": config, "common": {**common, "fp16_scale_window": 1}})
        for kind, common in {"bf16": {"bf16": True}, "fp16": {"bf16": False}}.items()
    }
    optimizer = FP16Optimizer.build_optimizer(build["bf16"], list(layer.parameters()))
    optimizer.set_lr(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5 * SCALE]
    assert [[p.numel() for p in group["params"]] for group in optimizer.param_groups] == [[36, 9], [8]]
    with pytest.raises(UserError, match="--fp16 .*--plif-lr-scale .*--fp16-no-flatten-grads"):
        FP16Optimizer.build_optimizer(build["fp16"], list(build_plif().half().parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_slopes_stay_as_they_were(name):
    layer = build_plif(freeze_plif=True)
    before = layer.slopes_raw.detach().clone()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]  # as fairseq asks
    optimizer = optim.build_optimizer(Namespace(optimizer=name, **COMMON, **OPTIMIZERS[name]), trained)
    for _ in RATES:
        loss, _ = layer.loss(torch.ones(3, 4), torch.tensor([5, 6, 7]))
        loss.backward()
        optimizer.step()
    assert torch.equal(layer.slopes_raw, before) and layer.slopes_raw.grad is None
