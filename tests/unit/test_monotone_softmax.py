"""SigSoftmax, GSS and LMS-PLIF: exact cases, extreme scores, slopes by finite differences, precision.

Shapes: N tokens, D features, V vocabulary, K pieces.
"""

import dataclasses
import math

import pytest
import reference
import torch
import torch.nn.functional as F

from mixtape_plugin.errors import UserError
from mixtape_plugin.kernels.curves import Curve, GeneralizedSigSoftmax, PiecewiseLinear
from mixtape_plugin.output_layers import OutputLayerConfig, build_output_layer
from mixtape_plugin.output_layers.monotone_softmax import MonotoneSoftmax

N, D, V = 40, 5, 60
LAYERS = ("sigsoftmax", "gss", "plif")
each_layer = pytest.mark.parametrize("name", LAYERS)
each_impl = pytest.mark.parametrize("impl", ["eager", "fused"])


def build(name, masked=(), std=1.0, **options):
    options = {"plif_pieces": 50, "plif_range": 4.0, **options}
    torch.manual_seed(0)  # PLIF's slopes are drawn
    layer = build_output_layer(OutputLayerConfig(output_layer=name, **options), D, V, masked_tokens=masked).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in (layer.weight, layer.bias):
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return layer


def batch(size=N):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(size, D, dtype=torch.float64, generator=generator).requires_grad_()
    return features, torch.randint(8, V, (size,), generator=generator)


def loss_and_gradients(layer, features, target, **options):
    loss, _ = layer.loss(features, target, **options)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, [features, *trained])


def twin(layer, impl):
    config = dataclasses.replace(layer.config, output_impl=impl)
    other = build_output_layer(config, D, V, masked_tokens=layer.masked_tokens)
    other.load_state_dict(layer.state_dict())
    return other.to(layer.weight.dtype)


def relative_errors(actual, expected):
    return [((a.double() - e).abs().max() / e.abs().max()).item() for a, e in zip(actual, expected)]


def mean_square_errors(actual, expected):
    return [((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, expected)]


def scores_of(layer, features):
    return features @ layer.weight.t() + layer.bias


def set_slopes(layer, slopes):
    with torch.no_grad():
        layer.slopes_raw.copy_(torch.expm1(torch.as_tensor(slopes, dtype=torch.float64)).log())


# ----------------------------------------------------------------------------------------------------- exact cases


@each_impl
@pytest.mark.parametrize("c, k, factor", [(0.7, 1.0, 1.0), (100.0, 2.5, 2.5), (100.0, 0.4, 0.4), (-100.0, 2.5, 1.0)])
def test_gss_that_is_a_softmax(c, k, factor, impl):
    """k = 1: of the scores; all of them far below c: of k times the scores; far above: of the scores."""
    layer = build("gss", gss_c=c, gss_k=k, output_impl=impl)
    features, target = batch()
    expected = F.cross_entropy(factor * scores_of(layer, features), target, reduction="sum")
    leaves = [features, layer.weight, layer.bias]
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves)]
    assert max(relative_errors(loss_and_gradients(layer, features, target), wanted)) < 1e-12


@each_impl
@pytest.mark.parametrize("slope", [0.3, 1.0, 2.7])
def test_plif_with_equal_slopes_is_a_softmax_at_a_temperature(slope, impl):
    """Beyond the pieces, too."""
    layer = build("plif", output_impl=impl, std=3.0, plif_range=2.0)
    set_slopes(layer, slope)
    features, target = batch()
    scores = scores_of(layer, features)
    assert (scores.abs() > 2 * layer.config.plif_range).any()
    expected = F.cross_entropy(slope * scores, target, reduction="sum")
    wanted = [expected.detach(), *torch.autograd.grad(expected, [features, layer.weight, layer.bias])]
    assert max(relative_errors(loss_and_gradients(layer, features, target), wanted)) < 1e-12


def test_plif_of_two_pieces_by_hand():
    curve = PiecewiseLinear(torch.tensor([0.5, 3.0], dtype=torch.float64), limit=1.0)
    scores = torch.tensor([-7.0, -1.0, -0.5, 0.0, 0.25, 1.0, 4.0], dtype=torch.float64)
    expected = torch.tensor([-3.5, -0.5, -0.25, 0.0, 0.75, 3.0, 12.0], dtype=torch.float64)
    torch.testing.assert_close(curve.value(scores), expected)
    curve.begin(torch.float64, True)
    slope, _ = curve.map_(scores)
    torch.testing.assert_close(scores, expected)
    assert slope.tolist() == [0.5, 0.5, 0.5, 3, 3, 3, 3]  # on a knot: of the piece above it


def test_gradients_of_many_equal_scores_lose_nothing_in_float32():
    """Where sums in float32 are 1e-3 off."""
    slopes, scores = torch.rand(9, generator=torch.Generator().manual_seed(0)) + 0.5, torch.full((200_000,), 0.3)
    found = []
    for dtype in torch.float32, torch.float64:
        leaf = slopes.to(dtype).requires_grad_()
        loss = (0.1 * PiecewiseLinear(leaf, 3.0).value(scores.to(dtype))).sum()
        found.append(torch.autograd.grad(loss, leaf)[0].double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_gradients_of_many_equal_scores_lose_nothing_by_chunk():
    """2^24 and six ones, each of which float32 loses beside it, be it of its chunk or of the next."""
    curve = PiecewiseLinear(torch.ones(3), limit=3.0)
    curve.begin(torch.float32, True)
    for grad in torch.tensor([2.0**24, *[1.0] * 4]), torch.ones(1), torch.ones(1):
        _, kept = curve.map_(torch.full_like(grad, 2.0))  # in the middle of the last piece
        curve.collect(grad, kept)
    assert curve.gradients()["slopes"][1:].tolist() == [2 * (2.0**24 + 6), 2.0**24 + 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plif_goes_on_as_on_its_end_pieces_however_far(dtype):
    """Beyond 2^63 pieces, too, where a number is too large for an integer."""
    curve = PiecewiseLinear(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype), limit=2.0)
    scores = torch.tensor([-1e30, -1e19, -1e15, 1e15, 1e19, 1e30], dtype=dtype)
    slopes = torch.tensor([1.0, 1.0, 1.0, 4.0, 4.0, 4.0], dtype=dtype)
    torch.testing.assert_close(curve.value(scores) / scores, slopes)
    curve.begin(dtype, False)
    found, _ = curve.map_(scores)
    assert torch.equal(found, slopes)


def test_sigsoftmax_is_gss_to_the_last_bit():
    features, target = batch()
    for impl in "eager", "fused":
        sigsoftmax = build("sigsoftmax", output_impl=impl)
        gss = build("gss", gss_c=0.0, gss_k=2.0, output_impl=impl)
        for ours, theirs in zip(*(loss_and_gradients(x, features, target) for x in (sigsoftmax, gss))):
            assert torch.equal(ours, theirs)
    probs = sigsoftmax.log_probs(features).exp()
    torch.testing.assert_close(probs, reference.sigsoftmax(scores_of(sigsoftmax, features)))


def test_curves_rise_and_their_derivative_is_theirs():
    """f' that the fused loss uses, against torch's derivative of f; masked scores keep them apart."""
    scores = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    slopes = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.01
    for curve in GeneralizedSigSoftmax(-1.5, 2.5), GeneralizedSigSoftmax(1.0, 0.2), PiecewiseLinear(slopes, 5.0):
        leaf = scores.clone().requires_grad_()
        value = curve.value(leaf)
        (expected,) = torch.autograd.grad(value.sum(), leaf)
        assert (value.diff() > 0).all()
        curve.begin(torch.float64, False)
        mapped = scores.clone()
        slope, _ = curve.map_(mapped)
        torch.testing.assert_close(slope, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(mapped, value.detach(), rtol=1e-13, atol=1e-13)


# ------------------------------------------------------------------------------------------------------ the numbers


@each_impl
@each_layer
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("masked", [(), (0, 7)])
def test_scores_of_any_size(name, impl, size, masked):
    """To ±1e4, where the formulas of the paper's code end at 88: value and gradients are those in float64."""
    layer = build(name, masked=masked, output_impl=impl, std=size / 5)
    features, target = batch()
    if size == 1e4:
        assert scores_of(layer, features).abs().max() > 1e4
    leaves = {key: value.detach().clone().requires_grad_() for key, value in layer.named_parameters()}
    expected, _ = reference.layer_loss(layer, features, target, 0.1, params=leaves)
    wanted = [expected.detach(), *torch.autograd.grad(expected, [features, *leaves.values()])]
    found = loss_and_gradients(layer, features, target, label_smoothing=0.1)
    assert max(relative_errors(found, wanted)) < 1e-9

    single = twin(layer, impl).float()
    found = loss_and_gradients(single, features.detach().float().requires_grad_(), target, label_smoothing=0.1)
    assert all(x.isfinite().all() for x in found)
    assert relative_errors(found[:1], wanted)[0] < 1e-5


@each_impl
def test_slopes_by_finite_differences(impl):
    """dL/dw of every piece; the loss is smooth in w, so that central differences are good to 1e-9."""
    layer = build("plif", masked=(0, 7), output_impl=impl, plif_pieces=12, plif_range=2.0, std=0.7)
    features, target = batch()
    *_, gradient = loss_and_gradients(layer, features, target, label_smoothing=0.1)
    step = 1e-4
    for piece in range(12):
        losses = []
        for sign in 1, -1, 2, -2:
            moved = twin(layer, impl)
            with torch.no_grad():
                moved.slopes_raw[piece] += sign * step
                losses.append(moved.loss(features, target, label_smoothing=0.1)[0])
        up, down, up2, down2 = losses
        difference = (8 * (up - down) - (up2 - down2)) / (12 * step)
        assert abs(difference - gradient[piece]) < 1e-9 * gradient.abs().max() * N


def test_second_derivatives_through_the_slopes():
    """Of features by way of the slopes' gradient: none of their parts may be missing."""
    layer = build("plif", output_impl="eager", plif_pieces=12, plif_range=2.0, std=0.7)
    features, target = batch(5)

    def squares(features, **options):
        loss, _ = layer.loss(features, target)
        found = torch.autograd.grad(loss, [features, layer.slopes_raw], **options)
        return sum(part.pow(2).sum() for part in found)

    (second,) = torch.autograd.grad(squares(features, create_graph=True), features)
    for row, column in (0, 0), (3, 2):
        step = torch.zeros_like(features)
        step[row, column] = 1e-6
        up, down = (squares(features.detach().add(x).requires_grad_()) for x in (step, -step))
        assert second[row, column].item() == pytest.approx((up - down).item() / 2e-6, rel=1e-5)


@each_impl
def test_ignored_and_masked_tokens_leave_the_slopes_alone(impl):
    layer = build("plif", masked=(0, 7), output_impl=impl)
    features, target = batch()
    expected = loss_and_gradients(layer, features, target, label_smoothing=0.1)
    with torch.no_grad():
        layer.bias[[0, 7]] = torch.tensor([1e6, -1e6], dtype=torch.float64)
    for actual, wanted in zip(loss_and_gradients(layer, features, target, label_smoothing=0.1), expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    ignored = target.clone()
    ignored[::2] = 1
    *_, found = loss_and_gradients(layer, features, ignored, label_smoothing=0.1, ignore_index=1)
    loss, _ = layer.loss(features[1::2], target[1::2], label_smoothing=0.1)
    torch.testing.assert_close(found, torch.autograd.grad(loss, layer.slopes_raw)[0], rtol=1e-12, atol=1e-12)


@each_impl
def test_two_runs_are_equal_to_the_last_bit(impl):
    layer = build("plif", output_impl=impl, plif_pieces=100_000, plif_range=20.0).float()
    features = batch()[0].detach().float().requires_grad_()
    runs = [loss_and_gradients(layer, features, batch()[1], label_smoothing=0.1) for _ in range(2)]
    assert all(torch.equal(*both) for both in zip(*runs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_layer
def test_fused_is_as_precise_as_eager(name, dtype):
    """Against float64 with the same rounded parameters; eager is torch's own operations in the same type."""
    # One piece: of several, a score that is rounded across a knot would have another slope, in either.
    layer = build(name, plif_pieces=1).to(dtype).double()
    features, target = batch(size=400)
    features = features.detach().to(dtype).double().requires_grad_()
    wanted = loss_and_gradients(layer, features, target)
    errors = {}
    for impl in "eager", "fused":
        narrow = twin(layer, impl).to(dtype)
        found = loss_and_gradients(narrow, features.detach().to(dtype).requires_grad_(), target)
        errors[impl] = mean_square_errors(found, wanted)
    slack = max(torch.finfo(dtype).eps / 100, 4e-7)  # a sum over tokens may be off by less than any of its parts
    assert all(fused <= 1.25 * eager + slack for fused, eager in zip(errors["fused"], errors["eager"])), errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_layer
def test_the_map_of_half_precision_is_in_float32(name, dtype):
    """With as many pieces as the default, whose numbers half precision has not; a line, so that no score that is
    rounded has another slope."""
    torch.manual_seed(0)
    config = OutputLayerConfig(output_layer=name, plif_init_std=0.0, output_impl="eager")
    layer = build_output_layer(config, feature_dim=8, vocab_size=50).to(dtype)
    features = (10 * torch.randn(20, 8)).to(dtype)
    scores = F.linear(features, layer.weight, layer.bias)
    assert scores.abs().max() > 15
    values = layer(features)
    expected = layer.double().curve().value(scores.double())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-3)


@each_impl
def test_numbers_that_are_none_reach_the_loss(impl):
    """NaN and infinity among the features are the trainer's to report: not an index out of a table."""
    for name in LAYERS:
        for bad in math.nan, math.inf:
            layer = build(name, output_impl=impl)
            features, target = batch()
            with torch.no_grad():
                features[3, 2] = bad
            assert not layer.loss(features, target)[0].isfinite()


def test_a_curve_that_hides_what_it_learns_is_refused():
    """A fused loss could give its parameter no gradient; the eager one does."""

    class Power(Curve):
        def __init__(self, log_power):
            self.log_power = log_power

        def value(self, scores):
            return scores * self.log_power.exp()

    class PowerSoftmax(MonotoneSoftmax):
        def build_parameters(self):
            self.log_power = torch.nn.Parameter(torch.zeros(1))

        def curve(self):
            return Power(self.log_power)

    features, target = batch()
    eager = PowerSoftmax(OutputLayerConfig(output_layer="softmax", output_impl="eager"), D, V).double()
    eager.loss(features, target)[0].backward()
    assert eager.log_power.grad.abs() > 0
    layer = PowerSoftmax(OutputLayerConfig(output_layer="softmax"), D, V).double()
    with pytest.raises(UserError, match="Power depends on tensors that want a gradient.*or use --output-impl eager"):
        layer.loss(features, target)
    layer.weight.requires_grad_(False), layer.bias.requires_grad_(False)
    with pytest.raises(UserError, match="Power depends on"):
        layer.loss(features.detach(), target)
    with torch.no_grad():
        assert layer.loss(features, target)[0].isfinite()


# ------------------------------------------------------------------------------------------------- slopes that stay


def test_slopes_start_around_one():
    torch.manual_seed(0)
    config = OutputLayerConfig(output_layer="plif")
    layer = build_output_layer(config, D, V)
    assert layer.slopes_raw.shape == (100_000,) and layer.slopes_raw.requires_grad
    slopes = F.softplus(layer.slopes_raw.detach().double())
    assert slopes.mean().item() == pytest.approx(1.106, abs=0.01) and slopes.std().item() == pytest.approx(
        0.63, abs=0.01
    )
    curve = PiecewiseLinear(slopes, 20.0)
    scores = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    line = scores * slopes.mean()
    assert (curve.value(scores) - line).abs().max() < 0.15  # the frozen map is a temperature, but for its derivative

    straight = build_output_layer(dataclasses.replace(config, plif_init_std=0.0), D, V)
    torch.testing.assert_close(F.softplus(straight.slopes_raw), torch.ones(100_000))


@each_impl
def test_frozen_slopes(impl):
    layer = build("plif", output_impl=impl, freeze_plif=True)
    assert not layer.slopes_raw.requires_grad and "slopes_raw" in layer.state_dict()
    assert not hasattr(layer.slopes_raw, "optim_overrides")
    learned = build("plif", output_impl=impl)
    learned.load_state_dict(layer.state_dict())
    features, target = batch()
    frozen, all_of_them = (loss_and_gradients(x, features, target, label_smoothing=0.1) for x in (layer, learned))
    assert len(all_of_them) == len(frozen) + 1
    for ours, theirs in zip(frozen, all_of_them):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gss_k": 0.0}, "--gss-k 0.0 .*more than 0"),
        ({"gss_c": math.inf}, "--gss-c inf .*any number, and finite"),
        ({"plif_pieces": 0}, "--plif-pieces 0 .*at least 1"),
        ({"plif_range": 0.0}, "--plif-range 0.0 .*more than 0"),
        ({"plif_init_std": -1.0}, "--plif-init-std -1.0 .*0 or more"),
        ({"plif_lr_scale": 0.0}, "--plif-lr-scale 0.0 .*more than 0"),
        ({"context_scale_lr_scale": 0.0}, "--context-scale-lr-scale 0.0 .*more than 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        build_output_layer(OutputLayerConfig(output_layer="plif", **options), D, V)
