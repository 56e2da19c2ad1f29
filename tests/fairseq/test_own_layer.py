"""docs/output_layers.md: its training without fairseq runs, and a layer in one file is all there is to a new layer.

Two of them, the one that the page shows and a mixture, go through whatever knows of layers, without another edit.
"""

import csv
import itertools
import re
import types

import pytest
import reference
import test_output_layer_interface as interface
import test_output_layers as contract
import torch
import torch.nn.functional as F
from conftest import SENTENCES, generate_args, hypotheses, run, train_args
from recipes import ROOT, load_script
from small_layers import PAD, D, V, build, gradients, random_targets

from mixtape_plugin.analysis.results import collect
from mixtape_plugin.benchmarks import network_benchmark, output_layer_benchmark
from mixtape_plugin.output_layers import OUTPUT_LAYERS, MixtureLayer, OutputLayerConfig, build_output_layer

TRAINING, LAYER, CURVE = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "output_layers.md").read_text("utf-8"), re.DOTALL
)


class Average(MixtureLayer):
    """p(x|c) = softmax_x((Σ_k h_k / K)·w_x + b_x)."""

    label = "average"

    @property
    def scores_per_token(self):
        return self.vocab_size

    @property
    def multiply_adds(self):
        return (self.vocab_size + self.num_components * self.feature_dim) * self.embed_dim

    def forward(self, features):
        return F.linear(self.context_vectors(features).mean(-2), self.weight, self.logit_bias)


@pytest.fixture(scope="module", autouse=True)
def registered():
    module = types.ModuleType("shown")
    exec(LAYER + CURVE, vars(module))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OUTPUT_LAYERS, "fixnorm", module.Fixnorm)
        patch.setitem(OUTPUT_LAYERS, "cubic", module.CubicSoftmax)
        patch.setitem(OUTPUT_LAYERS, "average", Average)
        yield


def test_training_without_fairseq(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert len(TRAINING.splitlines()) <= 50
    code, replaced = re.subn(r"STEPS, BATCH, (.*) = 300, 16, ", r"STEPS, BATCH, \1 = 20, 4, ", TRAINING)
    assert replaced == 1
    exec(code, {})
    *steps, last = capsys.readouterr().out.splitlines()
    perplexity = [float(re.fullmatch(r"step \d+: perplexity ([\d.]+)", line)[1]) for line in steps]
    assert len(perplexity) == 10 and perplexity[-1] < perplexity[0]
    assert last.startswith("most likely next: [")


def fixnorm(scores, bias, norms):
    return scores / norms + bias


def cubic(scores, bias, norms):
    return (scores + bias) + (scores + bias) ** 3


def test_an_embedding_of_zeros_has_no_huge_gradient():
    """As fairseq's of <pad> is at first, which a translation's scores have, too."""
    layer, features = build("fixnorm"), torch.randn(3, D, dtype=torch.float64)
    with torch.no_grad():
        layer.weight[PAD].zero_()
    layer.loss(features, torch.tensor([4, 5, 6]))[0].backward()
    assert 0 < layer.weight.grad[PAD].norm() < 1000 * features.norm()


@pytest.mark.parametrize("name, formula", [("fixnorm", fixnorm), ("cubic", cubic)])
def test_formula_of_the_layers_that_the_page_shows(name, formula):
    layer = build(name).eval()
    features, target = torch.randn(7, D, dtype=torch.float64), torch.arange(7)
    norms = layer.weight.pow(2).sum(1).sqrt()
    weights = torch.exp(formula(features @ layer.weight.t(), layer.bias, norms))
    log_probs = (weights / weights.sum(-1, keepdim=True)).log()
    torch.testing.assert_close(layer.log_probs(features), log_probs)
    expected = reference.label_smoothed_loss(log_probs, target, 0.1, PAD)
    torch.testing.assert_close(layer.loss(features, target, label_smoothing=0.1, ignore_index=PAD), expected)


def test_a_map_of_scores_has_a_fused_loss():
    layer = build("cubic", output_impl="fused")
    eager = build("cubic", output_impl="eager")
    features = torch.randn(7, D, dtype=torch.float64, requires_grad=True)
    target = random_targets()
    losses = [x.loss(features, target, label_smoothing=0.1, ignore_index=PAD)[0] for x in (layer, eager)]
    for fused, expected in zip(*(gradients(loss, x, features) for loss, x in zip(losses, (layer, eager)))):
        torch.testing.assert_close(fused, expected)
    with torch.inference_mode():
        torch.testing.assert_close(
            layer.loss(features, target, ignore_index=PAD)[0],
            eager.loss(features, target, ignore_index=PAD)[0],
        )


@pytest.mark.parametrize("name", ["fixnorm", "average"])
def test_contract(name):
    for test in (
        contract.test_gradcheck,
        contract.test_low_precision_sums_to_one_and_stays_near_float64,
        contract.test_autocast,
        contract.test_leading_dimensions_and_single_tokens,
        contract.test_ignored_targets_count_for_nothing,
        contract.test_impossible_targets_stay_finite,
        interface.test_multiply_adds_are_those_of_the_matrix_products,
        interface.test_features_of_another_type_are_refused,
    ):
        others = [mark.args for mark in test.pytestmark if mark.args[0] != "name"]  # what it is parametrized by
        for values in itertools.product(*(values for _, values in others)):
            test(name, **dict(zip((argument for argument, _ in others), values)))
    interface.test_tied_weight_is_the_embedding_itself()
    config = OutputLayerConfig(output_layer=name)
    masked = build_output_layer(config, D, V, masked_tokens=(0, 4))
    probs = masked.log_probs(torch.randn(3, D)).exp()
    assert (probs[:, [0, 4]] == 0).all() and (probs[:, 1] > 0).all()


@pytest.mark.slow
def test_training_generation_and_its_results(data, tmp_path):
    more = "--output-layer fixnorm --num-components 4 --share-decoder-input-output-embed --max-update 3".split()
    log = run("train", *train_args(data, tmp_path, *more), "--log-format", "simple").stdout
    stdout = run("generate", *generate_args(data, tmp_path / "checkpoint_last.pt")).stdout
    assert len(hypotheses(stdout)) == SENTENCES["test"]

    log = re.sub(r"^(\S+ [\d:]+),\d+", r"\1", log, flags=re.MULTILINE)  # milliseconds, which the command's log has not
    (tmp_path / "train.log").write_text(log)
    row, damaged = collect(tmp_path)
    assert damaged == [] and (row["layer"], row["updates"]) == ("fixnorm", 3)
    (tmp_path / "train.log").write_text(log.replace("'fixnorm'", "'average'"))
    assert collect(tmp_path)[0]["layer"] == "average-4"


def rows_of(script, options, path):
    load_script(script).main([*options.split(), "--rounds", "1", "--threads", "1", "--out", str(path)])
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_benchmark_of_layers(monkeypatch, tmp_path):
    # in this process, because a fresh one does not have the layer
    monkeypatch.setattr(
        output_layer_benchmark, "peak_memory_of_fresh_process", lambda *of: output_layer_benchmark.peak_memory(*of)
    )
    options = "--shapes 50:6:10:3:0.2:20 --impls eager fused --layers fixnorm average-2 average"
    rows = rows_of("benchmark_output_layers", options, tmp_path / "layers.csv")
    names = [(row["layer"], row["impl"]) for row in rows]
    assert names == [
        ("softmax", "plain"), ("softmax", "eager"), ("softmax", "fused"),
        ("fixnorm", "eager"), ("average-2", "eager"), ("average-3", "eager"),
    ]  # fmt: skip
    assert all(float(row["ms_median"]) > 0 for row in rows)
    assert [row["feature_dim"] for row in rows] == ["6", "6", "6", "6", "10", "10"]
    embedding = 50 * (6 + 1)
    parameters = [embedding, embedding, embedding, embedding, embedding + 2 * 6 * 11, embedding + 3 * 6 * 11]
    assert [int(row["parameters"]) for row in rows] == parameters
    ratios = [1, 1, 1, 1, (300 + 2 * 60) / 300, (300 + 3 * 60) / 300]
    assert [float(row["flop_ratio"]) for row in rows] == pytest.approx(ratios)


def test_benchmark_of_networks(monkeypatch, tmp_path):
    monkeypatch.setattr(network_benchmark, "in_fresh_process", lambda function, *of: function(*of))
    options = "--shapes 40:6:8,7,5 --batch-size 3 --segment-length 6 --layers fixnorm average-2"
    rows = rows_of("benchmark_networks", options, tmp_path / "networks.csv")
    assert [(row["layer"], row["impl"], row["hidden_sizes"]) for row in rows] == [
        ("softmax", "plain", "8,7,6"),
        ("softmax", "eager", "8,7,6"),
        ("softmax", "fused", "8,7,6"),
        ("fixnorm", "eager", "8,7,6"),
        ("average-2", "eager", "8,7,5"),
    ]
    assert all(float(row["output_ms_median"]) > 0 for row in rows)
    parameters = [int(row["parameters"]) for row in rows]
    assert parameters[0] == parameters[1] == parameters[2] == parameters[3]
