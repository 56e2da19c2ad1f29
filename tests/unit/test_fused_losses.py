"""The fused losses against the eager ones and against the papers' formulas in float64, through the layers alone.

Shapes: N tokens, B batch, T time, D features, E embedding, K components, V vocabulary, S frequent tokens.
"""

import dataclasses
import math
from unittest import mock

import hypothesis.strategies as st
import pytest
import reference
import torch
from half_precision import assert_rounded_alone
from hypothesis import given, settings

from mixtape_plugin.kernels import common, torch_ops
from mixtape_plugin.kernels.softmax import SoftmaxLoss
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, build_output_layer

D, E, V, S, PAD = 6, 5, 13, 6, 1
CASES = {
    "softmax": {"output_layer": "softmax"},
    "moc": {"output_layer": "moc"},
    "mos": {"output_layer": "mos"},
    "mixtape": {"output_layer": "mixtape", "frequent_ratio": S / V},
    "mixtape without sharing": {"output_layer": "mixtape", "frequent_ratio": 1.0},
    "sigsoftmax": {"output_layer": "sigsoftmax"},
    "gss": {"output_layer": "gss", "gss_c": 0.5, "gss_k": 3.0},
    "gss with k < 1": {"output_layer": "gss", "gss_k": 0.3},
    "plif": {"output_layer": "plif", "plif_pieces": 9, "plif_range": 3.0},
}
LAYERS = {case: OUTPUT_LAYERS[options["output_layer"]] for case, options in CASES.items()}
MIXTURES = [case for case, layer in LAYERS.items() if layer.has_components]
MASKED = (0, 4, 7, 12)  # the first and the last token, frequent ones and rare ones

each_case = pytest.mark.parametrize("case", CASES)
each_smoothing = pytest.mark.parametrize("label_smoothing", [0.0, 0.1])


def build(case, feature_dim=D, embed_dim=E, vocab_size=V, masked=(), tied=None, std=1.0, seed=0, **options):
    """A fused layer in float64 with normal parameters: biases too, and gates far from 1/2."""
    options = {"gate_dim": 3, "gate_noise": 0.0, "output_impl": "fused", **CASES[case], **options}
    if not LAYERS[case].has_projection:
        embed_dim = feature_dim
    if tied is None:
        options["output_embed_dim"] = embed_dim
    layer = build_output_layer(OutputLayerConfig(**options), feature_dim, vocab_size, tied, masked)
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return layer.double()


def twin(layer, impl="eager"):
    """The same options and parameters, these in leaves of their own, under another implementation."""
    config = dataclasses.replace(layer.config, output_impl=impl, output_embed_dim=layer.embed_dim)
    other = build_output_layer(config, layer.feature_dim, layer.vocab_size, masked_tokens=layer.masked_tokens)
    other.load_state_dict(layer.state_dict())
    return other.to(layer.weight.dtype).train(layer.training)


def random_batch(layer, *shape, ignored=(), seed=1):
    """Features [*shape, D] and targets [*shape] among the tokens that can be predicted, PAD where told."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*shape, layer.feature_dim, dtype=torch.float64, generator=generator)
    allowed = torch.tensor(reference.predicted_tokens(layer))
    target = allowed[torch.randint(len(allowed), shape, generator=generator)]
    target.flatten()[list(ignored)] = PAD
    return features.to(layer.weight.dtype), target


def loss_and_gradients(layer, features, target, factor=1, **options):
    """The loss, nll, and the gradient of factor · loss in the features and in every parameter, by name."""
    features = features.detach().requires_grad_()
    loss, nll = layer.loss(features, target, **options)
    names, parameters = zip(*layer.named_parameters())
    found = torch.autograd.grad(factor * loss, [features, *parameters])
    return {"loss": loss.detach(), "nll": nll.detach(), **dict(zip(["features", *names], found))}


def by_formula(layer, features, target, label_smoothing=0.0, ignore_index=-100):
    """The same from the float64 formulas, written for a vocabulary without the masked tokens."""
    leaves = {"features": features.detach().double().requires_grad_()}
    leaves.update((name, p.detach().double().requires_grad_()) for name, p in layer.named_parameters())
    parameters = dict(leaves)
    features = parameters.pop("features")
    loss, nll = reference.layer_loss(layer, features, target, label_smoothing, ignore_index, parameters)
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {"loss": loss.detach(), "nll": nll.detach(), **dict(zip(leaves, found))}


def assert_same(actual, expected, tolerance=1e-12):
    """Every entry agrees to `tolerance` of the largest number in it (of 1, where all are smaller)."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        found = actual[name]
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, name
        if wanted.numel():
            error = (found - wanted).abs().max().item()
            assert error <= tolerance * max(1.0, wanted.abs().max().item()), f"{name} is off by {error}"


def chunk_bytes(size):
    """Chunks of the tokens whose scores fit into so many bytes, of one token at least."""
    return mock.patch.multiple(common, CHUNK_BYTES={"torch": size}, MIN_ROWS=1)


# ----------------------------------------------------------------------------------------------------- the numbers


@each_smoothing
@pytest.mark.parametrize("masked", [(), MASKED], ids=["all", "masked"])
@each_case
def test_equals_eager_and_the_formula(case, masked, label_smoothing):
    for options in {"context_scale": 2.0}, {"num_components": 3, "embed_dim": 9, "gate_weight_norm": True}:
        layer = build(case, masked=masked, **options)
        features, target = random_batch(layer, 2, 3, 2, ignored=(0, 5))
        for fill in PAD, -100:
            smoothing = {"label_smoothing": label_smoothing, "ignore_index": fill}
            batch = features, target.masked_fill(target == PAD, fill)
            actual = loss_and_gradients(layer, *batch, **smoothing)
            assert_same(actual, loss_and_gradients(twin(layer), *batch, **smoothing))
            assert_same(actual, by_formula(layer, *batch, **smoothing))


@each_case
def test_many_tokens(case):
    """Enough for every limit of the implementation's own: chunks, and blocks of them."""
    layer = build(case, vocab_size=3000, std=0.5)
    features, target = random_batch(layer, 700)
    actual = loss_and_gradients(layer, features, target, label_smoothing=0.1)
    assert_same(actual, loss_and_gradients(twin(layer), features, target, label_smoothing=0.1))


@each_case
def test_a_tied_weight_gets_both_gradients(case):
    """Of the embedding of the inputs and of the output layer, through .backward() as in a model."""
    gradients = {}
    for impl in "fused", "eager":
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(V, E, dtype=torch.float64)
        hidden = torch.nn.Linear(E, D if LAYERS[case].has_projection else E, dtype=torch.float64)
        layer = build(case, hidden.out_features, tied=embedding.weight, output_impl=impl)
        assert layer.weight is embedding.weight
        inputs = torch.randint(V, (2, 5))
        loss, _ = layer.loss(torch.tanh(hidden(embedding(inputs))), inputs.roll(1), label_smoothing=0.1)
        loss.backward()
        modules = torch.nn.ModuleList([embedding, hidden, layer])
        gradients[impl] = {name: parameter.grad for name, parameter in modules.named_parameters()}
    assert_same(gradients["fused"], gradients["eager"])


@each_case
@settings(max_examples=25, deadline=None, derandomize=True)
@given(draw=st.data())
def test_random_shapes(case, draw):
    sizes = {name: draw.draw(st.integers(1, 7), label=name) for name in ("feature_dim", "embed_dim", "gate_dim")}
    vocab_size = draw.draw(st.integers(2, 21), label="V")
    options = {"num_components": draw.draw(st.integers(2 if "mixtape" in case else 1, 8), label="K")}
    masked = draw.draw(st.lists(st.integers(0, vocab_size - 1), max_size=vocab_size - 2, unique=True), label="masked")
    if case == "mixtape":
        first = min(set(range(vocab_size)) - set(masked))  # which is among the frequent tokens, or refused
        options["frequent_ratio"] = draw.draw(st.integers(first + 1, vocab_size), label="S") / vocab_size
    layer = build(case, vocab_size=vocab_size, masked=masked, **sizes, **options)
    num_tokens = draw.draw(st.integers(0, 7), label="N")
    features, target = random_batch(layer, num_tokens)
    target[draw.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens), label="ignored")] = -100
    smoothing = draw.draw(st.sampled_from([0.0, 0.1]), label="label_smoothing")
    with chunk_bytes(draw.draw(st.sampled_from([1, 1000, 10**6]), label="chunk")):
        actual = loss_and_gradients(layer, features, target, label_smoothing=smoothing)
    assert_same(actual, loss_and_gradients(twin(layer), features, target, label_smoothing=smoothing))
    assert_same(actual, by_formula(layer, features, target, label_smoothing=smoothing))


@pytest.mark.parametrize("shape, ignored", [((0,), ()), ((2, 0), ()), ((3,), (0, 1, 2)), ((1,), ()), ((), ())])
@each_case
def test_few_and_no_targets(case, shape, ignored):
    layer = build(case)
    features, target = random_batch(layer, *shape, ignored=ignored)
    options = {"label_smoothing": 0.1, "ignore_index": PAD}
    actual = loss_and_gradients(layer, features, target, **options)
    assert_same(actual, loss_and_gradients(twin(layer), features, target, **options))
    if target.ne(PAD).sum() == 0:  # no parameter is left without a gradient, which would stop distributed training
        assert all((value == 0).all() for value in actual.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each_case
def test_what_does_not_count_does_not_matter(case, bad):
    layer = build(case)
    features, target = random_batch(layer, 2, 3, ignored=(4,))
    expected = by_formula(layer, features.flatten(0, 1)[[0, 1, 2, 3, 5]], target.flatten()[[0, 1, 2, 3, 5]])
    features[1, 1, 2] = bad
    for tested in layer, twin(layer):
        actual = loss_and_gradients(tested, features, target, ignore_index=PAD)
        assert (actual["features"][1, 1] == 0).all()
        actual["features"] = actual["features"].flatten(0, 1)[[0, 1, 2, 3, 5]]
        assert_same(actual, expected)


@pytest.mark.parametrize("impl", ["fused", "auto"])
@each_case
def test_gradcheck(case, impl):
    layer = build(case, masked=(4, 12), num_components=3, gate_weight_norm=True, output_impl=impl)
    features, target = random_batch(layer, 3, ignored=(1,))

    def loss(features, *parameters):
        return layer.loss(features, target, label_smoothing=0.1, ignore_index=PAD)[0]

    assert torch.autograd.gradcheck(loss, (features.requires_grad_(), *layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@each_smoothing
@each_case
def test_targets_whose_probability_underflows(case, label_smoothing, dtype):
    """Logits and prior logits in the hundreds: log p(y) is far below the logarithm of the smallest float."""
    layer = build(case)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("weight", "bias", "prior.weight"):
                parameter.mul_(200)
    layer = layer.to(dtype)
    features, target = random_batch(layer, 9)
    actual = loss_and_gradients(layer, features, target, label_smoothing=label_smoothing)
    expected = by_formula(layer, features, target, label_smoothing=label_smoothing)
    smallest = torch.finfo(torch.float32).tiny
    assert expected["nll"] / 9 > -torch.tensor(smallest).log()
    # Logits are sums of D products, so off by a few units in the last place of the largest, here in the thousands;
    # a softmax turns that absolute error into a relative one of p, which the gradients are linear in.
    largest = (layer.weight.abs().sum(1).max() + layer.bias.abs().max()).item()
    tolerance = 4 * torch.finfo(dtype).eps * largest * max(1.0, features.abs().max().item())
    assert_same({name: value.double() for name, value in actual.items()}, expected, tolerance)


@pytest.mark.parametrize("masked", [(), MASKED])
@pytest.mark.parametrize("block", [1, torch_ops.BLOCK])
def test_smoothed_mos_where_some_probabilities_underflow(block, masked):
    """Blocks of one token take either of two ways, a block of all tokens one for all of them."""
    layer = build("mos", masked=masked)
    with torch.no_grad():
        layer.weight.mul_(800)
        layer.context.bias.mul_(1e-4)
    features, target = random_batch(layer, 6)
    features[:3] *= 1e-4  # of these no probability underflows
    expected = by_formula(layer, features, target, label_smoothing=0.1)
    log_probs = reference.layer_log_probs(layer, features).detach()  # of the tokens that are not masked
    smallest = math.log(torch.finfo(torch.float64).tiny)
    assert (log_probs[:3] > smallest / 2).all() and (log_probs[3:].amin(1) < smallest).all()
    with mock.patch.object(torch_ops, "BLOCK", block):
        actual = loss_and_gradients(layer, features, target, label_smoothing=0.1)
        with torch.no_grad():
            found = layer.log_probs(features)
    torch.testing.assert_close(found[:, reference.predicted_tokens(layer)], log_probs)
    assert (found[:, list(masked)] == -torch.inf).all()
    largest = layer.weight.abs().sum(1).max().item()
    assert_same(actual, expected, 4 * torch.finfo(torch.float64).eps * largest)


def test_smoothed_mos_where_a_probability_has_few_digits():
    """e^-150 where the prior is about 1, and e^-80 where that is e^-18: no zero in float32, but it has six bits."""
    logits, log_prior, target = torch.zeros(1, 2, V), torch.tensor([[-math.exp(-18), -18.0]]), torch.tensor([1])
    logits[0, :, 3] = torch.tensor([-150.0, -80.0])
    exact = logits.double().requires_grad_()
    log_probs = torch.logsumexp(log_prior.double().unsqueeze(2) + exact.log_softmax(2), 1)
    nll, spread = -log_probs[:, 1], -log_probs.sum(1)
    assert torch.finfo(torch.float32).smallest_normal > math.exp(log_probs[0, 3].item()) > 1e-45
    (grad,) = torch.autograd.grad((0.9 * nll + 0.1 * spread).sum(), exact)
    found = torch_ops.mos_smoothing_(logits, None, log_prior, target, 0.9, 0.1, None)
    for ours, theirs in (found[0], nll), (found[1], spread), (logits, grad):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-5, atol=1e-6)


@each_smoothing
@each_case
def test_a_masked_target_costs_infinitely_much_and_makes_no_nan(case, label_smoothing):
    layer = build(case, masked=MASKED)
    features, target = random_batch(layer, 5)
    target[3] = MASKED[1]
    for dtype in torch.float64, torch.float32:
        found = loss_and_gradients(layer.to(dtype), features.to(dtype), target, label_smoothing=label_smoothing)
        assert found["loss"] == torch.inf and found["nll"] == torch.inf
        assert not any(value.isnan().any() for value in found.values())


@each_case
def test_values_in_masked_rows_do_not_matter(case):
    """They may hold anything, as the rows of symbols that no optimizer step ever moves."""
    layer = build(case, masked=MASKED)
    features, target = random_batch(layer, 5)
    before = loss_and_gradients(layer, features, target, label_smoothing=0.1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in reference.ROWS:
                parameter[[x for x in MASKED if x < len(parameter)]] = 1e6
    after = loss_and_gradients(layer, features, target, label_smoothing=0.1)
    assert_same(after, before)
    by_token = [after[name] for name in reference.ROWS if name in after]
    assert all((gradient[[x for x in MASKED if x < len(gradient)]] == 0).all() for gradient in by_token)


# -------------------------------------------------------------------------------------------------------- autograd


@each_case
def test_the_gradient_of_a_function_of_the_loss(case):
    layer = build(case)
    other = twin(layer)
    features, target = random_batch(layer, 7)
    plain = loss_and_gradients(layer, features, target, label_smoothing=0.1)
    gradients = {name: value for name, value in plain.items() if name not in ("loss", "nll")}
    for factor in 3, 1 / torch.tensor(7.0, dtype=torch.float64), torch.tensor(-0.5), 0:
        actual = loss_and_gradients(layer, features, target, factor, label_smoothing=0.1)
        assert_same(actual, loss_and_gradients(other, features, target, factor, label_smoothing=0.1))
        for name, gradient in gradients.items():
            torch.testing.assert_close(actual[name], factor * gradient, rtol=1e-12, atol=1e-12)


@each_case
def test_backward_again_and_two_losses_over_the_same_weights(case):
    layer = build(case)
    leaves = [features.requires_grad_() for features in (random_batch(layer, 4)[0], random_batch(layer, 3, seed=2)[0])]
    targets = [random_batch(layer, len(features), seed=3)[1] for features in leaves]
    alone = [loss_and_gradients(layer, *batch) for batch in zip(leaves, targets)]
    loss = sum(layer.loss(*batch)[0] for batch in zip(leaves, targets))
    for times in 1, 2:  # the second backward must find what the first one used as it was
        loss.backward(retain_graph=times == 1)
        found = {name: parameter.grad for name, parameter in layer.named_parameters()}
        assert_same(found, {name: times * (alone[0][name] + alone[1][name]) for name in found})
        for features, expected in zip(leaves, alone):
            assert_same({"features": features.grad}, {"features": times * expected["features"]})


def test_backward_again_where_torch_does_not_tell_that_it_may_come(monkeypatch):
    """As an older one."""
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph", raising=False)
    test_backward_again_and_two_losses_over_the_same_weights("softmax")


@pytest.mark.parametrize("again", [False, True], ids=["once", "kept"])
@pytest.mark.parametrize("name", ["softmax", "mixtape"])
def test_low_precision_gradients_are_rounded_once(name, again):
    """What a backward pass multiplies by is multiplied in float32: a gradient of bfloat16 has one rounding."""
    layer = build(name).bfloat16()
    features, target = random_batch(layer, 4, 3)
    sums, run = {}, common.FusedLoss.run

    def spy(fused, inputs, needed):
        run(fused, inputs, needed)
        sums.update((name, total.clone()) for name, total in fused.grad.items())

    with mock.patch.object(common.FusedLoss, "run", spy):
        loss, _ = layer.loss(features.requires_grad_(), target)
    weight, bias = torch.autograd.grad(loss / 3, [layer.weight, layer.bias], retain_graph=again)
    for found, total in (weight, sums["weight"]), (bias, sums["bias"]):
        assert total.dtype == torch.float32
        exact = total.double() * torch.tensor(1 / 3).double()
        assert torch.equal(found, exact.float().bfloat16())


def test_autocast_is_off_inside(monkeypatch):
    """Sums over chunks in float32 stay so, whatever they are multiplied by."""
    seen, finish, ones = [], SoftmaxLoss.finish, torch.ones(2, 2)
    monkeypatch.setattr(SoftmaxLoss, "finish", lambda self: seen.append((ones @ ones).dtype) or finish(self))
    layer = build("softmax").float()
    with torch.autocast("cpu", torch.bfloat16):
        layer.loss(*random_batch(layer, 3), label_smoothing=0.1)
        assert (ones @ ones).dtype == torch.bfloat16
    assert seen == [torch.float32]


@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast bfloat16", "autocast float16"])
@each_smoothing
@each_case
def test_half_precision_rounds_and_does_nothing_else(case, label_smoothing, how):
    """In float16 gradients are multiplied by a power of 2 on their way, and divided by it in the end."""
    layer = build(case, std=0.5, context_scale=2.0)
    features, target = torch.randn(21, D), torch.randint(2, V, (21,))
    with chunk_bytes(1500):
        assert_rounded_alone(layer, features, target, how, label_smoothing)


@pytest.mark.parametrize("case", ["softmax", "moc", "mixtape", "gss", "plif"])
def test_the_gradient_of_a_bias_in_float16_is_no_sum_in_float16(case):
    """256 times what 700 tokens give the bias of their target is more than float16 holds."""
    layer = build(case, vocab_size=50, std=0.3).half()
    features, target = random_batch(layer, 700)
    target[:] = 3
    found = loss_and_gradients(layer, features, target)["bias"]
    torch.testing.assert_close(found.double(), by_formula(layer, features, target)["bias"], rtol=0.01, atol=1)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_products_add_up_in_float32(dtype, device):
    """Of factors as they come: transposed, strided, into a part of a tensor."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(400, 56, generator=generator).to(device, dtype) for _ in range(2))
    wide = torch.promote_types(dtype, torch.float32)
    for factors in (left[:, :40].t(), right), (left.t(), right[:, 8:48]), (left[:48], right.t()[:, :48]):
        start = torch.randn(2, len(factors[0]), factors[1].size(1), generator=generator).to(device, wide)
        total = start.clone()
        common.add_product_(total[1], *factors, alpha=0.5)
        exact = start[1].double() + 0.5 * (factors[0].double() @ factors[1].double())
        # on a CPU bfloat16's products are rounded before they are added
        tolerance = {torch.float64: 1e-14}.get(dtype, 3e-3 if device == "cpu" and dtype == torch.bfloat16 else 2e-6)
        assert (total[1].double() - exact).norm() <= tolerance * exact.norm()
        assert torch.equal(total[0], start[0])


@each_case
def test_frozen_tensors(case):
    """Each parameter, the features, and all of them: the loss stays right and what is left gets its gradient."""
    layer = build(case, masked=MASKED)
    features, target = random_batch(layer, 5)
    expected = loss_and_gradients(twin(layer), features, target, label_smoothing=0.1)
    leaves = {"features": features, **dict(layer.named_parameters())}
    for frozen in [*([name] for name in leaves), ["weight", "bias"], list(layer.state_dict()), list(leaves)]:
        for name, leaf in leaves.items():
            leaf.requires_grad_(name not in frozen)
        loss, nll = layer.loss(features, target, label_smoothing=0.1)
        left = [name for name in leaves if name not in frozen]
        assert loss.requires_grad == bool(left)
        found = {"loss": loss.detach(), "nll": nll.detach()}
        if left:
            found.update(zip(left, torch.autograd.grad(loss, [leaves[name] for name in left])))
        assert_same(found, {name: expected[name] for name in found})


@each_case
def test_evaluation(case):
    """Dropout and noise are off, with and without a gradient, and no random number is drawn."""
    options = {"context_dropout": 0.5, "gate_dropout": 0.5, "gate_noise": 1.0}
    layer = build(case, masked=MASKED, **options).eval()
    eager = twin(layer)
    features, target = random_batch(layer, 7, ignored=(2,))
    state = torch.get_rng_state()
    expected = by_formula(layer, features, target, label_smoothing=0.1, ignore_index=PAD)
    assert_same(loss_and_gradients(layer, features, target, label_smoothing=0.1, ignore_index=PAD), expected)
    for context in torch.no_grad, torch.inference_mode:
        with context():
            loss, nll = layer.loss(features, target, label_smoothing=0.1, ignore_index=PAD)
            for batch in features, features[0], features.view(7, 1, -1):
                scores = eager(batch)
                torch.testing.assert_close(layer(batch), scores, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(layer.log_probs(batch), scores.log_softmax(-1), rtol=1e-12, atol=1e-12)
        assert not loss.requires_grad
        assert_same({"loss": loss, "nll": nll}, {name: expected[name] for name in ("loss", "nll")})
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("case", MIXTURES)
def test_locked_dropout_beside_ignored_targets(case):
    """Masks are drawn for whole sequences, of which some tokens count: from one seed they are those of eager."""
    layer = build(case, context_dropout=0.5, locked_context_dropout=True)
    features, target = random_batch(layer, 3, 4, ignored=(0, 5, 6))
    results = []
    for value in features[1, 1].clone(), torch.nan:  # what does not count does not matter
        features[1, 1] = value
        for model in layer, twin(layer):
            torch.manual_seed(3)
            results.append(loss_and_gradients(model, features, target, label_smoothing=0.1, ignore_index=PAD))
    for result in results[1:]:
        assert_same(result, results[0])


@each_case
def test_tensors_that_are_not_contiguous(case):
    """Features as fairseq has them: [T, B, D] transposed."""
    layer = build(case)
    features, target = random_batch(layer, 4, 3)
    expected = loss_and_gradients(layer, features, target)
    features, target = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (features, target))
    assert not features.is_contiguous() and not target.is_contiguous()
    assert_same(loss_and_gradients(layer, features, target), expected)
    one = features[:1, :1].expand_as(features)  # all tokens at one address
    assert_same(loss_and_gradients(layer, one, target), loss_and_gradients(twin(layer), one, target))


@each_smoothing
@each_case
def test_nothing_wrong_can_be_derived(case, label_smoothing):
    """The gradient of the nll, and second derivatives, are right or refused, and never zero in silence."""
    layer = build(case)
    features, target = random_batch(layer, 3)
    features.requires_grad_()
    loss, nll = layer.loss(features, target, label_smoothing=label_smoothing)
    if nll.requires_grad:
        (actual,) = torch.autograd.grad(loss + 2 * nll, features)
        loss, nll = twin(layer).loss(features, target, label_smoothing=label_smoothing)
        (expected,) = torch.autograd.grad(loss + 2 * nll, features)
        assert_same({"features": actual}, {"features": expected})
    second = {}
    for impl in "fused", "eager":
        loss, _ = twin(layer, impl).loss(features, target, label_smoothing=label_smoothing)
        try:
            (gradient,) = torch.autograd.grad(loss, features, create_graph=True)
            (second[impl],) = torch.autograd.grad(gradient.pow(2).sum(), features)
        except RuntimeError:
            continue
    assert "eager" in second
    if "fused" in second:
        torch.testing.assert_close(second["fused"], second["eager"])


@pytest.mark.parametrize("impl", ["eager", "fused"])
@each_case
def test_the_loss_can_be_changed_in_place(case, impl):
    """An output that is a view of something inside could not; and the negative log-likelihood stays what it was."""
    layer = build(case, output_impl=impl)
    features, target = random_batch(layer, 3)
    loss, nll = layer.loss(features.requires_grad_(), target)
    before = nll.item()
    (expected,) = torch.autograd.grad(loss / 3, features, retain_graph=True)
    loss /= 3
    (actual,) = torch.autograd.grad(loss, features)
    torch.testing.assert_close(actual, expected)
    assert nll.item() == before
    with torch.no_grad():
        loss, nll = layer.loss(features, target)
        loss /= 3
    assert nll.item() == pytest.approx(before)


@each_case
def test_autocast_leaves_float64_alone(case):
    layer = build(case)
    features, target = random_batch(layer, 3)
    expected, _ = layer.loss(features, target)
    with torch.autocast("cpu", torch.bfloat16):
        actual, _ = layer.loss(features, target)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@each_case
def test_scores_have_one_type_with_and_without_a_gradient(case):
    layer = build(case).float().eval()
    features = random_batch(layer, 3)[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(features)
        with torch.no_grad():
            assert layer(features).dtype == expected.dtype
