"""examples/initial_values: initial values are as they say, and layers from outside the plugin train by --user-dir."""

import runpy

import pytest
import torch
from conftest import console_script, start, train_args
from recipes import ROOT

from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayerConfig, build_output_layer

USER_DIR = ROOT / "examples" / "initial_values"
D, V = 96, 400


@pytest.fixture(scope="module", autouse=True)
def registered():
    before = dict(OUTPUT_LAYERS)
    runpy.run_path(str(USER_DIR / "__init__.py"))
    yield
    for name in set(OUTPUT_LAYERS) - set(before):
        del OUTPUT_LAYERS[name]


def layer(name, **options):
    torch.manual_seed(1)
    return build_output_layer(OutputLayerConfig(output_layer=name, **options), D, V)


def same_but(name, *names, **options):
    """The plugin's layer and another, which differ in these parameters alone."""
    ours, other = layer(name.split("-")[0], **options), layer(name, **options)
    for parameter, value in ours.state_dict().items():
        assert torch.equal(value, other.state_dict()[parameter]) == (parameter not in names)
    return ours, other


def test_xavier():
    _, other = same_but("mixtape-xavier", "context.weight", output_embed_dim=48)
    bound = 5 / 3 * (6 / (D + 48)) ** 0.5
    for component in other.context.weight.unflatten(0, (4, 48)):
        assert 0.99 * bound < component.abs().max() <= bound
        assert component.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


@pytest.mark.parametrize("name", ["mixtape-identity", "moc-identity"])
def test_identity(name):
    _, other = same_but(name, "context.weight")
    for component in other.context.weight.unflatten(0, (4, D)):
        assert (component - torch.eye(D)).std().item() == pytest.approx(0.1 / D**0.5, rel=0.03)
    with pytest.raises(UserError, match=f"--output-layer {name} needs .* as wide as the features, 96; it is 48"):
        layer(name, output_embed_dim=48)


@pytest.mark.parametrize("name", ["mixtape-shared", "moc-shared"])
def test_shared(name):
    ours, other = same_but(name, "context.weight", "context.bias", output_embed_dim=48)
    first = ours.context.weight[:48]
    for component, bias in zip(other.context.weight.split(48), other.context.bias.split(48)):
        assert (component - first).std().item() == pytest.approx(0.1 / D**0.5, rel=0.03)
        assert torch.equal(bias, ours.context.bias[:48])


@pytest.mark.parametrize("output_impl", ["eager", "fused"])
@pytest.mark.parametrize("name", ["mixtape-fixed-scale", "moc-fixed-scale"])
def test_fixed_scale(name, output_impl):
    features, target = torch.randn(7, D), torch.randint(V, (7,))
    ours, other = same_but(name, context_scale=4.0, output_impl=output_impl)
    for each in (ours, other):
        torch.manual_seed(2)  # the noise of the gates
        each.loss(features, target)[0].backward()
        torch.optim.SGD(each.parameters(), 0.1).step()
    assert other.context_scale.item() == 4 != ours.context_scale.item()
    assert torch.equal(other.context.weight, ours.context.weight)
    with pytest.raises(UserError, match=f"--output-layer {name} needs a --context-scale; it has none"):
        layer(name)


@pytest.mark.parametrize("name, factor", [("mixtape-small-gates", 0.1), ("mixtape-large-token-vectors", 10)])
def test_token_vectors_of_the_gates(name, factor):
    ours, other = same_but(name, "gate_embedding")
    torch.testing.assert_close(other.gate_embedding, ours.gate_embedding * factor)


def test_large_gates():
    _, other = same_but("mixtape-large-gates", gate_weight_norm=True)
    features = torch.randn(7, D)
    weight = other.gate_hidden.weight / other.gate_hidden.weight.norm(dim=1, keepdim=True)
    expected = torch.tanh(4 * features @ weight.T + other.gate_hidden.bias)
    torch.testing.assert_close(other.eval().gate_contexts(features).flatten(-2), expected)


@pytest.mark.slow
def test_fairseq_train(data, tmp_path):
    args = train_args(data, tmp_path, "--output-layer", "mixtape-xavier", "--user-dir", USER_DIR, "--max-update", 2)
    process = start(console_script("train"), *args)
    _, stderr = process.communicate()
    assert process.returncode == 0 and (tmp_path / "checkpoint_last.pt").exists(), stderr
