"""The normal numbers that fused Mixtape adds to gate logits on a CPU."""

import functools
import math
from statistics import NormalDist

import gate_noise
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mixtape_plugin.kernels import torch_ops as ops

# 64 bits make four numbers, and 13·101 is no multiple of four
drawn_noise = functools.partial(gate_noise.drawn_noise, ops, n=13, size=101)


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
    gate_noise.assert_standard_normal(drawn_noise(dtype=dtype)[0])


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_noise_is_drawn_where_the_gates_are(device):
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = torch.empty(4, 4, device=device)
        ops.add_normal_noise_(values, 0.1)
        assert values.device.type == device


def test_noise_is_independent():
    torch.manual_seed(0)
    gate_noise.assert_independent(drawn_noise()[0], drawn_noise()[0])


def test_noise_follows_the_seed():
    torch.manual_seed(3)
    first, second = drawn_noise()[0], drawn_noise()[0]
    torch.manual_seed(3)
    assert torch.equal(first, drawn_noise()[0]) and not torch.equal(first, second)


def test_noise_is_scaled():
    torch.manual_seed(1)
    small, _ = drawn_noise(noise=0.1)
    torch.manual_seed(1)
    torch.testing.assert_close(small, drawn_noise(noise=1.5)[0], rtol=1e-9, atol=1e-9)


def test_no_noise_leaves_the_generator_alone():
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    drawn_noise(noise=0.0)
    assert torch.equal(torch.rand(1), expected)
