"""The fused losses in training: half precision, dropout and noise, and fairseq-train from one seed with and without.

Shapes: N tokens, B batch, T time, D features, E embedding, K components, V vocabulary, S frequent tokens.
"""

from unittest import mock

import pytest
import reference
import torch
from conftest import USER_DIR, run, train_args
from fairseq.tasks.fairseq_task import FairseqTask
from test_fused_losses import (
    MIXTURES,
    S,
    V,
    build,
    by_formula,
    chunk_bytes,
    each_case,
    each_smoothing,
    loss_and_gradients,
    random_batch,
    twin,
)
from torch.nn.modules.module import register_module_forward_hook

from mixtape_plugin.kernels import torch_ops
from mixtape_plugin.output_layers import OutputLayer

# --------------------------------------------------------------------------------------------------- half precision

N = 48
WIDE = {"feature_dim": 32, "embed_dim": 24, "vocab_size": 211, "gate_dim": 16, "masked": (0, 5, 200), "std": 0.3}


def results(layer, features, target, **options):
    """The loss of each of some tokens, and the gradients of the sum over all (with a factor, divided out)."""
    factor = options.pop("factor", 1)
    tokens = [layer.loss(*token, **options) for token in single_tokens(features, target)]
    found = loss_and_gradients(layer, features, target, factor, **options)
    found["loss"], found["nll"] = (torch.stack(parts).detach() for parts in zip(*tokens))
    for name, value in found.items():
        assert value.dtype == (torch.float32 if name in ("loss", "nll") else layer.weight.dtype), name
    return {name: value if name in ("loss", "nll") else value.double() / factor for name, value in found.items()}


def single_tokens(features, target):
    return zip(features[:16].split(1), target[:16].split(1))


def exact_results(layer, features, target, **options):
    exact = by_formula(layer, features, target, **options)
    tokens = [by_formula(layer, *token, **options) for token in single_tokens(features, target)]
    return {**exact, **{name: torch.stack([token[name] for token in tokens]) for name in ("loss", "nll")}}


def assert_no_worse_than_eager(case, dtype, autocast=None, factor=1, unlikely=(), **options):
    """Each result of the fused layer against that of the eager one, both with the same rounded parameters as exact.

    Their errors come from the same kinds of rounding in another order, so they are of one size but not equal. Over
    three seeds the root-mean-square error may be 1.5 times eager's plus 0.29 units in the last place of the products'
    type, which is what rounding an exact result costs. The largest, which is a matter of luck, may be twice eager's
    plus two units of the largest number: that is for single entries gone wrong. The gradients of Mixtape's w_x are sums
    over n tokens and K contexts, in one chain where eager has K chains of n: its partial sums are √K times as large,
    and so may be what their rounding adds up to.
    """
    options["ignore_index"] = 1
    exact, errors = {}, {"fused": {}, "eager": {}}

    def chosen(name, value):  # of the parameters with a row a token, those of the unlikely ones, if there are any
        return value[[x for x in unlikely if x < len(value)]] if unlikely and name in reference.ROWS else value

    for seed in range(3):
        layer = build(case, seed=seed, **WIDE)
        layer.bias.data[list(unlikely)] -= 14
        layer = layer.to(dtype)
        features, target = random_batch(layer, N, ignored=(3, 11), seed=seed)
        target[torch.isin(target, torch.tensor(unlikely))] = 33
        wanted = exact_results(layer, features, target, **options)
        for name, value in wanted.items():
            exact.setdefault(name, []).append(chosen(name, value))
        for impl in "fused", "eager":
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                found = results(twin(layer, impl), features, target, factor=factor, **options)
            for name, value in found.items():
                errors[impl].setdefault(name, []).append(chosen(name, value.double() - wanted[name]))
    for name in exact:
        size, fused, eager = (torch.cat(x[name]).flatten() for x in (exact, errors["fused"], errors["eager"]))
        unit = torch.finfo(torch.float32 if name in ("loss", "nll") else autocast or dtype).eps
        assert rms(fused) <= 1.5 * rms(eager) + 0.29 * unit * rms(size), f"{name}: {rms(fused)}, eager {rms(eager)}"
        largest = [x.abs().max().item() for x in (fused, eager, size)]
        chain = layer.num_components**0.5 if name == "weight" and case.startswith("mixtape") else 1
        most = 2 * chain * largest[1] + 2 * unit * largest[2]
        assert largest[0] <= most, f"{name}: {largest[0]}, eager {largest[1]}"


def rms(values):
    return values.pow(2).mean().sqrt().item()


@each_smoothing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_case
def test_error_in_low_precision(case, dtype, label_smoothing):
    assert_no_worse_than_eager(case, dtype, label_smoothing=label_smoothing)


@each_smoothing
@each_case
def test_error_under_autocast(case, label_smoothing):
    assert_no_worse_than_eager(case, torch.float32, torch.bfloat16, label_smoothing=label_smoothing)


@each_case
def test_error_of_a_sum_over_tokens_in_bfloat16(case):
    """What label smoothing adds to the gradient of a token's features can be smaller than their rounding, and is the
    same for all tokens: lost once for each, it is a part of the sum, which moves the network before."""
    errors = {"fused": 0.0, "eager": 0.0}
    for seed in range(3):
        layer = build(case, seed=seed, **{**WIDE, "vocab_size": 3000}).bfloat16()
        features, target = random_batch(layer, 1000, seed=seed)
        exact = by_formula(layer, features, target, label_smoothing=0.1)["features"].sum(0)
        for impl in errors:
            gradient = loss_and_gradients(twin(layer, impl), features, target, label_smoothing=0.1)["features"]
            errors[impl] += ((gradient.double().sum(0) - exact).norm() / exact.norm()).item()
    assert errors["fused"] <= 1.5 * errors["eager"], errors


@each_case
def test_error_of_unlikely_tokens_in_float16_under_a_loss_scale(case):
    """Probabilities of some 1e-9 are less than float16 holds: the loss is scaled to save their gradients.

    By 2^7, with which fairseq begins.
    """
    assert_no_worse_than_eager(case, torch.float16, factor=2.0**7, unlikely=(2, 7, 100, 210), label_smoothing=0.0)


@each_case
def test_features_in_half_precision_under_autocast(case):
    """As the products before an output layer leave them: every gradient has the type of what it belongs to."""
    layer = build(case, **WIDE).float()
    features, target = random_batch(layer, N)
    found = {}
    for dtype in torch.float32, torch.bfloat16:
        with torch.autocast("cpu", torch.bfloat16):
            found[dtype] = loss_and_gradients(layer, features.bfloat16().to(dtype), target, label_smoothing=0.1)
    assert found[torch.bfloat16]["features"].dtype == torch.bfloat16
    for name, value in found[torch.bfloat16].items():
        expected = found[torch.float32][name]
        assert value.dtype == torch.float32 or name == "features"
        tolerance = {"rtol": 1e-6, "atol": 1e-6}  # the same products of the same bfloat16 numbers
        if name == "features":
            # Rounded once more; of a mixture up to three products take the features, and their gradients are added in
            # bfloat16: two more roundings, each by at most 2^-9 of a partial sum, which can be larger than the sum.
            partial = 0.0 if case == "softmax" else expected.abs().max().item()
            tolerance = {"rtol": 2**-8, "atol": 2**-7 * partial}
        torch.testing.assert_close(value.float(), expected, **tolerance)


# ------------------------------------------------------------------------------------------------ dropout and noise

DRAWS = {
    "context dropout": {"context_dropout": 0.5},
    "locked context dropout": {"context_dropout": 0.5, "locked_context_dropout": True},
    "gate dropout": {"gate_dropout": 0.5},
    "gate noise": {"gate_noise": 0.4},
    "all": {"context_dropout": 0.3, "gate_dropout": 0.3, "gate_noise": 0.5},
}
CASES_AND_DRAWS = [(case, draw) for case in MIXTURES for draw in DRAWS if "mixtape" in case or "context" in draw]


@pytest.mark.parametrize("case, draw", CASES_AND_DRAWS)
def test_a_seed_decides_what_is_drawn(case, draw):
    layer, quiet = build(case, **DRAWS[draw]), build(case)
    features, target = random_batch(layer, 3, 4)
    without = loss_and_gradients(quiet, features, target, label_smoothing=0.1)
    found = []
    for seed in 1, 1, 2:
        torch.manual_seed(seed)
        with chunk_bytes(700):
            found.append(loss_and_gradients(layer, features, target, label_smoothing=0.1))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])
        assert not torch.equal(value, found[2][name])
        assert not torch.equal(value, without[name])


@each_case
def test_nothing_is_drawn_where_nothing_is_random(case):
    """A training with dropout elsewhere is the same, whichever the implementation."""
    layer = build(case).train()
    state = torch.get_rng_state()
    loss_and_gradients(layer, *random_batch(layer, 5))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("case, draw", CASES_AND_DRAWS)
def test_the_gradient_is_that_of_the_draw_of_the_loss(case, draw):
    """Finite differences with the seed fixed know of one draw only; in several chunks."""
    layer = build(case, masked=(4, 12), num_components=3, gate_weight_norm=True, **DRAWS[draw])
    features, target = random_batch(layer, 2, 3, ignored=(1,))

    def loss(features, *parameters):
        torch.manual_seed(2)
        return layer.loss(features, target, label_smoothing=0.1, ignore_index=1)[0]

    with chunk_bytes(700):
        assert torch.autograd.gradcheck(loss, (features.requires_grad_(), *layer.parameters()), fast_mode=True)


def assert_eagers_distribution(layer, features, target, grad=True):
    """Mean and variance of the loss over seeds, to four standard errors of the difference."""
    losses = {}
    for impl in "fused", "eager":
        model, losses[impl] = twin(layer, impl).train(), []
        for seed in range(300):
            torch.manual_seed(seed if impl == "fused" else 1000 + seed)
            with chunk_bytes(2000), torch.set_grad_enabled(grad):
                losses[impl].append(model.loss(features, target)[0].item())
    fused, eager = (torch.tensor(x, dtype=torch.float64) for x in losses.values())
    deviations = [x - x.mean() for x in (fused, eager)]
    for ours, theirs in (fused, eager), [x.pow(2) for x in deviations]:
        error = (ours.var() / len(ours) + theirs.var() / len(theirs)).sqrt()
        assert error > 0 and (ours.mean() - theirs.mean()).abs() <= 4 * error


@pytest.mark.parametrize("case, draw, grad", [(*both, True) for both in CASES_AND_DRAWS] + [("mixtape", "all", False)])
def test_draws_have_eagers_distribution(case, draw, grad):
    """The contexts are all the same, and the targets two, a frequent and a rare one, so that the variance of the sum
    tells whether each has a draw of its own: in a chunk, from chunk to chunk, and, locked, from sequence to sequence.
    """
    layer = build(case, std=0.7, **DRAWS[draw])
    features, target = random_batch(layer, 4, 2)
    features = features[:1, :1].expand(4, 2, -1).clone()
    target[:2], target[2:] = 3, 11
    assert_eagers_distribution(layer, features, target, grad)


def test_every_frequent_token_has_noise_of_its_own():
    """Tokens with the same parameters, of which only their own noise makes one likelier than another."""
    layer = build("mixtape without sharing", gate_noise=0.4)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in reference.ROWS:
                parameter.copy_(parameter[:1].expand_as(parameter).clone())
    assert_eagers_distribution(layer, *random_batch(layer, 8))


def test_noise_of_the_rare_tokens_leaves_the_frequent_ones_alone(monkeypatch):
    """Where only frequent tokens can be predicted and their own noise is taken away, no draw is left in the loss."""
    layer = build("mixtape", masked=tuple(range(S, V)), gate_noise=0.4).train()
    features, target = random_batch(layer, 8)
    assert len({layer.loss(features, target)[0].item() for _ in range(3)}) == 3
    mix, seen = torch_ops.mix_, set()
    monkeypatch.setattr(
        torch_ops, "mix_", lambda leaves, gates, noise, out: seen.add(noise) or mix(leaves, gates, 0.0, out)
    )
    assert len({layer.loss(features, target)[0].item() for _ in range(3)}) == 1
    assert seen == {0.4}


def test_noise_of_the_rare_tokens_is_as_wide_as_asked_for():
    layer = build("mixtape", gate_noise=0.4).train()
    features, _ = random_batch(layer, 5)
    torch.manual_seed(3)
    _, prior, _ = layer.factors(features)
    torch.manual_seed(3)
    noise = 0.4 * torch.randn(5, layer.num_gates, dtype=torch.float64)
    expected = reference.tree_priors(torch.sigmoid(layer.gate_shared(features) + noise))
    torch.testing.assert_close(prior, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------- through fairseq


def language_model_args(text, folder, *more):
    model = "--arch awd_lstm_lm --embed-dim 16 --hidden-sizes 24,16 --gate-dim 8 --frequent-ratio 0.5"
    training = "--task bptt_language_modeling --tokens-per-sample 10 --batch-size 8 --criterion awd_lstm_cross_entropy"
    return [text, "--user-dir", USER_DIR, "--save-dir", folder, *f"{model} {training} --cpu".split(), *more]


def training_losses(args):
    """The loss a token of each update, unrounded, and the output layers that made all their scores in training."""
    losses, calls = [], []
    train_step = FairseqTask.train_step

    def recorded(*args, **kwargs):
        loss, sample_size, logs = train_step(*args, **kwargs)
        losses.append(loss.item() / sample_size)
        return loss, sample_size, logs

    hook = register_module_forward_hook(
        lambda module, *_: calls.append(module) if isinstance(module, OutputLayer) and module.training else None
    )
    try:
        with mock.patch.object(FairseqTask, "train_step", recorded), chunk_bytes(20000):
            run("train", *args)
    finally:
        hook.remove()
    return losses, calls


@pytest.mark.slow
@pytest.mark.parametrize("output_layer", ["softmax", "mos", "mixtape"])
@pytest.mark.parametrize("model", ["transformer", "awd_lstm"])
def test_trainings_from_one_seed(model, output_layer, request, tmp_path):
    """fairseq-train with either implementation: the same losses but for float32's rounding, dropout elsewhere included.

    Rounding differs by some 1e-7 of each number; SGD on a small smooth model hands that on without enlarging it much,
    so that 20 updates agree to 1e-5. (Adam would blow up the rounding of gradients that are nearly zero.)
    """
    more = f"--output-layer {output_layer} --gate-noise 0 --optimizer sgd --lr 1 --clip-norm 0.25 --max-update 20"
    more = [*more.split(), "--disable-validation", "--no-save", "--num-workers", 0]
    if model == "transformer":
        args = train_args(request.getfixturevalue("data"), tmp_path, *more, "--label-smoothing", 0.1)
        args.append("--share-decoder-input-output-embed")
    else:
        args = language_model_args(request.getfixturevalue("text"), tmp_path, *more)
    losses = {}
    for impl in "eager", "fused":
        losses[impl], calls = training_losses([*args, "--output-impl", impl])
        assert bool(calls) == (impl == "eager")
    fused, eager = torch.tensor(losses["fused"]), torch.tensor(losses["eager"])
    assert len(eager) == 20 and eager[-3:].mean() < eager[:3].mean() - 0.1
    torch.testing.assert_close(fused, eager, rtol=1e-5, atol=0)
