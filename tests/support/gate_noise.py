"""What the noise on gate logits has to be, on every device.

Shapes: K components, n tokens, S frequent tokens.
"""

import math

import torch


def drawn_noise(ops, device="cpu", k=7, n=8, size=500, noise=0.5, dtype=torch.float64):
    """The normal numbers of one call of ``mix_``, [K−1, n, S], and what it computed."""
    leaves = torch.randn(k, n, size, dtype=dtype, generator=torch.Generator().manual_seed(5)).to(device)
    gates = torch.zeros(k - 1, n, size, dtype=dtype, device=device)
    out = torch.empty(n, size, dtype=dtype, device=device)
    values = leaves.clone()
    ops.mix_(leaves, gates, noise, out)
    return torch.logit(gates.cpu()) / noise, (values, leaves, gates, out)


def assert_standard_normal(numbers):
    """4.5 standard errors of each of the first four moments, for each gate."""
    for node in numbers.double().flatten(1):
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(node.pow(power).mean() - moment) < 4.5 * math.sqrt(variance / len(node))


def assert_independent(numbers, again):
    """Of every other gate and token, of the neighbours in a row, and of the next call."""
    for streams in (torch.cat([numbers.flatten(1), again.flatten(1)]), numbers.transpose(0, 1).flatten(1)):
        correlation = torch.corrcoef(streams) - torch.eye(len(streams), dtype=streams.dtype)
        assert correlation.abs().max() < 4.5 / math.sqrt(streams.size(1))
    row = numbers.flatten()
    for lag in range(1, 9):
        assert abs((row[lag:] * row[:-lag]).mean()) < 4.5 / math.sqrt(len(row))
