"""The normal numbers that fused Mixtape adds to gate logits on a CPU."""

import math
from statistics import NormalDist

import pytest
import torch

from mixtape_plugin.kernels import torch_ops as ops

GATES, TOKENS, COLUMNS = 6, 8, 503  # an odd number of columns: 64 bits make four numbers


def drawn_numbers(noise=0.5, dtype=torch.float64):
    """What one call of ``mix_`` adds to logits of 0, divided by the noise: [K−1, n, S]."""
    leaves = torch.zeros(GATES + 1, TOKENS, COLUMNS, dtype=dtype)
    gates = torch.zeros(GATES, TOKENS, COLUMNS, dtype=dtype)
    ops.mix_(leaves, gates, noise, torch.empty(TOKENS, COLUMNS, dtype=dtype))
    return torch.logit(gates) / noise


def largest_correlation(streams):
    return (torch.corrcoef(streams) - torch.eye(len(streams), dtype=streams.dtype)).abs().max()


def test_quantiles():
    quantiles = ops.normal_quantiles(torch.float64)
    normal = NormalDist()
    for part in (0, 1, 1000, 2**15 - 1, 2**15, 60_000, 2**16 - 1):
        assert quantiles[part].item() == pytest.approx(normal.inv_cdf((part + 0.5) / 2**16), rel=1e-9)
    assert 0 < 1 - quantiles.square().mean() < 3e-5


def test_each_quantile_is_as_likely_as_the_others():
    """All of them appear, and the sum of squared deviations is what chance makes it (4.5 standard deviations)."""
    torch.manual_seed(0)
    draws, kinds = 2**21, 2**16
    values = torch.zeros(2**9, 2**12, dtype=torch.float64)
    ops.add_normal_noise_(values, 1.0)
    counts = torch.bincount(torch.searchsorted(ops.normal_quantiles(torch.float64), values.flatten()), minlength=kinds)
    assert len(counts) == kinds and counts.min() > 0
    chi_square = (counts.double() - draws / kinds).square().sum() * kinds / draws
    assert abs(chi_square - (kinds - 1)) < 4.5 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_is_standard_normal(dtype):
    torch.manual_seed(0)
    numbers = drawn_numbers(dtype=dtype).double().flatten()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(numbers.pow(power).mean() - moment) < 4.5 * math.sqrt(variance / len(numbers))


def test_noise_is_independent():
    """Of every other gate and token, of the neighbours that the same bits make, and of the next call."""
    torch.manual_seed(0)
    numbers, again = drawn_numbers(), drawn_numbers()
    streams = torch.cat([numbers.flatten(1), again.flatten(1)])
    assert largest_correlation(streams) < 4.5 / math.sqrt(streams.size(1))
    tokens = numbers.transpose(0, 1).flatten(1)
    assert largest_correlation(tokens) < 4.5 / math.sqrt(tokens.size(1))
    flat = numbers.flatten()
    for lag in range(1, 9):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 4.5 / math.sqrt(len(flat))


def test_noise_follows_the_seed():
    torch.manual_seed(3)
    first, second = drawn_numbers(), drawn_numbers()
    torch.manual_seed(3)
    assert torch.equal(first, drawn_numbers()) and not torch.equal(first, second)


def test_noise_is_scaled():
    torch.manual_seed(1)
    small = drawn_numbers(noise=0.1)
    torch.manual_seed(1)
    torch.testing.assert_close(small, drawn_numbers(noise=1.5), rtol=1e-9, atol=1e-9)


def test_no_noise_leaves_the_generator_alone():
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    ops.mix_(torch.zeros(2, 1, 3), torch.zeros(1, 1, 3), 0.0, torch.empty(1, 3))
    assert torch.equal(torch.rand(1), expected)
