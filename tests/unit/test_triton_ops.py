"""The Triton kernels against formulas in float64: compiled on an NVIDIA GPU, in Triton's interpreter elsewhere."""

import functools
import inspect
import math
import os
import subprocess
import sys
from unittest import mock

import gate_noise
import pytest
import torch
from half_precision import assert_rounded_alone

from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, build_output_layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton chooses between compiler and interpreter where a kernel is defined, for its own when it is imported, and
# looks again at the first launch. The variable is set for this file alone; that Triton was imported with it harms no
# other test: without a GPU none can run a kernel in another way.
MODE = {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}
with mock.patch.dict(os.environ, MODE):
    triton = pytest.importorskip("triton")
    from mixtape_plugin.kernels import common, dispatch, mixtape, torch_ops
    from mixtape_plugin.kernels import triton_ops as ops
    from mixtape_plugin.kernels.curves import Curve, GeneralizedSigSoftmax, PiecewiseLinear
    from mixtape_plugin.kernels.sigmoid_tree import nodes_bottom_up, rightmost_leaves

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# infinities and NaN are part of the tests; numpy, which the interpreter computes with, warns of them
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|overflow) encountered|All-NaN slice:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def interpreter():
    with mock.patch.dict(os.environ, MODE):
        yield


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a row at sizes that the interpreter gets through."""
    monkeypatch.setattr(ops, "MAX_ROW_BLOCK", 16)
    monkeypatch.setattr(ops, "MAX_TILE", 64)
    monkeypatch.setattr(ops, "MAX_MIX_BLOCK", 16)


def draw(shape, dtype, scale=2.0, seed=0):
    """Normal numbers as a view of longer rows, whose rest must stay as it is, and the same in float64."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (scale * torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)).to(dtype)
    return numbers.to(DEVICE)[..., : shape[-1]], numbers[..., : shape[-1]].double().clone()


def rest(view):
    """What lies between the rows of a view that :func:`draw` made."""
    return torch.as_strided(view, (*view.shape[:-1], 3), view.stride(), view.storage_offset() + view.size(-1)).clone()


def assert_rounded(actual, expected, scale=1.0):
    """Float64 and float32 to their last digits; half precision no worse than one rounding of the exact result."""
    dtype = actual.dtype
    error = (actual.cpu().double() - expected).abs()
    accumulated = 1e-14 if dtype == torch.float64 else 2e-6
    rounding = 0.0
    if dtype in (torch.bfloat16, torch.float16):
        # rounding to the nearest is off by half of eps at most; the interpreter cuts bfloat16 off instead
        cuts = dtype == torch.bfloat16 and DEVICE == "cpu"
        rounding = torch.finfo(dtype).eps * (1.0 if cuts else 0.5)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # float16 has few exponents
    bound = rounding * expected.abs() + accumulated * scale * (1 + expected.abs()) + smallest
    assert (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"


def some_targets(n, size, seed=1):
    return torch.randint(size, (n,), generator=torch.Generator().manual_seed(seed))


def to_device(*tensors):
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("module", (torch_ops, ops))
def test_both_modules_have_the_operations_that_dispatch_names(module):
    names = [name for name, value in vars(dispatch.Elementwise).items() if inspect.isfunction(value) and name[0] != "_"]
    assert len(names) == 6
    for name in names:
        _, *expected = inspect.signature(getattr(dispatch.Elementwise, name)).parameters.values()  # without self
        found = inspect.signature(getattr(module, name)).parameters.values()
        assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in expected]


# ---------------------------------------------------------------------------------------------- softmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, size", [(1, 1), (1, 16), (4, 37), (2, 100)])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax(dtype, n, size, masked):
    logits, exact = draw((n, size), dtype)
    before = rest(logits)
    target = some_targets(n, size)
    bias = None
    if masked:
        bias = torch.randn(size, generator=torch.Generator().manual_seed(2))
        bias[: size // 2] = -math.inf  # whole blocks
        bias[target] = 0.3
        exact = exact + bias.double()
    exact.requires_grad_()
    log_probs = exact.log_softmax(1)
    nll = -log_probs.gather(1, target[:, None]).squeeze(1)
    (0.9 * nll + 0.1 * exact.logsumexp(1)).sum().backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    actual = ops.softmax_minus_label_(logits, *to_device(None if bias is None else bias.to(wide), target), 0.9, 3.0)
    expected_gradient = 3.0 * exact.grad
    assert_rounded(logits, expected_gradient)
    assert_rounded(actual[0], nll.detach(), scale=2.0)
    assert_rounded(actual[1], exact.detach().logsumexp(1), scale=2.0)
    assert actual[0].dtype == actual[1].dtype == wide
    if masked:
        assert (logits[:, bias.to(DEVICE) == -math.inf] == 0).all()
    assert torch.equal(rest(logits), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_label_is_subtracted_before_rounding(dtype):
    """p = 1 - 3e-4 is 1 in bfloat16, p - 1 is not 0."""
    logits = torch.tensor([[8.0, 0.0]], dtype=dtype, device=DEVICE)
    ops.softmax_minus_label_(logits, None, torch.tensor([0], device=DEVICE), 1.0)
    exact = -1 / (1 + math.exp(8.0))
    expected = torch.tensor([[exact, -exact]], dtype=torch.float64)
    assert (logits.cpu().double() / expected - 1).abs().max() < (5e-3 if torch.finfo(dtype).bits == 16 else 5e-4)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_underflowing_targets_have_a_finite_loss(dtype):
    logits, exact = draw((6, 50), dtype, scale=200.0)
    target = exact.argmin(1)
    nll, log_sum_exp = ops.softmax_minus_label_(logits, None, target.to(DEVICE), 1.0)
    assert (exact.softmax(1).gather(1, target[:, None]) < 1e-200).all()  # the test's own: 0 in float32
    assert torch.isfinite(logits).all()
    expected = exact.logsumexp(1) - exact.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(nll.cpu().double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(log_sum_exp.cpu().double(), exact.logsumexp(1), rtol=1e-6, atol=0)


def test_masked_target():
    logits, exact = draw((2, 40), torch.float32)
    bias = torch.zeros(40)
    bias[:20] = -math.inf
    nll, log_sum_exp = ops.softmax_minus_label_(logits, *to_device(bias, torch.tensor([3, 30])), 1.0)
    assert nll[0] == math.inf and torch.isfinite(nll[1]) and torch.isfinite(log_sum_exp).all()
    expected = (exact + bias).softmax(1)
    expected[0, 3] -= 1
    expected[1, 30] -= 1
    assert_rounded(logits, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_overflow_is_not_hidden(bad):
    """A loss scaler skips the step when it sees one of these in the gradient, a trainer stops at such a loss."""
    for column in (0, 20):
        logits, _ = draw((2, 40), torch.float32)
        logits[1, column] = bad
        nll, _ = ops.softmax_minus_label_(logits, None, torch.tensor([5, 5], device=DEVICE), 1.0)
        assert torch.isfinite(logits[0]).all() and torch.isfinite(nll[0])
        assert not torch.isfinite(logits[1]).all() and not torch.isfinite(nll[1])

        logits, _ = draw((2, 3, 40), torch.float32)
        logits[1, 2, column] = bad
        prior = torch.zeros(2, 3, device=DEVICE)
        nll, spread, *_ = ops.mos_smoothing_(logits, None, prior, torch.tensor([5, 5], device=DEVICE), 0.9, 0.1, None)
        assert torch.isfinite(logits[0]).all() and torch.isfinite(nll[0])
        assert not torch.isfinite(logits[1]).all() and not torch.isfinite(nll[1]) and not torch.isfinite(spread[1])


@pytest.mark.parametrize("wrong", [-1, 20, 2**40])
def test_loss_and_gradient_of_a_target_outside_the_vocabulary_are_nan(wrong):
    logits, _ = draw((2, 20), torch.float32)
    nll, _ = ops.softmax_minus_label_(logits, None, torch.tensor([wrong, 3], device=DEVICE), 0.9)
    assert nll[0].isnan() and logits[0].isnan().all() and nll[1].isfinite() and logits[1].isfinite().all()

    logits, _ = draw((2, 3, 20), torch.float32)
    log_prior = torch.full((2, 3), -math.log(3), device=DEVICE)
    bias = torch.zeros(20, device=DEVICE)
    target = torch.tensor([wrong, 3], device=DEVICE)
    nll, *_ = ops.mos_smoothing_(logits, bias, log_prior, target, 0.9, 0.01, None)
    assert nll[0].isnan() and logits[0].isnan().all() and nll[1].isfinite() and logits[1].isfinite().all()


def test_no_tokens():
    nothing = torch.empty(0, dtype=torch.long, device=DEVICE)
    assert [len(x) for x in ops.softmax_minus_label_(torch.empty(0, 5, device=DEVICE), None, nothing, 1.0)] == [0, 0]
    empty = torch.empty(0, 3, 5, device=DEVICE), None, torch.empty(0, 3, device=DEVICE), nothing
    assert [x.shape for x in ops.mos_smoothing_(*empty, 1.0, 0.1, None)] == [(0,), (0,), (0, 3), (0, 3)]
    leaves, gates, out = (torch.empty(*shape, device=DEVICE) for shape in ((3, 0, 5), (2, 0, 5), (0, 5)))
    ops.mix_(leaves, gates, 0.1, out)
    ops.mix_backward_(leaves, gates, out)


# ---------------------------------------------------------------------------------------------- softmax of a curve


def make_curve(kind, slopes=None):
    slopes = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.1
    if kind == "one piece":
        slopes = slopes[:1]
    return {"gss": GeneralizedSigSoftmax(-0.7, 2.5), "k < 1": GeneralizedSigSoftmax(0.5, 0.3)}.get(
        kind
    ) or PiecewiseLinear(slopes, 1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gss", "k < 1", "pieces", "one piece"])
@pytest.mark.parametrize("n, size", [(1, 1), (4, 37), (2, 100)])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_of_a_curve(dtype, kind, n, size, masked):
    """Against torch's derivative of the formula in float64, of the slopes too."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits, exact = draw((n, size), dtype)
    before = rest(logits)
    target = some_targets(n, size)
    bias = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(wide)
    mask = torch.zeros(size, dtype=torch.bool)
    if masked:
        mask[: size // 2] = True
        mask[target] = False
    curve = make_curve(kind)
    leaves = [exact.requires_grad_()]
    if isinstance(curve, PiecewiseLinear):
        leaves.append(curve.slopes.requires_grad_())
    log_probs = curve.value(exact + bias.double()).masked_fill(mask, -math.inf).log_softmax(1)
    nll = -log_probs.gather(1, target[:, None]).squeeze(1)
    spread = -log_probs[:, ~mask].sum(1)
    # the sum of target_weight and of every epsilon is 1, as it is for a label-smoothed loss: Σ_j B_j = 0
    epsilon = 0.01
    target_weight = 1 - epsilon * int((~mask).sum())
    expected = torch.autograd.grad((target_weight * nll + epsilon * spread).sum(), leaves)

    curve = make_curve(kind)
    if isinstance(curve, PiecewiseLinear):
        curve.slopes = curve.slopes.to(DEVICE)
    curve.begin(wide, True)
    place = mask.to(DEVICE) if masked else None
    actual = ops.curve_softmax_minus_label_(logits, *to_device(bias, target), curve, target_weight, epsilon, place, 3.0)
    assert_rounded(logits, 3.0 * expected[0], scale=4.0)
    assert_rounded(actual[0], nll.detach(), scale=4.0)
    assert_rounded(actual[1], spread.detach(), scale=4.0)
    assert actual[0].dtype == actual[1].dtype == wide
    assert torch.equal(rest(logits), before)
    for found, wanted in zip(curve.gradients().values(), expected[1:]):
        tolerance = 1e-9 if dtype == torch.float64 else 3e-5
        torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance)


def test_softmax_of_a_curve_without_a_kernel():
    class Cubic(Curve):
        def value(self, scores):
            return scores + scores**3

    logits, exact = draw((3, 20), torch.float32, scale=0.5)
    exact.requires_grad_()
    target = some_targets(3, 20)
    nll = torch.nn.functional.cross_entropy(exact + exact**3, target, reduction="none")
    nll.sum().backward()
    actual = ops.curve_softmax_minus_label_(logits, None, target.to(DEVICE), Cubic(), 1.0, 0.0, None)
    assert_rounded(logits, exact.grad, scale=3.0)
    assert_rounded(actual[0], nll.detach(), scale=3.0)


def test_softmax_of_a_curve_with_wrong_targets_and_numbers():
    for kind in "gss", "pieces":
        for bad in math.nan, math.inf:
            curve = make_curve(kind)
            curve.begin(torch.float32, False)
            if kind == "pieces":
                curve.tables = to_device(*curve.tables)
            logits, _ = draw((3, 40), torch.float32)
            logits[1, 20] = bad
            targets = torch.tensor([5, 5, 40], device=DEVICE)
            nll, _ = ops.curve_softmax_minus_label_(logits, None, targets, curve, 0.9, 0.1, None)
            assert nll[0].isfinite() and logits[0].isfinite().all()
            assert not nll[1].isfinite() and not logits[1].isfinite().all()
            assert nll[2].isnan() and logits[2].isnan().all()


def test_pieces_of_scores_too_large_for_an_integer():
    """They lie on the end pieces, so that log p is their slope times a score, but for a number that is far smaller."""
    for large in 1e19, 1e30:
        for sign in 1, -1:
            curve = make_curve("pieces")
            curve.begin(torch.float64, False)
            curve.tables = to_device(*curve.tables)
            scores = torch.tensor([[0.0, sign * large]], dtype=torch.float64, device=DEVICE)
            unlikely = torch.tensor([0 if sign > 0 else 1], device=DEVICE)
            nll, _ = ops.curve_softmax_minus_label_(scores, None, unlikely, curve, 1.0, 0.0, None)
            assert nll.item() / large == pytest.approx(curve.slopes[-1 if sign > 0 else 0].item(), rel=1e-12)


# ---------------------------------------------------------------------------------------------- mixture of softmaxes


def mixture(scores, log_prior, target, mask):
    """nll, spread and the log joint [n, K, V] of a mixture of softmaxes, literally."""
    log_joint = log_prior.unsqueeze(2) + scores.log_softmax(2)
    log_probs = log_joint.exp().sum(1).log()
    nll = -log_probs.gather(1, target[:, None]).squeeze(1)
    spread = -(log_probs[:, ~mask].sum(1))
    return nll, spread, log_joint, log_probs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k, size", [(1, 1, 1), (1, 2, 16), (3, 3, 37), (2, 9, 30)])
@pytest.mark.parametrize("masked", [False, True])
def test_mixture_of_softmaxes(dtype, n, k, size, masked):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits, exact = draw((n, k, size), dtype, scale=1.0)
    before = rest(logits)
    log_prior = torch.randn(n, k, generator=torch.Generator().manual_seed(3)).log_softmax(1)
    target = some_targets(n, size)
    mask = torch.zeros(size, dtype=torch.bool)
    bias = None
    if masked:
        mask[: size // 2] = True
        mask[target] = False
        bias = torch.randn(size, generator=torch.Generator().manual_seed(2)).masked_fill(mask, -math.inf)
    scores = exact[:, :, ~mask].requires_grad_()  # a mixture over the tokens that can be predicted alone
    biased = scores if bias is None else scores + bias[~mask].double()
    place = torch.cumsum(~mask, 0)[target] - 1
    nothing = torch.zeros(biased.size(2), dtype=torch.bool)
    nll, spread, log_joint, log_probs = mixture(biased, log_prior.double(), place, nothing)
    (0.8 * nll + 0.05 * spread).sum().backward()
    posteriors = (log_joint - log_probs.unsqueeze(1)).exp().detach()

    arguments = to_device(None if bias is None else bias.to(wide), log_prior.to(wide), target)
    actual = ops.mos_smoothing_(logits, *arguments, 0.8, 0.05, mask.to(DEVICE) if masked else None, 2.0)
    expected = torch.zeros_like(exact)
    expected[:, :, ~mask] = 2.0 * scores.grad
    assert_rounded(logits, expected, scale=3.0)
    assert_rounded(actual[0], nll.detach(), scale=3.0)
    assert_rounded(actual[1], spread.detach(), scale=3.0)
    assert_rounded(actual[2], posteriors.gather(2, place.view(-1, 1, 1).expand(-1, k, 1)).squeeze(2), scale=3.0)
    assert_rounded(actual[3], posteriors.sum(2), scale=3.0)
    assert all(result.dtype == wide for result in actual)
    assert (logits[:, :, mask.to(DEVICE)] == 0).all()
    assert torch.equal(rest(logits), before)


def test_mixture_of_softmaxes_over_any_strides():
    """[K, n, V] seen as [n, K, V] is the same as a contiguous tensor."""
    contiguous, _ = draw((3, 4, 40), torch.float32)
    strided = contiguous.transpose(0, 1).contiguous().transpose(0, 1)
    assert strided.stride() != contiguous.stride()
    prior = torch.full((3, 4), -math.log(4.0), device=DEVICE)
    results = [
        ops.mos_smoothing_(logits, None, prior, some_targets(3, 40).to(DEVICE), 0.9, 0.1, None)
        for logits in (contiguous, strided)
    ]
    for left, right in zip(results[0], results[1]):
        assert torch.equal(left, right)
    assert torch.equal(contiguous, strided)


def test_mixture_of_softmaxes_far_from_the_target():
    """Probabilities that underflow, for each component and in the mixture; a target that cannot be predicted."""
    logits, exact = draw((4, 3, 40), torch.float32, scale=200.0)
    log_prior = torch.zeros(4, 3) - math.log(3.0)
    target = exact.logsumexp(1).argmin(1)
    joint = log_prior.double().unsqueeze(2) + exact.log_softmax(2)
    log_probs = torch.logsumexp(joint, 1)
    assert (log_probs.gather(1, target[:, None]) < -200).all()
    nll, spread, posterior, rho = ops.mos_smoothing_(
        logits.clone(), *to_device(None, log_prior, target), 0.9, 0.01, None
    )
    torch.testing.assert_close(nll.cpu().double(), -log_probs.gather(1, target[:, None]).squeeze(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(spread.cpu().double(), -log_probs.sum(1), rtol=1e-6, atol=0)
    shares = (joint - log_probs.unsqueeze(1)).exp()
    expected = shares.gather(2, target.view(-1, 1, 1).expand(-1, 3, 1)).squeeze(2)
    torch.testing.assert_close(posterior.cpu().double(), expected, rtol=0, atol=2e-4)  # 1000 is exact to 6e-5
    torch.testing.assert_close(rho.cpu().double(), shares.sum(2), rtol=0, atol=2e-3)

    bias = torch.zeros(40)
    bias[:20] = -math.inf
    mask = bias == -math.inf
    results = ops.mos_smoothing_(
        logits, *to_device(bias, log_prior, torch.tensor([3, 30, 30, 30])), 0.9, 0.01, mask.to(DEVICE)
    )
    assert results[0][0] == math.inf and torch.isfinite(results[0][1:]).all()
    assert all(torch.isfinite(result).all() for result in (logits, *results[1:]))


# ---------------------------------------------------------------------------------------------- sigmoid tree


def priors(gates):
    """π_k [K, ...] of the sigmoid tree from γ [K−1, ...]: the product of the choices on the way to each leaf."""
    num_gates = len(gates)
    leaves = []

    def walk(node, share):
        if node >= num_gates:
            leaves.append(share)
        else:
            walk(2 * node + 1, share * gates[node])
            walk(2 * node + 2, share * (1 - gates[node]))

    walk(0, torch.ones_like(gates[0]))
    return torch.stack(leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "k, n, size", [(2, 1, 1), (3, 2, 37), (4, 3, 40), (5, 1, 16), (6, 2, 9), (7, 1, 20), (8, 2, 33)]
)
def test_sigmoid_tree(dtype, k, n, size):
    leaves, exact_leaves = draw((k, n, size), dtype, scale=1.0)
    gates, exact_logits = draw((k - 1, n, size), dtype, seed=1)
    out, _ = draw((n, size), dtype, seed=2)
    before = [rest(tensor) for tensor in (leaves, gates, out)]
    exact_leaves.requires_grad_(), exact_logits.requires_grad_()
    mixed = (priors(exact_logits.sigmoid()) * exact_leaves).sum(0)

    ops.mix_(leaves, gates, 0.0, out)
    assert_rounded(out, mixed.detach(), scale=3.0)
    assert_rounded(gates, exact_logits.detach().sigmoid(), scale=3.0)

    grad, exact_grad = draw((n, size), dtype, scale=0.5, seed=3)
    out.copy_(grad)
    ops.mix_backward_(leaves, gates, out)
    mixed.backward(exact_grad)
    if torch.finfo(dtype).bits > 16:
        assert_rounded(leaves, exact_leaves.grad, scale=3.0)
        assert_rounded(gates, exact_logits.grad, scale=3.0)
    else:  # γ and differences were rounded, too, once for each level
        eps = torch.finfo(dtype).eps * 4
        torch.testing.assert_close(leaves.cpu().double(), exact_leaves.grad, rtol=eps, atol=eps)
        torch.testing.assert_close(gates.cpu().double(), exact_logits.grad, rtol=eps, atol=eps)
    assert torch.equal(out, grad)
    assert all(torch.equal(rest(tensor), old) for tensor, old in zip((leaves, gates, out), before))


@pytest.mark.parametrize("k", [2, 9, 300])
def test_components_and_slots_of_a_large_tree(k):
    """Packed into an integer, none runs into its neighbour."""
    components, slots = ops.tree_slots(k)
    assert [components >> 16 * node & 65535 for node in range(2 * k - 1)] == list(rightmost_leaves(k))
    found = {node.number: slots >> 16 * node.number & 65535 for node in nodes_bottom_up(k)}
    assert found == {node.number: node.left for node in nodes_bottom_up(k)} and slots >> 16 * k == 0


@pytest.mark.parametrize("k", range(2, 10))
def test_what_the_sigmoid_tree_leaves_behind_is_that_of_torch_ops(k):
    tensors = [draw((rows, 2, 20), torch.float64, seed=rows)[0].clone() for rows in (k, k - 1)]
    results = []
    for forward, backward in ((ops, torch_ops), (torch_ops, ops), (torch_ops, torch_ops)):
        leaves, gates = (tensor.clone() for tensor in tensors)
        out = torch.empty(2, 20, dtype=torch.float64, device=DEVICE)
        forward.mix_(leaves, gates, 0.0, out)
        result = out.clone()
        backward.mix_backward_(leaves, gates, out)
        results.append((result, leaves, gates))
    for result in results[:2]:
        torch.testing.assert_close(result, results[2], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_saturated_gates(logit):
    leaves = torch.tensor([1.0, 2.0], device=DEVICE).view(2, 1, 1)
    gates = torch.full((1, 1, 1), logit, device=DEVICE)
    out = torch.empty(1, 1, device=DEVICE)
    ops.mix_(leaves, gates, 0.0, out)
    assert out.item() == (1.0 if logit > 0 else 2.0)
    ops.mix_backward_(leaves, gates, torch.ones(1, 1, device=DEVICE))
    assert leaves.flatten().tolist() == ([1.0, 0.0] if logit > 0 else [0.0, 1.0])
    assert gates.item() == 0.0


# ---------------------------------------------------------------------------------------------- noise


drawn_noise = functools.partial(gate_noise.drawn_noise, ops, DEVICE)


@pytest.fixture
def large_blocks(monkeypatch, small_blocks):
    monkeypatch.setattr(ops, "MAX_MIX_BLOCK", 256)


def test_noise_is_standard_normal(large_blocks):
    torch.manual_seed(0)
    gate_noise.assert_standard_normal(drawn_noise()[0])


def test_noise_is_independent(large_blocks):
    torch.manual_seed(0)
    numbers, again = drawn_noise()[0], drawn_noise()[0]
    gate_noise.assert_independent(numbers, again)
    streams = torch.cat([numbers, again])
    # 32 bits make each of the numbers, so that very few are alike by chance; a counter that repeats makes thousands
    assert len(streams.unique()) > 0.999 * streams.numel()


def test_noise_follows_the_seed(large_blocks):
    torch.manual_seed(3)
    first, _ = drawn_noise(size=40)
    second, _ = drawn_noise(size=40)
    torch.manual_seed(3)
    again, _ = drawn_noise(size=40)
    assert torch.equal(first, again) and not torch.equal(first, second)
    ops.MAX_MIX_BLOCK = 16  # how columns are shared out does not matter; monkeypatch puts it back
    torch.manual_seed(3)
    assert torch.equal(first, drawn_noise(size=40)[0])


def test_noise_is_scaled_and_used():
    torch.manual_seed(1)
    small, _ = drawn_noise(k=4, n=2, size=40, noise=0.1)
    torch.manual_seed(1)
    large, (values, leaves, gates, out) = drawn_noise(k=4, n=2, size=40, noise=1.5)
    torch.testing.assert_close(small, large, rtol=1e-6, atol=1e-6)  # the numbers are float32
    torch.testing.assert_close(out, (priors(gates) * values).sum(0), rtol=1e-12, atol=1e-12)


def test_no_noise_leaves_the_generator_alone():
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    drawn_noise(k=2, n=1, size=3, noise=0.0)
    assert torch.equal(torch.rand(1), expected)


# ---------------------------------------------------------------------------------------------- whole losses


@pytest.fixture
def small_chunks(monkeypatch):
    """The fused losses over these kernels, in chunks of a few tokens."""
    for module in (common, mixtape):
        monkeypatch.setattr(module, "elementwise", lambda device: ops)
    monkeypatch.setattr(common, "CHUNK_BYTES", {"torch": 3000})
    monkeypatch.setattr(common, "MIN_ROWS", 1)


def build_small(name, masked=(), **options):
    """An eager layer of 12 features and 37 tokens, without noise."""
    torch.manual_seed(0)
    embed_dim = 8 if OUTPUT_LAYERS[name].has_projection else 12
    options = {"output_embed_dim": embed_dim, "gate_dim": 5, "gate_noise": 0.0, **options}
    config = OutputLayerConfig(output_layer=name, output_impl="eager", **options)
    return build_output_layer(config, 12, 37, masked_tokens=masked).to(DEVICE)


@pytest.mark.parametrize("masked", [(), (1, 30)])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", [name for name, layer in OUTPUT_LAYERS.items() if layer.has_fused_loss()])
def test_fused_losses_over_the_kernels(name, label_smoothing, masked, small_chunks):
    """Chunks of padded buffers, which only these kernels have, against the eager loss."""
    layer = build_small(name, masked).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    features = torch.randn(3, 7, 12, dtype=torch.float64, device=DEVICE, requires_grad=True)
    target = torch.randint(2, 30, (3, 7), device=DEVICE)
    target[0, 3] = target[2, 6] = -100
    results = []
    for layer.config.output_impl in ("eager", "fused"):
        loss, nll = layer.loss(features, target, label_smoothing=label_smoothing)
        results.append([loss, nll, *torch.autograd.grad(loss, [features, *layer.parameters()])])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast bfloat16"])
@pytest.mark.parametrize("name", [name for name, layer in OUTPUT_LAYERS.items() if layer.has_fused_loss()])
def test_fused_losses_over_the_kernels_in_half_precision(name, how, small_chunks):
    """Against the formula in float64. A GPU adds up products in float32 by an operation of its own."""
    layer = build_small(name, context_scale=2.0, plif_pieces=8)  # few: a rounded score may be on the next piece
    features = torch.randn(21, 12, device=DEVICE)
    target = torch.randint(2, 30, (21,), device=DEVICE)
    assert_rounded_alone(layer, features, target, how, label_smoothing=0.1)


# ---------------------------------------------------------------------------------------------- compiler and GPU

COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from mixtape_plugin.kernels import triton_ops as ops
from mixtape_plugin.kernels.curves import GeneralizedSigSoftmax, PiecewiseLinear


class NoDevice:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


def compile_only(kernel, programs, *arguments, **constants):
    compiled = kernel.run(*arguments, grid=(programs,), warmup=True, **constants)
    print(kernel.fn.__name__, len(compiled.asm["cubin"]) > 0)
    kernels.append(compiled)


triton.runtime.driver.set_active(NoDevice())
ops.launch = compile_only
target = torch.zeros(8, dtype=torch.long)
kernels = []
for start, end in (0, 2), (0, 4), (1, 5):  # per token: offsets of 8 and 16 bytes
    ops.softmax_minus_label_(torch.empty(end - start, 1000), None, target[start:end], 0.9)
    prior = torch.zeros(8, 3)[start:end]
    ops.mos_smoothing_(torch.empty(end - start, 3, 1000), None, prior, target[start:end], 0.9, 0.1, None)
print(len({id(kernel) for kernel in kernels}), "different")
target = target[:2]
for dtype in (torch.bfloat16, torch.float64):
    bias = torch.zeros(1000, dtype=torch.promote_types(dtype, torch.float32))
    ops.softmax_minus_label_(torch.empty(2, 1000, dtype=dtype), bias, target, 0.9)
    logits, prior = torch.empty(2, 5, 1000, dtype=dtype), torch.zeros(2, 5)
    ops.mos_smoothing_(logits, bias, prior, target, 0.9, 0.1, torch.zeros(1000, dtype=torch.bool))
    for curve in GeneralizedSigSoftmax(-1.5, 2.5), PiecewiseLinear(torch.ones(100_000), 20.0):
        curve.begin(bias.dtype, True)
        mask = torch.zeros(1000, dtype=torch.bool)
        ops.curve_softmax_minus_label_(torch.empty(2, 1000, dtype=dtype), bias, target, curve, 0.9, 0.1, mask)
    leaves, gates, out = (torch.empty(*shape, 2, 100, dtype=dtype) for shape in ((4,), (3,), ()))
    ops.mix_(leaves, gates, 0.1, out)
    ops.mix_backward_(leaves, gates, out)
ops.softmax_minus_label_(torch.empty(1, 1), None, target[:1], 1.0)
ops.mos_smoothing_(torch.empty(1, 1, 1), None, torch.empty(1, 1), target[:1], 1.0, 0.1, None)
ops.mix_(torch.empty(2, 1, 1), torch.empty(1, 1, 1), 0.0, torch.empty(1, 1))
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    """The interpreter runs Python that the compiler refuses: types, constants, shapes."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    result = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if "_kernel" in line]
    assert len(lines) == 6 + 15 and all(line.endswith("True") for line in lines)
    assert "2 different" in result.stdout  # softmax and MoS, wherever a chunk begins


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_block_sizes_of_real_vocabularies(dtype, monkeypatch):
    """With the blocks that training uses: the tests above use smaller ones."""
    monkeypatch.undo()
    for n, size in ((3, 10000), (2, 33278), (2, 100003)):
        logits, exact = draw((n, size), dtype)
        target = some_targets(n, size)
        nll, log_sum_exp = ops.softmax_minus_label_(logits, None, target.to(DEVICE), 1.0)
        expected = exact.softmax(1)
        expected[range(n), target] -= 1
        assert_rounded(logits, expected)
        torch.testing.assert_close(log_sum_exp.cpu().double(), exact.logsumexp(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            nll.cpu().double(), exact.logsumexp(1) - exact[range(n), target], rtol=1e-5, atol=1e-5
        )
    for k in (4, 9, 15):
        logits, exact = draw((2, k, 5001), dtype)
        prior = torch.full((2, k), -math.log(k))
        results = ops.mos_smoothing_(logits, *to_device(None, prior, some_targets(2, 5001)), 0.9, 1e-4, None)
        nll, spread, *_ = mixture(exact, prior.double(), some_targets(2, 5001), torch.zeros(5001, dtype=torch.bool))
        torch.testing.assert_close(results[0].cpu().double(), nll, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[1].cpu().double(), spread, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """The last row of a buffer of more than 2³¹ elements."""
    n, size = 2**16 + 1, 2**15
    logits = torch.zeros(n, size, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, -1] = 3.0
    nll, _ = ops.softmax_minus_label_(logits, None, torch.full((n,), size - 1, device=DEVICE), 1.0)
    assert nll[-1].item() == pytest.approx(math.log(size - 1 + math.exp(3.0)) - 3.0, rel=1e-5)
    assert nll[-2].item() == pytest.approx(math.log(size), rel=1e-5)
    assert logits[-1, -1].item() == pytest.approx(math.exp(-nll[-1].item()) - 1, rel=0.01)
    assert logits[-1, 0].item() == pytest.approx(math.exp(-nll[-1].item() - 3), rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 20, 40, 60, 100, 10000])
def test_runs_are_equal_to_the_last_bit(size, monkeypatch):
    """What a row reads after another thread has written it would differ from run to run."""
    monkeypatch.undo()  # the blocks that training uses
    n, k = 4000, 3
    generator = torch.Generator(DEVICE).manual_seed(0)
    scores = torch.randn(n, k, size, device=DEVICE, generator=generator)
    target = torch.randint(size, (n,), device=DEVICE, generator=generator)
    prior = torch.full((n, k), -math.log(k), device=DEVICE)

    def results():
        pieces = PiecewiseLinear(torch.linspace(0.5, 2, 1000, device=DEVICE), 20.0)
        pieces.begin(scores.dtype, True)
        tensors = []
        for curve in (None, GeneralizedSigSoftmax(-1.5, 2.5), pieces):
            logits = scores[:, 0].clone()
            if curve is None:
                tensors += [logits, *ops.softmax_minus_label_(logits, None, target, 0.9)]
            else:
                rest = ops.curve_softmax_minus_label_(logits, None, target, curve, 0.9, 1e-4, None)
                tensors += [logits, *rest]
        mixed, leaves, gates = scores.clone(), scores.transpose(0, 1).clone(), scores[:, 1:].transpose(0, 1).clone()
        tensors += [mixed, *ops.mos_smoothing_(mixed, None, prior, target, 0.9, 1e-4, None)]
        out = torch.empty(n, size, device=DEVICE)
        ops.mix_(leaves, gates, 0.0, out)
        ops.mix_backward_(leaves, gates, out)
        return [*tensors, leaves, gates, out, pieces.sums]

    first = results()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, results()))
