"""The bottleneck experiment: its truth, its divergence, and that layers of low rank stay behind."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import load_script
from scipy.special import digamma

from mixtape_plugin.analysis import bottleneck
from mixtape_plugin.analysis.bottleneck import LAYERS, LR, FreeContexts, fit, kl_divergence, random_conditional
from mixtape_plugin.analysis.rank import log_prob_rank
from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import OutputLayerConfig

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bottleneck.py"


def test_truth_is_a_dirichlet_of_full_rank():
    concentration, vocab_size = 0.05, 200
    log_probs = random_conditional(3000, vocab_size, concentration, np.random.default_rng(0))
    assert np.isfinite(log_probs).all()
    probs = np.exp(log_probs)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-12)
    # Mean and second moment of one coordinate, and the mean entropy, of a symmetric Dirichlet.
    total = concentration * vocab_size
    assert probs.mean() == pytest.approx(1 / vocab_size)
    expected = concentration * (concentration + 1) / (total * (total + 1))
    assert (probs**2).mean() == pytest.approx(expected, rel=0.05)
    entropy = -(probs * log_probs).sum(1).mean()
    assert entropy == pytest.approx(digamma(total + 1) - digamma(concentration + 1), rel=0.02)
    assert log_prob_rank(torch.from_numpy(log_probs)) == vocab_size


def test_truth_depends_on_the_seed_only():
    first, again, other = (random_conditional(4, 5, 0.05, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_kl_divergence_is_the_sum_written_out():
    generator = torch.Generator().manual_seed(0)
    true_log_probs = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_probs = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = 0.0
    for p, q in zip(true_log_probs.exp().tolist(), log_probs.exp().tolist()):
        expected += sum(p[x] * np.log(p[x] / q[x]) for x in range(6)) / 3
    assert kl_divergence(true_log_probs, log_probs) == pytest.approx(expected, rel=1e-12)
    assert kl_divergence(true_log_probs, true_log_probs) == 0


def test_kl_divergence_takes_probabilities_of_zero():
    truth = torch.tensor([[0.0, 0.25, 0.75], [0.0, 0.0, 1.0]]).log()
    log_probs = torch.full((2, 3), 1 / 3, dtype=torch.float64).log()
    expected = (0.25 * np.log(0.75) + 0.75 * np.log(2.25) + np.log(3)) / 2
    assert kl_divergence(truth, log_probs) == pytest.approx(expected, rel=1e-6)
    underflow = torch.tensor([[-2000.0, 0.0]])  # e^-2000 is 0 even in float64
    assert kl_divergence(underflow, torch.tensor([[0.5, 0.5]]).log()) == pytest.approx(np.log(2), rel=1e-6)


def test_high_rank_layers_come_closer_to_the_truth():
    embed_dim = 4
    truth = torch.from_numpy(random_conditional(64, 32, 0.05, np.random.default_rng(1)))
    fits = {name: fit(truth, layer, embed_dim, steps=300, seed=1) for name, layer in LAYERS.items()}
    for name in ("softmax", "MoC"):
        assert fits[name].rank <= embed_dim + 2
        for better in ("MoS", "Mixtape"):
            assert fits[better].rank > embed_dim + 2
            assert fits[better].kl < fits[name].kl
    for name in ("SigSoftmax", "GSS"):
        assert fits[name].rank > embed_dim + 2
    for result in fits.values():
        assert 0 < result.kl < result.curve[0]
        assert len(result.curve) == 300


def test_fit_reports_what_it_says():
    """The curve begins at the divergence of a model of the same seed, untrained; parameters are counted by hand."""
    truth = torch.from_numpy(random_conditional(16, 8, 0.5, np.random.default_rng(1)))
    result = fit(truth, LAYERS["softmax"], embed_dim=3, steps=10, seed=5)
    torch.manual_seed(5)
    config = OutputLayerConfig(output_layer="softmax", output_embed_dim=3)
    untrained = FreeContexts(config, num_contexts=16, feature_dim=12, vocab_size=8)
    assert result.curve[0] == pytest.approx(kl_divergence(truth, untrained()), rel=1e-5)
    assert result.parameters == 12 * 3 + 8 * 3 + 8


def test_accuracy_is_the_share_of_contexts_whose_likeliest_token_is_found():
    truth = torch.full((6, 6), 0.02, dtype=torch.float64).fill_diagonal_(0.9).log()
    assert fit(truth, LAYERS["softmax"], embed_dim=5, steps=300, seed=1).accuracy == 1


def test_the_learning_rate_goes_up_and_down():
    """The curve of ten steps of torch's own Adam with its one-cycle schedule."""
    truth = torch.from_numpy(random_conditional(16, 8, 0.5, np.random.default_rng(1)))
    result = fit(truth, LAYERS["softmax"], embed_dim=3, steps=10, seed=5)
    torch.manual_seed(5)
    config = OutputLayerConfig(output_layer="softmax", output_embed_dim=3)
    model, curve = FreeContexts(config, num_contexts=16, feature_dim=12, vocab_size=8), []
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=10)
    for _ in range(10):
        curve.append(kl_divergence(truth, model()))
        optimizer.zero_grad()
        torch.nn.functional.kl_div(model(), truth.float(), reduction="batchmean", log_target=True).backward()
        optimizer.step()
        scheduler.step()
    assert result.curve == pytest.approx(curve, rel=1e-4)


def test_command_writes_table_curves_and_drawing(tmp_path):
    out = tmp_path / "out"
    options = ["--steps", "10", "--contexts", "24", "--tokens", "12", "--embed-dim", "2", "--out", out]
    result = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    tables = {"kl.csv", "layers.csv", "maps.csv", "singular_values.csv"}
    assert {path.name for path in out.iterdir()} == tables | {"bottleneck.png", "maps.png"}
    for drawing in ("bottleneck.png", "maps.png"):
        assert (out / drawing).read_bytes().startswith(b"\x89PNG")

    def read(name):
        with (out / name).open(newline="") as file:
            return list(csv.DictReader(file))

    layers, curve, sigma = read("layers.csv"), read("kl.csv"), read("singular_values.csv")
    assert [row["layer"] for row in layers] == list(LAYERS)
    assert len(curve) == 10 and len(sigma) == 12
    maps = read("maps.csv")
    assert list(maps[0]) == ["z", "SigSoftmax", "GSS", "LMS-PLIF"]
    for row in maps:
        z = float(row["z"])
        assert float(row["SigSoftmax"]) == pytest.approx(z - np.log1p(np.exp(-z)), abs=1e-9)
        assert float(row["GSS"]) == pytest.approx(2.5 * z + 1.5 * (1.5 - np.logaddexp(0, z + 1.5)), abs=1e-9)
    steps = np.diff([float(row["LMS-PLIF"]) for row in maps])
    assert (steps > 0).all() and steps.std() > 1e-4, "monotone, and its slopes differ"
    for row in layers:
        assert row["layer"] in result.stdout
        values = [float(line[row["layer"]]) for line in sigma]
        assert values == sorted(values, reverse=True)
    assert "Traceback" not in result.stderr and "DEBUG" not in result.stderr


@pytest.mark.parametrize("name", LAYERS)
def test_there_is_no_noise_in_a_fit(name, monkeypatch):
    """Nor dropout: the model that is reported is the one that was fitted."""
    seen = []

    def build(*args):
        seen.append(FreeContexts(*args).train())
        return seen[-1]

    monkeypatch.setattr(bottleneck, "FreeContexts", build)
    truth = torch.from_numpy(random_conditional(8, 6, 1.0, np.random.default_rng(0)))
    fit(truth, LAYERS[name], embed_dim=2, steps=10, seed=1)
    (model,) = seen
    assert model.training and torch.equal(model(), model())


def test_command_refuses_bad_options(tmp_path):
    script = load_script("bottleneck")
    (tmp_path / "file").write_text("")
    for options, message in [
        (["--steps", "0"], "--steps 0 is not allowed: at least 10"),
        (["--tokens", "1"], "--tokens 1 is not allowed: at least 2"),
        (["--contexts", "1000000000"], "--contexts 1000000000 times --tokens 512 is too large"),
        (["--seed", str(10**20)], f"--seed {10**20} is not allowed: less than 2^63"),
        (["--embed-dim", "999999"], "--embed-dim 999999 times the larger of --contexts and --tokens is too large"),
        (["--out", str(tmp_path / "file")], "cannot be a folder"),
    ]:
        with pytest.raises(UserError) as refusal:
            script.main(["--out", str(tmp_path / "out"), *options])
        assert message in str(refusal.value) and "\n" not in str(refusal.value)
        assert not (tmp_path / "out").exists()
