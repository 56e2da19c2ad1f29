"""Masked tokens: an output layer that names some has the distribution of one built without their rows.

Shapes: N tokens, D features, E embedding, V vocabulary with the masked tokens, S frequent tokens.
"""

import pytest
import reference
import torch
import torch.nn.functional as F

from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, base, build_output_layer

N, D, E, V = 7, 6, 5, 11
PAD = 1
# Of mixtape's 6 frequent tokens: the first ones, as specials are; one between others; none; rare ones only; both.
MASKS = {"first": (0, 1), "inside": (0, 1, 4), "outside": (7, 10), "both": (0, 5, 6, 10)}


def build(name, masked=MASKS["both"], tied=False, **options):
    torch.manual_seed(0)
    small = {"plif_pieces": 9, "plif_range": 3.0}
    options = {"gate_dim": 3, "gate_noise": 0.0, "frequent_ratio": 6 / V, **small, **options}
    projected = OUTPUT_LAYERS[name].has_projection
    feature_dim = D if projected else E
    tied_weight = torch.nn.Parameter(torch.empty(V, E)) if tied else None
    if not tied and projected:
        options["output_embed_dim"] = E
    config = OutputLayerConfig(output_layer=name, **options)
    layer = build_output_layer(config, feature_dim, V, tied_weight, masked_tokens=masked)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.double()


def random_features(layer):
    return torch.randn(N, layer.feature_dim, dtype=torch.float64, requires_grad=True)


def random_targets(layer):
    allowed = torch.tensor(reference.predicted_tokens(layer))
    return allowed[torch.randint(len(allowed), (N,))]


def gradients(loss, layer, features):
    names, parameters = zip(*layer.named_parameters())
    return dict(zip(["features", *names], torch.autograd.grad(loss, [features, *parameters], retain_graph=True)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("masked", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_equals_a_layer_without_the_masked_rows(name, masked, tied):
    layer = build(name, masked, tied)
    assert layer.masked_tokens == masked
    features = random_features(layer)
    allowed = reference.predicted_tokens(layer)
    expected = reference.layer_log_probs(layer, features)
    for log_probs in (layer.log_probs(features), F.log_softmax(layer(features), dim=-1)):
        probs = log_probs.exp()
        assert (probs[:, list(masked)] == 0).all()
        torch.testing.assert_close(probs[:, allowed].sum(-1), torch.ones(N, dtype=torch.float64))
        torch.testing.assert_close(log_probs[:, allowed], expected)
    assert (layer(features)[:, list(masked)] == -torch.inf).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("masked", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_loss_and_gradients_equal_those_of_a_layer_without_the_masked_rows(name, masked, label_smoothing):
    """Label smoothing too: the target keeps 1 - ε, each of the other allowed tokens has ε / (their number)."""
    layer = build(name, masked)
    features, target = random_features(layer), random_targets(layer)
    target[2] = -100
    expected = reference.layer_loss(layer, features, target, label_smoothing)
    actual = layer.loss(features, target, label_smoothing=label_smoothing)
    torch.testing.assert_close(actual, expected)

    # Masked rows have no part in the formula, so their gradient there is exactly 0; here too, and never NaN.
    both = [loss if label_smoothing else loss + 2 * nll for loss, nll in (expected, actual)]
    for wanted, found in zip(*(gradients(total, layer, features).items() for total in both)):
        torch.testing.assert_close(found[1], wanted[1])
        if found[0] in reference.ROWS:
            rows = [x for x in masked if x < len(found[1])]
            assert (found[1][rows] == 0).all()


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_loss_follows_from_forward(name):
    """What stock cross_entropy computes from the scores; with the target's gradient through them."""
    layer = build(name)
    features, target = random_features(layer), random_targets(layer)
    loss, nll = layer.loss(features, target)
    expected = F.nll_loss(F.log_softmax(layer(features), dim=-1), target, reduction="sum")
    torch.testing.assert_close((loss, nll), (expected, expected))
    actual, expected = (gradients(x, layer, features) for x in (loss, expected))
    assert all(gradient.isfinite().all() for gradient in expected.values())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_low_precision(name, dtype):
    layer = build(name, context_dropout=0.3, gate_dropout=0.3, gate_noise=0.1)
    features, target = random_features(layer).detach(), random_targets(layer)
    expected = reference.layer_log_probs(layer, features).detach()
    layer, features = layer.to(dtype), features.to(dtype).requires_grad_()
    layer.eval()
    log_probs = layer.log_probs(features)
    masked = list(layer.masked_tokens)
    assert log_probs.dtype == torch.float32
    assert (log_probs[:, masked].exp() == 0).all()
    assert (F.softmax(layer(features), dim=-1)[:, masked] == 0).all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(N))
    # A few units in the last place of a sum of E products, as in test_output_layers.py.
    tolerance = 8 * torch.finfo(dtype).eps * expected.abs().max().item()
    allowed = reference.predicted_tokens(layer)
    torch.testing.assert_close(log_probs[:, allowed].double(), expected, rtol=0, atol=tolerance)

    layer.train()
    loss, nll = layer.loss(features, target, label_smoothing=0.1)
    assert loss.isfinite() and nll.isfinite()
    for total in (loss, *layer.loss(features, target)):
        found = gradients(total, layer, features)
        assert all(gradient.isfinite().all() for gradient in found.values())
        assert (found["weight"][masked] == 0).all() and (found["bias"][masked] == 0).all()


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_values_in_masked_rows_do_not_matter(name):
    """They may hold anything, as the rows of symbols that no optimizer step ever moves; infinity is the hardest."""
    layer = build(name, (0, 5, 10))
    features, target = random_features(layer), random_targets(layer)
    before = layer.log_probs(features), *layer.loss(features, target, label_smoothing=0.1)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if parameter_name in reference.ROWS:
                parameter[[x for x in layer.masked_tokens if x < len(parameter)]] = 1e6
    after = layer.log_probs(features), *layer.loss(features, target, label_smoothing=0.1)
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_a_masked_target_is_never_dropped_in_silence(name):
    """Its probability is 0: an infinite loss, not one that leaves it out."""
    layer = build(name)
    features, target = random_features(layer), random_targets(layer)
    target[3] = layer.masked_tokens[1]
    for label_smoothing in (0.0, 0.1):
        loss, nll = layer.loss(features, target, label_smoothing=label_smoothing)
        assert loss == torch.inf and nll == torch.inf


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_a_masked_token_may_pad_the_targets(name):
    """<pad> is masked in language models, and ignored as a target."""
    layer = build(name, (0, PAD))
    features, target = random_features(layer), random_targets(layer)
    kept = torch.arange(N) != 2
    expected = layer.loss(features[kept], target[kept], label_smoothing=0.1)
    actual = layer.loss(features, target.masked_fill(~kept, PAD), label_smoothing=0.1, ignore_index=PAD)
    torch.testing.assert_close(actual, expected)
    assert all(gradient.isfinite().all() for gradient in gradients(actual[0], layer, features).values())


@pytest.mark.parametrize("masked", [(), MASKS["both"]], ids=["all", "masked"])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_a_loss_in_chunks_is_the_same(name, masked, monkeypatch):
    """A few contexts at a time, where there are more scores than should be in memory at once."""
    layer = build(name, masked, output_impl="eager")
    features, target = random_features(layer), random_targets(layer).masked_fill(torch.arange(N) == 4, -100)
    whole = layer.loss(features, target, label_smoothing=0.1)
    expected = [gradients(loss, layer, features) for loss in whole]
    monkeypatch.setattr(base, "MAX_SCORES", 3 * layer.scores_per_token)
    calls = []
    layer.register_forward_hook(lambda module, inputs, scores: calls.append(len(scores)))
    chunked = layer.loss(features, target, label_smoothing=0.1)
    assert len(calls) > 1 and max(calls) <= 3 and sum(calls) == N - 1, "the targets that count alone"
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close([gradients(loss, layer, features) for loss in chunked], expected)


@pytest.mark.parametrize("locked, allowed, contexts", [(False, 4, 4), (False, 0.5, 1), (True, 4, 4), (True, 0.5, 4)])
@pytest.mark.parametrize("name", [name for name in OUTPUT_LAYERS if OUTPUT_LAYERS[name].has_components])
def test_the_gradient_of_chunks_is_that_of_the_same_draw(name, locked, allowed, contexts, monkeypatch):
    """A chunk is gone through twice, with the same dropouts and noise: finite differences know of one draw only."""
    options = {"context_dropout": 0.4, "locked_context_dropout": locked, "gate_dropout": 0.3, "gate_noise": 0.5}
    layer = build(name, output_impl="eager", **options).train()
    features = torch.randn(3, 4, D, dtype=torch.float64, requires_grad=True)
    target = random_targets(layer)[torch.randint(N, (3, 4))]
    monkeypatch.setattr(base, "MAX_SCORES", int(allowed * layer.scores_per_token))
    calls = []
    layer.register_forward_hook(lambda module, inputs, scores: calls.append(scores.shape[:-1].numel()))

    def loss(features, *parameters):
        torch.manual_seed(2)
        return layer.loss(features, target, label_smoothing=0.1)[0]

    direction = [torch.randn_like(x) for x in (features, *layer.parameters())]
    found = torch.autograd.grad(loss(features), [features, *layer.parameters()])
    slope = sum((a * b).sum() for a, b in zip(found, direction))
    values, step = [], 1e-5
    with torch.no_grad():
        for move in (step, -2 * step):
            for x, d in zip((features, *layer.parameters()), direction):
                x.add_(d, alpha=move)
            values.append(loss(features))
    torch.testing.assert_close(slope, (values[0] - values[1]) / (2 * step), rtol=1e-6, atol=1e-6)
    assert max(calls) == contexts, "as many as are allowed, one at least; where a sequence has one mask, whole ones"


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_a_token_that_is_named_twice_is_masked_once(name):
    """Label smoothing counts the tokens that are left."""
    losses = []
    for masked in (0, 3), (0, 3, 3):
        layer = build(name, masked)
        torch.manual_seed(1)
        losses += layer.loss(random_features(layer), random_targets(layer), label_smoothing=0.3)
    assert losses[:2] == losses[2:]


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_no_mask_is_the_default(name):
    layer = build(name, ())
    features = random_features(layer)
    assert layer.masked_tokens == ()
    assert layer(features).isfinite().all()
    torch.testing.assert_close(layer.log_probs(features), reference.layer_log_probs(layer, features))


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_the_mask_is_no_parameter(name):
    """A checkpoint of a layer without a mask loads strictly into one with it, and the other way round."""
    layer, plain = build(name), build(name, ())
    assert {n: p.shape for n, p in layer.state_dict().items()} == {n: p.shape for n, p in plain.state_dict().items()}
    layer.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())


def test_gates_for_none_but_masked_tokens_are_refused():
    """text8: 31 symbols, of which the first four are never predicted; a tenth of them is 3, an eighth is 4."""
    specials, text8 = (0, 1, 2, 3), 31
    for ratio, frequent in (0.1, 3), (0.125, 4):
        config = OutputLayerConfig(frequent_ratio=ratio)
        message = (
            f"^--frequent-ratio {ratio} of 31 tokens gives gates of their own to the first {frequent}, none .*0.161$"
        )
        with pytest.raises(UserError, match=message):
            build_output_layer(config, D, text8, masked_tokens=specials)
        assert build_output_layer(config, D, text8, masked_tokens=specials[:2]).num_frequent == frequent
    config = OutputLayerConfig(frequent_ratio=0.161)
    assert build_output_layer(config, D, text8, masked_tokens=specials).num_frequent == 5
