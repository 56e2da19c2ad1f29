"""Two repairs of fairseq: float32 weights survive a resume in half precision; weight decay by parameter."""

from argparse import Namespace

import pytest
import torch
from conftest import run, train_args
from fairseq import optim
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf
from test_bptt_language_modeling import lm_args, text  # noqa: F401

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
END = "--disable-validation --no-epoch-checkpoints"


@pytest.fixture(scope="module")
def whole(data, text, tmp_path_factory):  # noqa: F811
    """The arguments of a Transformer's training and of a language model's, and the folders of their ends."""
    folder = tmp_path_factory.mktemp("whole")
    args = {
        "transformer": lambda save_dir: train_args(data, save_dir, *f"{TRANSFORMER} {END}".split()),
        "language model": lambda save_dir: lm_args(text, save_dir, *f"{LANGUAGE_MODEL} {END}".split()),
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
        ("language model", "--max-epoch=1"),
        ("language model", "--max-update=8"),
        ("language model", "--max-epoch=2"),
    ],
)
def test_a_training_resumed_in_bf16_equals_an_uninterrupted_one(name, stop, whole, tmp_path):
    """In the middle of an epoch, and at its end.

    Not a Transformer at its end: fairseq makes the batches anew on a resume, by the seed of the epoch it is in.
    """
    args, folder = whole
    run("train", *args[name](tmp_path), stop)
    assert 0 < updates(tmp_path) < updates(folder / name)
    run("train", *args[name](tmp_path))
    assert_same_training(folder / name, tmp_path)


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


def build_layer():
    torch.manual_seed(0)
    config = OutputLayerConfig(output_layer="mos", num_components=2, context_scale=3.0)
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
