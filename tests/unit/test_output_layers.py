"""Every output layer against the float64 reference.

Shapes: N tokens, D features, E embedding, K components, V vocabulary, S frequent tokens.
"""

import copy
import functools

import pytest
import reference
import torch
import torch.nn.functional as F
from small_layers import GATE_DIM, PAD, D, E, N, V, build, gradients, random_targets

from mixtape_plugin.analysis.rank import log_prob_rank
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, base, build_output_layer
from mixtape_plugin.output_layers.mixtape import sigmoid_tree

MIXTURES = [name for name in OUTPUT_LAYERS if OUTPUT_LAYERS[name].has_components]

CASES = [("softmax", {})]
CASES += [(name, {"num_components": k}) for name in ("mos", "moc") for k in (1, 3)]
CASES += [("mixtape", {"num_components": k, "frequent_ratio": r}) for k in (2, 3, 4, 7) for r in (0.1, 0.5, 1)]
CASES += [("mixtape", {"gate_weight_norm": True})]
CASES += [("sigsoftmax", {}), ("plif", {}), ("plif", {"plif_pieces": 2}), ("plif", {"plif_pieces": 1})]
CASES += [("gss", {"gss_c": c, "gss_k": k}) for c, k in [(-1.5, 2.5), (0.5, 0.1), (0.0, 1.0), (2.0, 30.0)]]
CASES += [(name, {"context_scale": 3.0}) for name in OUTPUT_LAYERS]


@pytest.mark.parametrize("name, options", CASES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_evaluation_equals_reference(name, options, label_smoothing):
    layer = build(name, context_dropout=0.5, gate_dropout=0.5, gate_noise=1, **options).eval()
    features = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    target = random_targets()
    log_probs = reference.layer_log_probs(layer, features)
    torch.testing.assert_close(F.log_softmax(layer(features), dim=-1), log_probs)
    torch.testing.assert_close(layer.log_probs(features), log_probs)

    expected = reference.layer_loss(layer, features, target, label_smoothing, PAD)
    actual = layer.loss(features, target, label_smoothing=label_smoothing, ignore_index=PAD)
    torch.testing.assert_close(actual, expected)
    both = [loss if label_smoothing else loss + 2 * nll for loss, nll in (actual, expected)]
    for ours, theirs in zip(*(gradients(total, layer, features) for total in both)):
        torch.testing.assert_close(ours, theirs)


def scaled_mask(p, *shape):
    return F.dropout(torch.ones(*shape, dtype=torch.float64), p)


@pytest.mark.parametrize("name, options", [case for case in CASES if case[0] in MIXTURES])
def test_training_equals_reference_with_the_same_draw(name, options):
    layer = build(name, context_dropout=0.4, gate_dropout=0.3, gate_noise=0.5, **options).train()
    features = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    actual = layer.log_probs(features)

    # The order of the draws: context vectors; gate embeddings; noise gate by gate, frequent tokens first.
    torch.manual_seed(1)
    num_components = layer.num_components
    draws = {"context_mask": scaled_mask(0.4, N, num_components * E).view(N, num_components, E)}
    if name == "mixtape":
        gates, frequent = num_components - 1, layer.num_frequent
        noise = {"dtype": torch.float64}
        draws["gate_mask"] = scaled_mask(0.3, N, gates * GATE_DIM).view(N, gates, GATE_DIM)
        draws["gate_noise_frequent"] = 0.5 * torch.stack([torch.randn(N, frequent, **noise) for _ in range(gates)], -1)
        draws["gate_noise_shared"] = 0.5 * torch.cat([torch.randn(N, 1, **noise) for _ in range(gates)], -1)
    expected = reference.layer_log_probs(layer, features, **draws)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(N, V, dtype=torch.float64)
    for ours, theirs in zip(*(gradients((x * weights).sum(), layer, features) for x in (actual, expected))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [{"context_dropout": 0.5}, {"context_dropout": 0.5, "locked_context_dropout": True}, {"gate_dropout": 0.5}],
)
def test_each_dropout_is_retained(options):
    """--retain-dropout, in evaluation."""
    layer = build("mixtape", **options).eval()
    features = torch.randn(2, N, D, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(layer(features), layer(features))
        layer.make_generation_fast_(retain_dropout=True)
        assert not torch.equal(layer(features), layer(features))


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_gradcheck(name):
    layer = build(name, context_dropout=0.4, gate_dropout=0.3, gate_noise=0.5, frequent_ratio=0.5).train()
    features = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([4, PAD, 9])

    def loss(features, *parameters):
        torch.manual_seed(2)
        return layer.loss(features, target, label_smoothing=0.1, ignore_index=PAD)

    assert torch.autograd.gradcheck(loss, (features, *layer.parameters()))


def assert_close_to_rounding(actual, expected, dtype):
    """The scale of the logits times the rounding of the type: two units in the last place of a sum of E products."""
    tolerance = 2 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("context_scale", [None, 2.0])
def test_low_precision_sums_to_one_and_stays_near_float64(name, dtype, context_scale):
    layer = build(name, context_scale=context_scale).eval()
    features = torch.randn(N, D, dtype=torch.float64)
    expected = layer.log_probs(features)
    layer = layer.to(dtype)
    for grad in True, False:  # without, some layers compute in another way
        with torch.set_grad_enabled(grad):
            actual = layer.log_probs(features.to(dtype))
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.exp().sum(-1), torch.ones(N))
        assert_close_to_rounding(actual, expected, dtype)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
@pytest.mark.parametrize("context_scale", [None, 2.0])
def test_autocast(name, context_scale):
    """What --amp does: float32 parameters, products in a shorter type, log-sum-exps in float32."""
    layer = build(name, gate_noise=0.1, gate_dropout=0.1, context_dropout=0.1, context_scale=context_scale)
    features = torch.randn(N, D, dtype=torch.float64)
    target = random_targets()
    expected = layer.eval().loss(features, target, label_smoothing=0.1, ignore_index=PAD)
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        actual = layer.loss(features.float(), target, label_smoothing=0.1, ignore_index=PAD)
        layer.train().loss(features.float(), target)[0].backward()
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close([x.double() for x in actual], list(expected), rtol=0.05, atol=0)
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
@pytest.mark.parametrize("context_scale", [None, 2.0])
@pytest.mark.parametrize("impl", ["eager", "auto"])
def test_scores_under_autocast(name, context_scale, impl):
    layer = build(name, gate_noise=0.0, context_scale=context_scale, output_impl=impl)
    features = torch.randn(N, D, dtype=torch.float64)
    expected = layer.eval().log_probs(features)
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        for mode in layer.train, layer.eval:
            assert_close_to_rounding(mode().log_probs(features.float()), expected, torch.bfloat16)
            with torch.no_grad():
                actual = layer.log_probs(features.float())
            assert_close_to_rounding(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_leading_dimensions_and_single_tokens(name):
    layer = build(name).eval()
    features = torch.randn(2, 3, D, dtype=torch.float64)
    target = torch.randint(2, V, (2, 3))
    whole = layer(features)
    assert whole.shape == (2, 3, V)
    for index in [(0, 0), (1, 2)]:
        torch.testing.assert_close(layer(features[index]), whole[index])
    expected = [sum(x) for x in zip(*(layer.loss(f, t) for f, t in zip(features.flatten(0, 1), target.flatten())))]
    torch.testing.assert_close(list(layer.loss(features, target)), expected)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_ignored_targets_count_for_nothing(name):
    layer = build(name)
    features = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    loss, nll = layer.loss(features, torch.full((N,), PAD), label_smoothing=0.1, ignore_index=PAD)
    assert loss == 0 and nll == 0
    assert all(not g.any() for g in gradients(loss, layer, features))
    target = random_targets()
    kept = target != PAD
    torch.testing.assert_close(
        layer.loss(features, target, label_smoothing=0.1, ignore_index=PAD),
        layer.loss(features[kept], target[kept], label_smoothing=0.1, ignore_index=PAD),
    )


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_impossible_targets_stay_finite(name):
    """A probability that underflows in float32 still has its logarithm and a gradient."""
    layer = build(name).float()
    with torch.no_grad():
        layer.bias.zero_()
        layer.bias[4] = -300.0
    features = torch.randn(N, D, requires_grad=True)
    loss, _ = layer.loss(features, torch.full((N,), 4))
    assert loss.item() > 100 * N  # float32 ends at exp(-103)
    with torch.no_grad():
        expected = -copy.deepcopy(layer).double().log_probs(features.double())[:, 4].sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    assert all(g.isfinite().all() for g in gradients(loss, layer, features))


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
@pytest.mark.parametrize("tied", [False, True])
def test_context_scale(name, tied):
    """It starts at what is asked for; without it, or with 0, a layer is what it was, its checkpoint too."""
    embedding = torch.nn.Parameter(torch.randn(V, D, dtype=torch.float64)) if tied else None
    make = functools.partial(build, name, tied_weight=embedding, output_embed_dim=None)
    features = torch.randn(N, D, dtype=torch.float64)
    plain, none, scaled = make().eval(), make(context_scale=0.0).eval(), make(context_scale=2.5).eval()
    assert "context_scale" not in plain.state_dict()
    none.load_state_dict(plain.state_dict())
    torch.testing.assert_close(none(features), plain(features), rtol=0, atol=0)
    missing, unexpected = scaled.load_state_dict({**plain.state_dict(), "context_scale": torch.ones(1)})
    assert not missing and not unexpected
    torch.testing.assert_close(scaled(features), plain(features), rtol=0, atol=0)

    config = OutputLayerConfig(output_layer=name, context_scale=2.5)
    fresh = build_output_layer(config, D, V, torch.nn.Parameter(torch.randn(V, D)) if tied else None)
    assert fresh.context_scale.tolist() == [2.5] and fresh.context_scale.requires_grad


@pytest.mark.parametrize("name", MIXTURES)
def test_locked_context_dropout_shares_its_mask_over_time(name):
    layer = build(name, context_dropout=0.5, locked_context_dropout=True).train()
    contexts = layer.context_vectors(torch.randn(4, 9, D, dtype=torch.float64))
    dropped = contexts == 0
    assert (dropped == dropped[:, :1]).all()  # [B, T, K, E]
    assert dropped[:, 0].any() and not dropped[:, 0].all()
    assert (dropped[0] != dropped[1]).any()
    with pytest.raises(ValueError, match="batch, time"):
        layer(torch.randn(N, D, dtype=torch.float64))


def test_chunks_with_a_locked_dropout_are_as_large_as_may_be(monkeypatch):
    """Of any number of leading dimensions; without a batch and a time there is no such dropout."""
    layer = build("mos", output_impl="eager", context_dropout=0.5, locked_context_dropout=True).train()
    monkeypatch.setattr(base, "MAX_SCORES", 12 * layer.scores_per_token)
    calls = []
    layer.register_forward_hook(lambda module, inputs, scores: calls.append(scores.shape[:-1].numel()))
    features = torch.randn(5, 3, 4, D, dtype=layer.weight.dtype)
    layer.loss(features, torch.zeros(5, 3, 4, dtype=torch.long))
    assert calls == 5 * [12]
    with pytest.raises(ValueError, match="locked dropout needs"):
        layer.loss(features.view(-1, D), torch.zeros(60, dtype=torch.long))


@pytest.mark.parametrize("impl", ["eager", "fused"])
def test_a_retained_locked_dropout_takes_whole_sequences(impl):
    """As in training: the loss of seed 0 is that of the scores of seed 0."""
    layer = build("moc", output_impl=impl, context_dropout=0.5, locked_context_dropout=True).eval()
    layer.make_generation_fast_(retain_dropout=True)
    features, target = torch.randn(2, 4, D, dtype=torch.float64), torch.randint(V, (2, 4))
    torch.manual_seed(0)
    expected = F.nll_loss(layer.log_probs(features).flatten(0, 1), target.flatten(), reduction="sum")
    torch.manual_seed(0)
    torch.testing.assert_close(layer.loss(features, target)[0], expected)


def test_dropout_is_retained_in_the_modules_that_are_named():
    layer = build("moc", context_dropout=0.5).eval()
    for modules, retained in (["MixtureOfContexts"], True), (["TransformerDecoder"], False), (None, True), ([], False):
        layer.make_generation_fast_(retain_dropout=True, retain_dropout_modules=modules)
        assert layer.drops_out == retained


def test_mos_with_one_component_is_a_softmax_of_its_context():
    mos, moc = build("mos", num_components=1).eval(), build("moc", num_components=1).eval()
    features = torch.randn(N, D, dtype=torch.float64)
    context = torch.tanh(mos.context(features))
    expected = F.log_softmax(context @ mos.weight.t() + mos.bias, dim=-1)
    torch.testing.assert_close(mos.log_probs(features), expected)
    torch.testing.assert_close(moc.log_probs(features), expected)


@pytest.mark.parametrize("gates, component", [((1, 1, 0), 0), ((1, -1, 0), 1), ((-1, 0, 1), 2), ((-1, 0, -1), 3)])
def test_mixtape_with_saturated_gates_is_one_softmax(gates, component):
    """Eq. 3 with every γ at 0 or 1: one component has all the mass."""
    layer = build("mixtape", frequent_ratio=1.0).eval()
    with torch.no_grad():
        layer.gate_bias.copy_(1e4 * torch.tensor(gates).expand_as(layer.gate_bias))
    features = torch.randn(N, D, dtype=torch.float64)
    context = layer.context_vectors(features)[:, component]
    expected = F.log_softmax(context @ layer.weight.t() + layer.bias, dim=-1)
    torch.testing.assert_close(layer.log_probs(features), expected)


def test_mixtape_with_equal_gates_is_a_mixture_of_contexts():
    """Without v_x and b_x the frequent tokens have the shared gates, and the priors do not depend on the token."""
    layer = build("mixtape", frequent_ratio=0.5).eval()
    with torch.no_grad():
        layer.gate_embedding.zero_()
        layer.gate_bias.zero_()
    features = torch.randn(N, D, dtype=torch.float64)
    prior = reference.tree_priors(torch.sigmoid(layer.gate_shared(features)))
    context = (prior.unsqueeze(-1) * layer.context_vectors(features)).sum(-2)
    expected = F.log_softmax(context @ layer.weight.t() + layer.bias, dim=-1)
    torch.testing.assert_close(layer.log_probs(features), expected)


@pytest.mark.parametrize("num_components", range(2, 10))
def test_sigmoid_tree_mixes_by_the_reference_priors(num_components):
    gates = torch.rand(num_components - 1, N, dtype=torch.float64)
    leaves = torch.randn(num_components, N, dtype=torch.float64)
    priors = reference.tree_priors(gates.t())
    torch.testing.assert_close(sigmoid_tree(list(gates), list(leaves)), (priors * leaves.t()).sum(-1))


def test_rank_is_bounded_for_softmax_and_moc_only():
    """Rank of log P over 150 random contexts and 100 tokens at E = 8."""
    features = 3 * torch.randn(150, 8, dtype=torch.float64)
    rank = {}
    for name in OUTPUT_LAYERS:
        layer = build(name, 8, 100, output_embed_dim=8, frequent_ratio=1.0).eval()
        rank[name] = log_prob_rank(layer.log_probs(features).detach())
    assert rank["softmax"] <= 8 + 2 and rank["moc"] <= 8 + 2
    assert all(rank[name] > 50 for name in ("mos", "mixtape", "sigsoftmax", "gss", "plif"))


def test_initial_values_of_what_belongs_to_tokens():
    """Scores of features of variance 1 then have variance 1, whatever the widths."""
    config = OutputLayerConfig(output_layer="mixtape", output_embed_dim=16, gate_dim=25, frequent_ratio=1.0)
    layer = build_output_layer(config, feature_dim=64, vocab_size=2000)
    assert layer.weight.std().item() == pytest.approx(1 / 4, rel=0.03)
    assert layer.gate_embedding.std().item() == pytest.approx(1 / 5, rel=0.03)
    assert not layer.bias.any() and not layer.gate_bias.any()


def test_every_linear_module_is_called():
    """Hooks, and what takes the place of a module, such as one with quantization noise, see U_k as well."""
    layer, called = build("mixtape"), []
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    layer.loss(torch.randn(3, D, dtype=torch.float64), torch.tensor([5, 6, 7]))
    assert sorted(called) == ["context", "gate_hidden", "gate_shared"]


def test_gate_weight_norm_ignores_the_length_of_rows():
    layer = build("mixtape", gate_weight_norm=True).eval()
    features = torch.randn(N, D, dtype=torch.float64)
    before = layer(features)
    with torch.no_grad():
        layer.gate_hidden.weight.mul_(torch.rand(3 * GATE_DIM, 1) + 0.5)
    torch.testing.assert_close(layer(features), before)


def test_gate_weight_norm_of_tiny_rows_in_half_precision():
    layer = build("mixtape", gate_weight_norm=True).eval()
    features = torch.randn(N, D)
    with torch.no_grad():
        layer.gate_hidden.weight.mul_(1e-8)
    expected = layer.log_probs(features.double())
    log_probs = copy.deepcopy(layer).bfloat16().log_probs(features.bfloat16())
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=0.2)
    assert copy.deepcopy(layer).half().log_probs(features.half()).isfinite().all()  # rows are 0
