"""Rank, effective rank and mean divergence, against matrices whose singular values are known and against loops."""

import math

import numpy as np
import pytest
import torch
from conftest import LAYERS
from hypothesis import given, settings
from hypothesis import strategies as st

from mixtape_plugin.analysis.divergence import PairwiseDivergence
from mixtape_plugin.analysis.rank import Gram, effective_rank, gram_bytes, log_prob_rank, press_rank, singular_values
from mixtape_plugin.output_layers import OutputLayerConfig, build_output_layer

EPSILON = 2.0**-23


def orthogonal(n, columns, generator):
    q, _ = torch.linalg.qr(torch.randn(n, columns, generator=generator, dtype=torch.float64))
    return q


def with_singular_values(contexts, tokens, sigma):
    """U·diag(σ)·Vᵀ with random orthonormal U and V."""
    generator = torch.Generator().manual_seed(0)
    sigma = torch.tensor(sigma, dtype=torch.float64)
    u, v = (orthogonal(n, len(sigma), generator) for n in (contexts, tokens))
    return u * sigma @ v.T


def streamed(matrix, size=17):
    gram = Gram(*matrix.shape)
    for part in matrix.split(size):
        gram.add(part)
    return gram.singular_values()


def softmax_log_probs(contexts, tokens, embed_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(contexts, embed_dim, generator=generator, dtype=torch.float64)
    w = torch.randn(tokens, embed_dim, generator=generator, dtype=torch.float64)
    b = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return torch.log_softmax((h @ w.T + b).to(dtype), -1), (h, w, b)


# ------------------------------------------------------------------------------------------------ singular values


@pytest.mark.parametrize("contexts, tokens", [(90, 60), (60, 90), (60, 60), (3000, 1100), (1100, 1500)])
def test_gram_gives_the_singular_values(contexts, tokens):
    """Of given ones, over five orders of magnitude, and those of the decomposition itself; the larger sizes are of
    several blocks of rows and columns."""
    sigma = [10 ** (2 - 5 * i / 39) for i in range(40)]
    matrix = with_singular_values(contexts, tokens, sigma)
    if contexts <= tokens:
        matrix = matrix.float()  # which is how they are held there
    found = streamed(matrix, 700 if contexts > 1000 else 17)
    assert len(found) == min(contexts, tokens)
    np.testing.assert_allclose(found[:40], sigma, rtol=1e-6 if contexts > tokens else 1e-3)
    np.testing.assert_allclose(found[:40], singular_values(matrix)[:40], rtol=1e-6)
    assert (found[40:] < 1e-4).all()  # rounding; float32's is σ_max · 6e-8 · √N
    assert press_rank(found, contexts, tokens) == 40


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("contexts, tokens", [(1500, 40), (40, 70)])
def test_chunks_change_nothing(contexts, tokens, size):
    matrix = softmax_log_probs(contexts, tokens, 5)[0]
    np.testing.assert_allclose(streamed(matrix, size), streamed(matrix, contexts), atol=1e-6)


def test_more_rows_than_announced_are_refused():
    gram = Gram(3, 2)
    gram.add(torch.zeros(2, 2))
    with pytest.raises(ValueError):
        gram.add(torch.zeros(2, 2))


def test_softmax_has_the_singular_values_of_its_factors():
    """log P = [H, 1, −lse]·[W, b, 1]ᵀ = Q₁R₁R₂ᵀQ₂ᵀ: those of R₁R₂ᵀ, a matrix of E + 2 columns."""
    log_probs, (h, w, b) = softmax_log_probs(300, 120, 10, torch.float64)
    ones = torch.ones(300, 1, dtype=torch.float64)
    left = torch.cat([h, ones, -(h @ w.T + b).logsumexp(-1, keepdim=True)], 1)
    right = torch.cat([w, b.unsqueeze(1), torch.ones(120, 1, dtype=torch.float64)], 1)
    expected = torch.linalg.svdvals(torch.linalg.qr(left)[1] @ torch.linalg.qr(right)[1].T)
    np.testing.assert_allclose(streamed(log_probs)[:12], expected, rtol=1e-9)


def test_sums_in_float32_would_not_do():
    """The reason for float64: the rank of a softmax is E + 2, and a float32 Gram matrix counts its own rounding."""
    log_probs, _ = softmax_log_probs(900, 300, 20)
    assert press_rank(streamed(log_probs), 900, 300) == log_prob_rank(log_probs) == 22
    rounded = torch.linalg.eigvalsh(log_probs.T @ log_probs).double().clamp(min=0).sqrt()
    assert press_rank(rounded, 900, 300) > 40


@pytest.mark.parametrize("output_layer", LAYERS)
def test_rank_of_every_layer(output_layer):
    """softmax and MoC have E + 2, the others more (PLIF with slopes as random as here); Mixtape, with gates of its own
    for S tokens, at most S + E + 2."""
    torch.manual_seed(0)
    embed_dim, frequent, tokens = 6, 12, 80
    config = OutputLayerConfig(
        output_layer=output_layer, num_components=4, gate_dim=8, output_embed_dim=embed_dim,
        frequent_ratio=frequent / tokens,
    )  # fmt: skip
    layer = build_output_layer(config, feature_dim=embed_dim, vocab_size=tokens, masked_tokens=()).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        log_probs = layer.log_probs(torch.randn(200, embed_dim))
    rank = press_rank(streamed(log_probs), *log_probs.shape)
    assert rank == log_prob_rank(log_probs)
    if output_layer in ("softmax", "moc"):
        assert rank == embed_dim + 2
    else:
        assert rank > embed_dim + 2
    if output_layer == "mixtape":
        assert rank <= frequent + embed_dim + 2


def test_features_of_a_layer_norm_cost_softmax_one():
    """Σ_i (h_i − β_i)/γ_i = 0: [H, 1] has rank E instead of E + 1, and log P E + 1."""
    torch.manual_seed(0)
    log_probs, (h, w, b) = softmax_log_probs(200, 80, 6, torch.float64)
    gain, shift = torch.rand(6, dtype=torch.float64) + 0.5, torch.randn(6, dtype=torch.float64)
    normed = torch.nn.functional.layer_norm(h, (6,), gain, shift)
    assert log_prob_rank(log_probs) == 8
    normed_log_probs = (normed @ w.T + b).log_softmax(-1)
    assert press_rank(streamed(normed_log_probs), 200, 80) == log_prob_rank(normed_log_probs) == 7


# ------------------------------------------------------------------------------------------------------------ rank


def test_press_rank_by_hand():
    threshold = 0.5 * math.sqrt(10 + 6 + 1) * EPSILON * 3
    sigma = torch.tensor([3, 1, threshold * 1.01, threshold * 0.99, 0], dtype=torch.float64)
    assert press_rank(sigma, 10, 6) == 3
    assert press_rank(sigma, 10, 6, epsilon=0.2) == 1  # ½·√17·.2·3 = 1.24
    assert press_rank(torch.zeros(3), 10, 6) == 0


def test_effective_rank_by_hand():
    sigma = torch.tensor([3.0, 2.0, 1.0, 0.0])  # energies 9, 13, 14, 14 of 14
    assert [effective_rank(sigma, epsilon) for epsilon in (0.5, 0.3, 0.05, 1e-5)] == [1, 2, 3, 3]
    assert effective_rank(torch.tensor([1.0]), 1e-3) == 1


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.sampled_from([0.1, 1e-2, 1e-3]))
def test_effective_rank_is_the_least_that_suffices(sigma, epsilon):
    sigma = sorted(sigma, reverse=True)
    k = effective_rank(torch.tensor(sigma, dtype=torch.float64), epsilon)
    total = math.fsum(s * s for s in sigma)
    share = [math.fsum(s * s for s in sigma[:n]) / total for n in (k - 1, k)]
    assert share[0] < 1 - epsilon + 1e-12 and share[1] >= 1 - epsilon - 1e-12


@pytest.mark.parametrize("c, printed", [(1e-24, 0.1159), (1e-23, 0.6869), (1e-22, 0.9001)])
def test_noise_has_the_rank_of_the_quarter_circle_law(c, printed):
    """Supplement 15 of Parthiban et al.: Gaussian noise of variance c/n² on an n × n matrix, σ_max = 1, float64's ε.

    The noise's σ follow (1/π)·√(4 − y²) in units of √n times its standard deviation. The paper has n = 10,000; with a
    variance of c/400n² the threshold lies at the same y where n = 500, and rank/n must be what it printed.
    """
    n, epsilon = 500, 2.0**-52
    rng = np.random.default_rng(0)
    u, v = (x / np.linalg.norm(x) for x in rng.standard_normal((2, n)))
    sigma = np.linalg.svd(np.outer(u, v) + rng.standard_normal((n, n)) * math.sqrt(c / 400) / n, compute_uv=False)
    x = 0.5 * math.sqrt(2 * n + 1) * epsilon * math.sqrt(n) / (2 * math.sqrt(c / 400))
    share = 1 - (2 / math.pi) * (x * math.sqrt(1 - x * x) + math.asin(x))
    rank = press_rank(torch.from_numpy(sigma), n, n, epsilon)
    assert share == pytest.approx(printed, abs=1e-3) and rank / n == pytest.approx(printed, abs=0.01)


# ------------------------------------------------------------------------------------------------------ divergence


def test_mean_divergence_is_the_double_loop():
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(13, 9, generator=generator)).log_softmax(-1)
    total = 0.0
    for p in log_probs.double().tolist():
        for q in log_probs.double().tolist():
            total += math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q))
    for size in (1, 5, 13):
        divergence = PairwiseDivergence()
        for part in log_probs.split(size):
            divergence.add(part)
        assert divergence.mean() == pytest.approx(total / 13**2, rel=1e-12)


def test_equal_contexts_do_not_diverge():
    divergence = PairwiseDivergence()
    divergence.add(torch.randn(1, 9).log_softmax(-1).expand(4, 9))
    assert divergence.mean() == pytest.approx(0, abs=1e-12)


def test_memory_counts_what_is_held():
    assert gram_bytes(82_430, 10_000) == 8 * 10_000**2 + 8 * 1024 * 10_000
    assert gram_bytes(82_430, 10_000, "cuda") == 16 * 10_000**2
    assert gram_bytes(100, 50) == 8 * 50**2 + 8 * 100 * 50
    assert gram_bytes(100, 500) == 8 * 100**2 + 4 * 100 * 500 + 16 * 1024 * 500


def test_effective_rank_where_the_share_is_met_exactly():
    sigma = torch.tensor([3.0, 2.0, 1.0, 1.0, 1.0])  # energies 9, 13, 14, 15, 16 of 16
    assert [effective_rank(sigma, epsilon) for epsilon in (7 / 16, 3 / 16, 2 / 16, 1 / 16)] == [1, 2, 3, 4]
