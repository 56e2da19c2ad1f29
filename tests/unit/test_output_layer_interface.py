"""What every output layer shares beside its formula: options, parameters, copies, and what it refuses."""

import abc
import copy
import math
import pickle

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from small_layers import GATE_DIM, PAD, D, E, N, V, build, gradients, random_targets

from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import (
    OUTPUT_LAYERS,
    OutputLayer,
    OutputLayerConfig,
    build_output_layer,
    check_dictionary,
)


@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_multiply_adds_are_those_of_the_matrix_products(name):
    flop_counter = pytest.importorskip("torch.utils.flop_counter")  # torch 2.1 and up
    layer = build(name).eval()
    with flop_counter.FlopCounterMode(display=False) as counter:
        layer(torch.randn(N, D, dtype=torch.float64, requires_grad=True))  # with a gradient: the formula written out
    left_out = counter.get_total_flops() / (2 * N) - layer.multiply_adds
    assert 0 <= left_out <= D * layer.config.num_components  # priors, or gates that are shared
    assert layer.scores_per_token >= V


@pytest.mark.parametrize("impl", ["eager", "auto"])
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
    """torch copies a parameter, or puts another in, without its attributes."""
    layer = build(name, context_scale=2.0, context_scale_lr_scale=0.25, plif_lr_scale=0.5)
    wanted = {k: p.optim_overrides for k, p in layer.named_parameters() if hasattr(p, "optim_overrides")}
    of_the_scale = {"weight_decay_scale": 0.0, "lr_scale": 0.25}
    assert wanted["context_scale"] == {"optimizer": of_the_scale} and len(wanted) == 1 + (name == "plif")
    assigned = build(name, context_scale=2.0, context_scale_lr_scale=0.25, plif_lr_scale=0.5)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    for other in copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), assigned:
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_exported_with_a_dynamic_batch_size(name, inference):
    """Under torch.no_grad() the fused inference of mos and mixtape fixes the size: docs/output_layers.md says eager."""
    export = pytest.importorskip("torch.export")
    layer = build(name, output_impl="eager" if inference else "auto").eval()
    batches = ({0: export.Dim("batch")},)
    with torch.set_grad_enabled(not inference):
        exported = export.export(layer, (torch.randn(2, 3, D, dtype=torch.float64),), dynamic_shapes=batches).module()
        features = torch.randn(5, 3, D, dtype=torch.float64)
        torch.testing.assert_close(exported(features), layer(features))


@pytest.mark.filterwarnings("ignore")  # torch.jit is on its way out
@pytest.mark.parametrize("name", OUTPUT_LAYERS)
def test_traced(name):
    """A trace of one batch gives the distributions of another."""
    layer = build(name, context_scale=2.0).eval()
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(2, 3, D, dtype=torch.float64))
        features = torch.randn(5, 7, D, dtype=torch.float64)
        torch.testing.assert_close(traced(features).log_softmax(-1), layer.log_probs(features))


def test_a_layer_may_have_other_bases():
    class Mixin:
        def __init_subclass__(cls, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.tag = tag

    class Tagged(OutputLayer, Mixin, abc.ABC, tag="own"):
        @property
        def noise(self):
            return 0.0

    assert Tagged.tag == "own" and {"noise", "logit_bias"} < set(Tagged.__jit_unused_properties__)


def test_fused_is_refused_where_there_is_no_fused_loss(monkeypatch):
    class Plain(OUTPUT_LAYERS["softmax"]):
        fused_loss = OutputLayer.fused_loss

    monkeypatch.setitem(OUTPUT_LAYERS, "plain", Plain)
    assert isinstance(build("plain", output_impl="auto"), Plain) and not Plain.has_fused_loss()
    with pytest.raises(UserError, match="--output-impl fused is not allowed: --output-layer plain has no fused loss"):
        build("plain", output_impl="fused")


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
        ({"context_dropout": 1.0}, "--context-dropout 1.0 .*less than 1"),
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
    for masked in torch.tensor([3, 1]), (1, 3), (3, 1, 3):
        layer = build_output_layer(OutputLayerConfig(output_layer="softmax"), D, V, masked_tokens=masked)
        assert layer.masked_tokens == (1, 3), "each once"
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
