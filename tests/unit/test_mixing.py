"""How mixtures mix: the measures on vectors worked out by hand, and the priors of a target against eq. 3 and 4."""

import math
from types import SimpleNamespace

import pytest
import torch

from mixtape_plugin.analysis.mixing import measure, walk
from mixtape_plugin.output_layers import OutputLayerConfig, output_layer_class


def make(name, **options):
    config = OutputLayerConfig(output_layer=name, **options)
    return output_layer_class(name)(config, 6, 10).double().eval()


def test_measures():
    priors = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
    contexts = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[3.0, 0.0], [-1.0, 0.0]], [[2.0, 2.0], [2.0, 2.0]]])
    found = measure(priors, contexts, context_scale=-2.5)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert found["components"].tolist() == pytest.approx([2, 1, math.exp(entropy)])
    assert found["cosine"].tolist() == pytest.approx([0, -1, 1], abs=1e-6)
    assert found["length"].tolist() == pytest.approx([2.5 / 3.5, 1, 1])
    assert found["saturated"].tolist() == [0.5, 0.25, 0]  # beyond 2.25


def test_one_component_agrees_with_itself():
    found = measure(torch.ones(2, 1), torch.randn(2, 1, 5))
    for name in ("components", "cosine", "length"):
        assert found[name].tolist() == pytest.approx([1, 1])


def test_several_components_in_pairs():
    contexts = torch.randn(4, 5, 7, dtype=torch.float64)
    pairs = [
        torch.cosine_similarity(contexts[:, j], contexts[:, k], dim=-1) for j in range(5) for k in range(5) if j != k
    ]
    found = measure(torch.full((4, 5), 0.2, dtype=torch.float64), contexts)
    torch.testing.assert_close(found["cosine"], torch.stack(pairs).mean(0))
    torch.testing.assert_close(found["length"], contexts.mean(1).norm(dim=-1) / contexts.norm(dim=-1).mean(-1))


def test_priors_under_autocast():
    for name in "mos", "moc", "mixtape":
        layer = make(name).float()
        features, tokens = torch.randn(4, 6), torch.tensor([0, 3, 8, 9])
        with torch.autocast("cpu", torch.bfloat16):
            priors = layer.priors(features, tokens)
        torch.testing.assert_close(priors.float(), layer.priors(features, tokens), rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ["mos", "moc"])
def test_priors_of_contexts(name):
    layer, features = make(name, num_components=3), torch.randn(4, 6, dtype=torch.float64)
    logits = features @ layer.prior.weight.T
    expected = logits.exp() / logits.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(layer.priors(features, torch.tensor([0, 3, 9, 9])), expected)


@pytest.mark.parametrize("weight_norm", [False, True])
def test_priors_of_tokens(weight_norm):
    """With them the scores are Σ_k π_{x,k} h_k·w_x + b_x, for tokens with gates of their own and without."""
    layer = make("mixtape", gate_dim=5, frequent_ratio=0.5, gate_weight_norm=weight_norm)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    features = torch.randn(4, 6, dtype=torch.float64)
    for token in (0, 4, 5, 9):
        tokens = torch.full((4,), token)
        priors = layer.priors(features, tokens)
        torch.testing.assert_close(priors.sum(-1), torch.ones_like(priors[:, 0]))
        products = layer.context_vectors(features) @ layer.weight[token]
        torch.testing.assert_close((priors * products).sum(-1) + layer.bias[token], layer(features)[:, token])


def test_a_walk_takes_for_saturated_what_is_near_the_scaled_bound():
    layer = make("moc", context_scale=3.0)
    layer.context.weight.data.zero_()
    layer.context.bias.data.fill_(0.5)  # 3·tanh(.5) = 1.39 is beyond .9, and within .9·3
    pieces = [(torch.randn(4, 6, dtype=torch.float64), torch.arange(4))]
    trained = SimpleNamespace(layer=layer, folder="x", pieces=lambda split: pieces)
    assert walk(trained, "test", lambda size: None)["saturated"].tolist() == [0, 0, 0, 0]
