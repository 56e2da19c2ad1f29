"""Every output layer against the float64 reference, and the contract they share.

Shapes: N tokens, D features, E embedding, K components, V vocabulary, S frequent tokens.
"""

import copy
import functools
import math
import pickle

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary

from mixtape_plugin.analysis.rank import log_prob_rank
from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import (
    OUTPUT_LAYERS,
    OutputLayer,
    OutputLayerConfig,
    build_output_layer,
    check_dictionary,
)
from mixtape_plugin.output_layers.mixtape import sigmoid_tree

N, D, E, V, GATE_DIM = 7, 6, 5, 11, 3
PAD = 1
MIXTURES = [name for name in OUTPUT_LAYERS if OUTPUT_LAYERS[name].has_components]


def build(name, feature_dim=D, vocab_size=V, tied_weight=None, **options):
    embed_dim = E if OUTPUT_LAYERS[name].has_projection else None
    small = {"gate_dim": GATE_DIM, "plif_pieces": 9, "plif_range": 3.0}  # scores are on every piece and beyond them
    options = {**small, "gate_noise": 0.0, "output_embed_dim": embed_dim, **options}
    if tied_weight is not None:
        options["output_embed_dim"] = None
    torch.manual_seed(0)
    layer = build_output_layer(OutputLayerConfig(output_layer=name, **options), feature_dim, vocab_size, tied_weight)
    for parameter in layer.parameters():  # biases too, and gates far from 1/2
        torch.nn.init.normal_(parameter)
    return layer.double()


def random_targets():
    target = torch.randint(2, V, (N,))
    target[2] = PAD
    return target


def gradients(loss, layer, features):
    return torch.autograd.grad(loss, [features, *layer.parameters()], retain_graph=True)


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


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_multiply_adds_are_those_of_the_matrix_products(name):
    flop_counter = pytest.importorskip("torch.utils.flop_counter")  # torch 2.1 and up
    layer = build(name).eval()
    with flop_counter.FlopCounterMode(display=False) as counter:
        layer(torch.randn(N, D, dtype=torch.float64, requires_grad=True))  # with a gradient: the formula written out
    left_out = counter.get_total_flops() / (2 * N) - layer.multiply_adds
    assert 0 <= left_out <= D * layer.config.num_components  # priors, or gates that are shared
    assert layer.scores_per_token >= V


@pytest.mark.parametrize("impl", ["eager", "fused"])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_features_of_another_type_are_refused(name, impl):
    """By the loss as by the scores: not trained in one type, and evaluated in none."""
    layer, target = build(name, output_impl=impl).float(), random_targets()
    features = torch.randn(N, D, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="features of torch.bfloat16 do not go with a layer of torch.float32"):
        layer.loss(features, target)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.loss(features, target)[0].isfinite()


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_a_layer_has_options_of_its_own(name):
    """One set of options, changed from layer to layer, is how layers are compared."""
    config = OutputLayerConfig(output_layer=name, context_scale=2.0)
    layer = build_output_layer(config, D, V)
    config.output_layer, config.context_dropout, config.gss_k = "another", 0.9, 100.0
    assert layer.config == OutputLayerConfig(output_layer=name, context_scale=2.0)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_a_copy_asks_for_the_same_rates(name):
    """torch copies a parameter without its attributes."""
    layer = build(name, context_scale=2.0, plif_lr_scale=0.5)
    wanted = {k: p.optim_overrides for k, p in layer.named_parameters() if hasattr(p, "optim_overrides")}
    assert wanted["context_scale"] == {"optimizer": {"weight_decay_scale": 0.0}} and len(wanted) == 1 + (name == "plif")
    for other in copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)):
        for key, parameter in other.named_parameters():
            assert getattr(parameter, "optim_overrides", None) == wanted.get(key)


def test_what_fits_of_another_layer_is_loaded_where_that_is_asked_for():
    softmax, mixtape = build("softmax"), build("mixtape", output_embed_dim=D)
    with pytest.raises(RuntimeError, match="Missing key.*gate_embedding"):
        mixtape.load_state_dict(softmax.state_dict())
    missing, unexpected = mixtape.load_state_dict(softmax.state_dict(), strict=False)
    assert "gate_embedding" in missing and not unexpected
    torch.testing.assert_close(mixtape.weight, softmax.weight, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_compiled_and_exported(name):
    """torch's compiler, up to where it writes code for a processor, and its export give what the layer gives."""
    dynamo = pytest.importorskip("torch._dynamo")
    layer, target = build(name), random_targets()
    features = torch.randn(N, D, dtype=torch.float64, requires_grad=True)

    def loss(features, target):
        return layer.loss(features, target, label_smoothing=0.1, ignore_index=PAD)[0]

    dynamo.reset()
    plain, compiled = loss(features, target), torch.compile(loss, backend="aot_eager")(features, target)
    torch.testing.assert_close(compiled, plain)
    for ours, theirs in zip(gradients(compiled, layer, features), gradients(plain, layer, features)):
        torch.testing.assert_close(ours, theirs)
    exported = torch.export.export(layer.eval(), (features.detach(),)).module()
    torch.testing.assert_close(exported(features.detach()), layer(features.detach()))


def test_fused_is_refused_where_there_is_no_fused_loss(monkeypatch):
    class Plain(OUTPUT_LAYERS["softmax"]):
        fused_loss = OutputLayer.fused_loss

    monkeypatch.setitem(OUTPUT_LAYERS, "plain", Plain)
    assert isinstance(build("plain", output_impl="auto"), Plain) and not Plain.has_fused_loss()
    with pytest.raises(UserError, match="--output-impl fused is not allowed: --output-layer plain has no fused loss"):
        build("plain", output_impl="fused")


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


@pytest.mark.parametrize(
    "name, impl",
    [(n, impl) for n, layer in OUTPUT_LAYERS.items() for impl in ["eager", "fused"][: 1 + layer.has_fused_loss()]],
)
def test_features_without_a_target_each_are_refused(name, impl):
    """With one mask a sequence too, where contexts are those of all features."""
    layer = build(name, output_impl=impl, context_dropout=0.5, locked_context_dropout=True).train()
    features = torch.randn(2, 4, layer.feature_dim, dtype=torch.float64)
    for shape in (2, 3), (8,), (4, 2), (2,):
        with pytest.raises(ValueError, match=r"features \[2, 4, \d+\] need one target each"):
            layer.loss(features, torch.zeros(shape, dtype=torch.long))


def test_rank_is_bounded_for_softmax_and_moc_only():
    """Rank of log P over 150 random contexts and 100 tokens at E = 8."""
    features = 3 * torch.randn(150, 8, dtype=torch.float64)
    rank = {}
    for name in OUTPUT_LAYERS:
        layer = build(name, 8, 100, output_embed_dim=8, frequent_ratio=1.0).eval()
        rank[name] = log_prob_rank(layer.log_probs(features).detach())
    assert rank["softmax"] <= 8 + 2 and rank["moc"] <= 8 + 2
    assert all(rank[name] > 50 for name in ("mos", "mixtape", "sigsoftmax", "gss", "plif"))


def test_tied_weight_is_the_embedding_itself():
    embedding = torch.nn.Embedding(V, E)
    for name in OUTPUT_LAYERS:
        layer = build(name, feature_dim=E, tied_weight=embedding.weight)
        assert layer.weight is embedding.weight and layer.embed_dim == E
    layer = build("mixtape", feature_dim=D, tied_weight=embedding.weight)
    assert layer.context.weight.shape == (4 * E, D)


def test_parameter_names_and_shapes():
    layer = build("mixtape", num_components=4, frequent_ratio=0.5)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    frequent = round(0.5 * V)
    assert shapes == {
        "weight": (V, E),
        "bias": (V,),
        "context.weight": (4 * E, D),
        "context.bias": (4 * E,),
        "gate_hidden.weight": (3 * GATE_DIM, D),
        "gate_hidden.bias": (3 * GATE_DIM,),
        "gate_embedding": (frequent, GATE_DIM),
        "gate_shared.weight": (3, D),
        "gate_bias": (frequent, 3),
    }
    for name in ("mos", "moc"):
        shapes = {name: tuple(p.shape) for name, p in build(name, num_components=3).named_parameters()}
        assert shapes["prior.weight"] == (3, D) and shapes["context.weight"] == (3 * E, D)
        assert set(shapes) == {"weight", "bias", "context.weight", "context.bias", "prior.weight"}


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


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_components": 2.5}, "--num-components 2.5 is not allowed: a whole number"),
        ({"num_components": "4"}, "--num-components '4' is not allowed: a whole number"),
        ({"output_embed_dim": 8.0}, "--output-embed-dim 8.0 is not allowed: a whole number"),
        ({"gate_noise": None}, "--gate-noise None is not allowed: a number"),
        ({"gate_noise": True}, "--gate-noise True is not allowed: a number"),
        ({"locked_context_dropout": "no"}, "--locked-context-dropout 'no' is not allowed: True or False"),
        ({"output_impl": 1}, "--output-impl 1 is not allowed: a string"),
        ({"output_layer": "maxout"}, "--output-layer maxout .*softmax or mos or moc or mixtape"),
        ({"output_layer": "mos", "num_components": 0}, "--num-components 0 .*at least 1"),
        ({"context_scale": -1.0}, "--context-scale -1.0 .*more than 0, or 0"),
        ({"num_components": 1}, "--num-components 1 .*mixtape.*at least 2"),
        ({"frequent_ratio": 0.0}, "--frequent-ratio 0.0 .*more than 0 and at most 1"),
        ({"frequent_ratio": 1.5}, "--frequent-ratio 1.5 "),
        ({"frequent_ratio": math.nan}, "--frequent-ratio nan "),
        ({"output_layer": "gss", "gss_c": np.float32("nan")}, "--gss-c nan is not allowed: any number, and finite"),
        ({"frequent_ratio": 0.01}, "--frequent-ratio 0.01 of 11 tokens"),
        ({"gate_dim": 0}, "--gate-dim 0 .*at least 1"),
        ({"gate_dropout": 1.0}, "--gate-dropout 1.0 .*less than 1"),
        ({"gate_noise": -0.1}, "--gate-noise -0.1 .*0 or more"),
        ({"context_dropout": -0.5}, "--context-dropout -0.5 "),
        ({"output_embed_dim": 0}, "--output-embed-dim 0 "),
        ({"output_impl": "magic"}, "--output-impl magic .*auto or eager"),
        ({"output_layer": "softmax", "output_embed_dim": 5}, "softmax .* 5 .* 6"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        build_output_layer(OutputLayerConfig(**options), D, V)


def test_tied_width_is_checked():
    with pytest.raises(UserError, match="--output-embed-dim 4 .*tied embedding.* 5"):
        build_output_layer(OutputLayerConfig(output_embed_dim=4), D, V, torch.nn.Parameter(torch.zeros(V, 5)))


def test_tied_rows_and_masked_ids_are_checked():
    with pytest.raises(ValueError, match=f"needs {V} rows, one for each token, not 16"):
        build("softmax", tied_weight=torch.nn.Parameter(torch.zeros(16, D)))
    for embedding in torch.zeros(V, D), torch.nn.Parameter(torch.zeros(V, D)) * 1:  # neither trained nor saved
        with pytest.raises(ValueError, match="a tied embedding must be the nn.Parameter itself"):
            build("softmax", tied_weight=embedding)
    for sizes in (0, V), (D, 0):
        with pytest.raises(ValueError, match=f"^{sizes[0]} features and {sizes[1]} tokens are not allowed: at least 1"):
            build_output_layer(OutputLayerConfig(output_layer="softmax"), *sizes)
    for masked in torch.tensor([3, 1]), (3, 1):
        layer = build_output_layer(OutputLayerConfig(output_layer="softmax"), D, V, masked_tokens=masked)
        assert layer.masked_tokens == (3, 1)
    for token in -1, V:
        with pytest.raises(ValueError, match=f"ids from 0 to {V - 1}, not .*{token}"):
            build_output_layer(OutputLayerConfig(output_layer="softmax"), D, V, masked_tokens=[3, token])


def test_one_token_to_predict():
    with pytest.raises(ValueError, match="all 2 tokens are masked"):
        build_output_layer(OutputLayerConfig(output_layer="softmax"), D, 2, masked_tokens=[1, 0])
    layer = build_output_layer(OutputLayerConfig(output_layer="softmax"), D, 2, masked_tokens=[0])
    features, target = torch.randn(N, D), torch.ones(N, dtype=torch.long)
    assert layer.loss(features, target)[0].item() == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match="label_smoothing 0.1 is not allowed: 0, with one token to predict"):
        layer.loss(features, target, label_smoothing=0.1)


@pytest.mark.parametrize("impl", ["eager", "auto"])
def test_label_smoothing_is_checked(impl):
    layer = build("softmax", feature_dim=D, output_impl=impl)
    for value in -0.1, 1.0, math.nan:
        with pytest.raises(ValueError, match=f"label_smoothing {value} is not allowed: from 0 to less than 1"):
            layer.loss(torch.zeros(N, D).double(), random_targets(), label_smoothing=value)


@pytest.mark.parametrize("num_components, ratio", [(2, 0.5), (4, 0.1), (5, 1.0)])
def test_parameters_are_those_of_the_page(num_components, ratio):
    """The formulas of docs/output_layers.md."""
    num_frequent, contexts = round(ratio * V), num_components * E * (D + 1)
    gates = (num_components - 1) * (GATE_DIM * (D + 1) + D) + num_frequent * (GATE_DIM + num_components - 1)
    mixture = contexts + num_components * D
    beside = {"mos": mixture, "moc": mixture, "mixtape": contexts + gates, "plif": 9}  # plif_pieces of build
    for name in OUTPUT_LAYERS:
        layer = build(name, num_components=num_components, frequent_ratio=ratio)
        count = sum(parameter.numel() for parameter in layer.parameters())
        assert count == V * layer.embed_dim + V + beside.get(name, 0), name
        scaled = build(name, num_components=num_components, frequent_ratio=ratio, context_scale=4.0)
        assert sum(parameter.numel() for parameter in scaled.parameters()) == count + 1


def make_dictionary(counts):
    dictionary = Dictionary()
    for i, count in enumerate(counts):
        dictionary.add_symbol(f"w{i}", n=count)
    return dictionary


@pytest.mark.parametrize(
    "counts, problem", [([9, 5, 7, 3, 2, 1, 1, 1], "not ordered by frequency"), ([100] * 4, "the same count .100")]
)
def test_gate_sharing_refuses_a_dictionary_without_frequencies(counts, problem):
    dictionary = make_dictionary(counts)
    with pytest.raises(UserError, match=problem):
        check_dictionary(OutputLayerConfig(frequent_ratio=0.5), dictionary)
    check_dictionary(OutputLayerConfig(frequent_ratio=1.0), dictionary)
    check_dictionary(OutputLayerConfig(output_layer="mos"), dictionary)
    check_dictionary(OutputLayerConfig(frequent_ratio=0.5), make_dictionary([5, 5, 2, 0]))
    # Language tokens and masks come after the padding.
    check_dictionary(OutputLayerConfig(frequent_ratio=0.5), make_dictionary([9, 8, 5, 3, 1, 0, 0, 1, 1]))
