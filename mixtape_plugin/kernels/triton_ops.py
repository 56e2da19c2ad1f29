"""The elementwise operations of the fused losses (:class:`~mixtape_plugin.kernels.dispatch.Elementwise`) as Triton
kernels.

Buffers are float64, float32, bfloat16 or float16; arithmetic is in float32 or better. Their last dimension is
contiguous, the others have any strides, best multiples of 16. NaN and +∞ among the scores reach the results, so that a
loss scaler sees them; where a target is not in [0, V), loss and gradients are NaN (torch's own operations raise).

Sizes and strides of rows, K and Python floats are compile-time constants: a new value compiles a kernel anew. Blocks
are chosen by size alone: an autotuner would run a kernel again on its own output. The sums for PLIF's slopes are in
integers, which have no NaN: there the gradients of features and weights alone show one.

Shapes: n tokens of a chunk, K components, V vocabulary (``size`` in the kernels), S frequent tokens (``size`` in those
of the sigmoid tree).
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtape_plugin.kernels import torch_ops
from mixtape_plugin.kernels.curves import Curve, GeneralizedSigSoftmax, PiecewiseLinear
from mixtape_plugin.kernels.precision import at_least_float32
from mixtape_plugin.kernels.sigmoid_tree import nodes_bottom_up, rightmost_leaves

MAX_ROW_BLOCK = 8192  # columns of a row that a softmax takes in one step
MAX_TILE = 4096  # elements of a tile [K, columns] of a mixture of softmaxes
MAX_MIX_BLOCK = 1024  # columns of one program of the sigmoid tree
PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass BigCrush (Salmon et al. 2011)
FIXED_POINT = tl.constexpr(2.0**40)  # of sums of gradients, each about 1 at most: in integers their order is no matter
# Stands in for -inf in running maxima: x - LOWEST is never the NaN of -inf - -inf, and exp(-inf - LOWEST) is 0.
LOWEST = tl.constexpr(-3.4e38)
# What has a value or K values for each token: a chunk's may begin anywhere, and Triton would compile a kernel for each
# combination of those that begin at a multiple of 16 bytes.
BY_TOKEN = ("target", "log_prior", "nll", "log_sum_exp", "spread", "posterior", "rho", "ends")


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory [rows, columns] for a chunk's scores, leaves or gate logits. Each row begins at a multiple of 16 elements,
    without which loads and stores would be of one element at a time."""
    memory = torch.empty(rows, triton.cdiv(columns, 16) * 16, dtype=dtype, device=device)
    if device.type == "cpu":  # interpreted; processors with AMX multiply what pads a row by 0, and NaN · 0 is NaN
        memory.zero_()
    return memory[:, :columns]


# ---------------------------------------------------------------------------------------------- softmax


@triton.jit
def load_scores(logits, bias, real, columns, size: tl.constexpr, ACC: tl.constexpr):
    """logits + bias of some columns, for the rows that are real; -inf elsewhere."""
    scores = tl.load(logits + columns, mask=real & (columns < size), other=-float("inf")).to(ACC)
    if bias is not None:
        scores += tl.load(bias + columns, mask=columns < size, other=0.0).to(ACC)
    return scores


@triton.jit
def load_target_score(logits, bias, real, answer, size: tl.constexpr, ACC: tl.constexpr):
    inside = (answer >= 0) & (answer < size)
    score = load_scores(logits, bias, real, tl.where(inside, answer, 0), size, ACC)
    return tl.where(inside, score, float("nan"))


@triton.jit
def online_sum(highest, total, scores):
    """One step of Σ exp(score - highest), each lane on its own, with one exp: lanes are joined once, at the end."""
    shrink = tl.exp(-tl.abs(scores - highest))
    total = tl.where(scores > highest, total * shrink + 1.0, total + shrink)
    return tl.maximum(highest, scores), total


@triton.jit(do_not_specialize_on_alignment=BY_TOKEN)
def softmax_minus_label_kernel(
    logits,
    bias,
    target,
    nll,
    log_sum_exp,
    stride_row: tl.constexpr,
    size: tl.constexpr,
    target_weight: tl.constexpr,
    scale: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    answer = tl.load(target + row)
    target_score = load_target_score(logits, bias, True, answer, size, ACC)

    highest = tl.full([BLOCK], LOWEST, ACC)
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scores = load_scores(logits, bias, True, columns, size, ACC)
        highest, total = online_sum(highest, total, scores)
    top = tl.max(highest, 0)
    norm = tl.sum(total * tl.exp(highest - top), 0)
    tl.store(nll + row, tl.log(norm) + (top - target_score))
    tl.store(log_sum_exp + row, tl.log(norm) + top)

    tl.debug_barrier()  # every thread has read its target's score before another overwrites it
    inverse = tl.where((answer >= 0) & (answer < size), scale / norm, float("nan"))
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scores = load_scores(logits, bias, True, columns, size, ACC)
        grad = tl.exp(scores - top) * inverse
        grad = tl.where(columns == answer, grad - scale * target_weight, grad)
        tl.store(logits + columns, grad, mask=columns < size)


def softmax_minus_label_(
    logits: Tensor, bias: Optional[Tensor], target: Tensor, target_weight: float, scale: float = 1.0
) -> Tuple[Tensor, Tensor]:
    """logits [n, V] become scale · (softmax(logits + bias) − target_weight · onehot(target)), rounded once. Returns nll
    and log Σ exp(logits + bias), [n] each."""
    n, size = logits.shape
    acc = at_least_float32(logits.dtype)
    nll, log_sum_exp = logits.new_empty(2, n, dtype=acc)
    warps = warps_of(size, 4 if size <= 2048 else 8 if size <= 32768 else 16)
    launch(
        softmax_minus_label_kernel,
        n,
        logits,
        contiguous(bias),
        contiguous(target),
        nll,
        log_sum_exp,
        stride_row=logits.stride(0),
        size=size,
        target_weight=float(target_weight),
        scale=float(scale),
        ACC=TL_DTYPES[acc],
        BLOCK=min(triton.next_power_of_2(size), 512 * warps, MAX_ROW_BLOCK),
        num_warps=warps,
    )
    return nll, log_sum_exp


# ---------------------------------------------------------------------------------------------- softmax of a curve


@triton.jit
def map_scores(
    scores, offsets, slopes, first: tl.constexpr, second: tl.constexpr, pieces: tl.constexpr, ACC: tl.constexpr
):
    """f(z), f'(z), and i and r of a piecewise linear f. Without pieces f is GSS with c and k; else of T and δ."""
    if pieces == 0:
        x = scores - first
        e = tl.exp(-tl.abs(x))
        value = scores + (second - 1.0) * (tl.minimum(x, 0.0) - tl.log(1.0 + e))
        slope = 1.0 + (second - 1.0) * (tl.where(x >= 0, e, 1.0) / (1.0 + e))
        return value, slope, x.to(tl.int64), x
    else:
        u = (scores + first) / second
        index = tl.minimum(tl.maximum(tl.minimum(u, pieces).to(tl.int64), 0), pieces - 1)  # no larger than an integer
        r = u - index.to(ACC)
        slope = tl.load(slopes + index)
        return tl.load(offsets + index) + second * r * slope, slope, index, r


@triton.jit
def map_only(
    scores, offsets, slopes, first: tl.constexpr, second: tl.constexpr, pieces: tl.constexpr, ACC: tl.constexpr
):
    value, slope, index, r = map_scores(scores, offsets, slopes, first, second, pieces, ACC)
    return value


@triton.jit(do_not_specialize_on_alignment=BY_TOKEN)
def curve_softmax_minus_label_kernel(
    logits,
    bias,
    target,
    mask,
    offsets,
    slopes,
    nll,
    spread,
    sums,
    ends,
    stride_row: tl.constexpr,
    size: tl.constexpr,
    target_weight: tl.constexpr,
    epsilon: tl.constexpr,
    scale: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
    pieces: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    answer = tl.load(target + row)
    known = (answer >= 0) & (answer < size)
    score = load_scores(logits, bias, True, tl.where(known, answer, 0), size, ACC)
    target_score = map_only(score, offsets, slopes, first, second, pieces, ACC)
    if mask is not None:
        target_score = tl.where(tl.load(mask + tl.where(known, answer, 0)) == 0, target_score, -float("inf"))
    target_score = tl.where(known, target_score, float("nan"))

    highest = tl.full([BLOCK], LOWEST, ACC)
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        counted = columns < size
        scores = load_scores(logits, bias, True, columns, size, ACC)
        if mask is not None:
            counted = counted & (tl.load(mask + columns, mask=counted, other=1) == 0)
        value = map_only(tl.where(counted, scores, 0.0), offsets, slopes, first, second, pieces, ACC)
        highest, total = online_sum(highest, total, tl.where(counted, value, -float("inf")))
    top = tl.max(highest, 0)
    norm = tl.sum(total * tl.exp(highest - top), 0)
    tl.store(nll + row, tl.log(norm) + (top - target_score))

    tl.debug_barrier()  # every thread has read its target's score before another overwrites it
    inverse = tl.where(known, 1.0 / norm, float("nan"))
    spreads = tl.zeros([BLOCK], ACC)
    low = tl.zeros([BLOCK], ACC)
    high = tl.zeros([BLOCK], ACC)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        counted = columns < size
        scores = load_scores(logits, bias, True, columns, size, ACC)
        if mask is not None:
            counted = counted & (tl.load(mask + columns, mask=counted, other=1) == 0)
        scores = tl.where(counted, scores, 0.0)
        value, slope, index, r = map_scores(scores, offsets, slopes, first, second, pieces, ACC)
        grad = tl.exp(value - top) * inverse - epsilon
        grad = tl.where(columns == answer, grad - target_weight, grad)
        grad = tl.where(counted, grad, 0.0)
        spreads += tl.where(counted, tl.log(norm) + (top - value), 0.0)
        tl.store(logits + columns, scale * grad * slope, mask=columns < size)
        if sums is not None:
            moment = grad * r
            inner = (index > 0) & (index < pieces - 1)
            # Nothing here reads the sums, so that no order of memory is needed: fences would empty the cache each time.
            whole = (moment * FIXED_POINT).to(tl.int64)
            tl.atomic_add(sums + index, whole, mask=counted & inner, sem="relaxed")
            whole = (grad * FIXED_POINT).to(tl.int64)
            tl.atomic_add(sums + pieces + index, whole, mask=counted, sem="relaxed")
            low += tl.where(counted & (index == 0), moment, 0.0)
            high += tl.where(counted & (index == pieces - 1) & (index > 0), moment, 0.0)
    tl.store(spread + row, tl.sum(spreads))
    if sums is not None:
        tl.store(ends + 2 * row, tl.sum(low))
        tl.store(ends + 2 * row + 1, tl.sum(high))


def curve_softmax_minus_label_(
    logits: Tensor,
    bias: Optional[Tensor],
    target: Tensor,
    curve: Curve,
    target_weight: float,
    epsilon: float,
    mask: Optional[Tensor],
    scale: float = 1.0,
) -> Tuple[Tensor, Tensor]:
    """logits [n, V] become scale · f'(z) · (softmax(f(z)) − target_weight · onehot(target) − epsilon), z = logits +
    bias, rounded once. Returns nll and spread, [n] each.

    There is a kernel for GSS and for piecewise linear curves, whose sums by piece are in fixed point, and so equal to
    the last bit each time; r, which has no bound on the end pieces, is summed in rows there. Other curves go through
    torch's operations.
    """
    n, size = logits.shape
    acc = at_least_float32(logits.dtype)
    offsets = slopes = sums = ends = None
    if isinstance(curve, GeneralizedSigSoftmax):
        first, second, pieces = curve.c, curve.k, 0
    elif isinstance(curve, PiecewiseLinear):
        first, second, pieces = curve.limit, curve.width, curve.pieces
        offsets, slopes = curve.tables
        if curve.sums is not None:
            sums = torch.zeros(2, pieces, dtype=torch.int64, device=logits.device)
            ends = logits.new_zeros(n, 2, dtype=acc)
    else:
        return torch_ops.curve_softmax_minus_label_(logits, bias, target, curve, target_weight, epsilon, mask, scale)
    nll, spread = logits.new_empty(2, n, dtype=acc)
    warps = warps_of(size, 4 if size <= 2048 else 8)
    launch(
        curve_softmax_minus_label_kernel,
        n,
        logits,
        contiguous(bias),
        contiguous(target),
        None if mask is None else contiguous(mask).view(torch.uint8),
        contiguous(offsets),
        contiguous(slopes),
        nll,
        spread,
        sums,
        ends,
        stride_row=logits.stride(0),
        size=size,
        target_weight=float(target_weight),
        epsilon=float(epsilon),
        scale=float(scale),
        first=float(first),
        second=float(second),
        pieces=pieces,
        ACC=TL_DTYPES[acc],
        BLOCK=min(triton.next_power_of_2(size), 256 * warps, MAX_ROW_BLOCK),
        num_warps=warps,
    )
    if sums is not None:
        curve.sums += sums.double() / FIXED_POINT.value
        moments = ends.double().sum(0)
        curve.sums[0, 0] += moments[0]
        curve.sums[0, -1] += moments[1]
    return nll, spread


# ---------------------------------------------------------------------------------------------- mixture of softmaxes


@triton.jit
def log_sum_exp(x):
    """Over axis 0, kept with size 1; -inf where all are -inf."""
    top = tl.maximum(tl.max(x, 0, keep_dims=True), LOWEST)
    return top + tl.log(tl.sum(tl.exp(x - top), 0, keep_dims=True))


@triton.jit
def share_of(log_joint, log_prob):
    """exp(log_joint - log_prob), 0 where both are -inf; NaN stays NaN."""
    return tl.where(log_joint < LOWEST, 0.0, tl.exp(log_joint - log_prob))


@triton.jit(do_not_specialize_on_alignment=BY_TOKEN)
def mos_smoothing_kernel(
    logits,
    bias,
    log_prior,
    target,
    mask,
    nll,
    spread,
    posterior,
    rho,
    stride_component: tl.int64,
    stride_row: tl.constexpr,
    size: tl.constexpr,
    target_weight: tl.constexpr,
    epsilon: tl.constexpr,
    scale: tl.constexpr,
    ACC: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    component = tl.arange(0, K_BLOCK)[:, None]
    real = component < K
    logits += row * stride_row + component * stride_component  # [K_BLOCK, 1]
    answer = tl.load(target + row)
    target_score = load_target_score(logits, bias, real, answer + 0 * component, size, ACC)

    highest = tl.full([K_BLOCK, BLOCK], LOWEST, ACC)
    total = tl.zeros([K_BLOCK, BLOCK], ACC)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        scores = load_scores(logits, bias, real, columns, size, ACC)
        highest, total = online_sum(highest, total, scores)
    top = tl.max(highest, 1, keep_dims=True)
    norm = tl.sum(total * tl.exp(highest - top), 1, keep_dims=True)
    norm = tl.where(real, norm, 1.0)
    log_scale = tl.load(log_prior + row * K + component, mask=real, other=-float("inf")).to(ACC) - tl.log(norm)

    target_joint = target_score - top + log_scale  # log π_k p_k(target)
    target_log_prob = log_sum_exp(target_joint)
    posteriors = share_of(target_joint, target_log_prob)
    tl.store(nll + row, -tl.sum(target_log_prob))
    tl.store(posterior + row * K + component, posteriors, mask=real)

    shares = tl.zeros([K_BLOCK, BLOCK], ACC)
    spreads = tl.zeros([1, BLOCK], ACC)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        scores = load_scores(logits, bias, real, columns, size, ACC)
        joint = scores - top + log_scale
        log_prob = log_sum_exp(joint)
        shares += share_of(joint, log_prob)
        counted = columns < size
        if mask is not None:
            counted = counted & (tl.load(mask + columns, mask=counted, other=1) == 0)
        spreads -= tl.where(counted, log_prob, 0.0)
    shares_sum = tl.sum(shares, 1, keep_dims=True)
    tl.store(spread + row, tl.sum(spreads))
    tl.store(rho + row * K + component, shares_sum, mask=real)

    tl.debug_barrier()  # every thread has read its target's scores before another overwrites them
    prob_weight = scale * (target_weight * posteriors + epsilon * shares_sum) / norm
    target_grad = scale * target_weight * posteriors
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        scores = load_scores(logits, bias, real, columns, size, ACC)
        joint = scores - top + log_scale
        grad = tl.exp(scores - top) * prob_weight - scale * epsilon * share_of(joint, log_sum_exp(joint))
        grad = tl.where(columns == answer, grad - target_grad, grad)
        tl.store(logits + columns, grad, mask=real & (columns < size))


def mos_smoothing_(
    logits: Tensor,
    bias: Optional[Tensor],
    log_prior: Tensor,
    target: Tensor,
    target_weight: float,
    epsilon: float,
    mask: Optional[Tensor],
    scale: float = 1.0,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [n, K, V] become scale · (p_kx (target_weight · r_k + epsilon · ρ_k) − epsilon · R_kx
    − target_weight · r_k · [x = target]). Returns nll and spread, [n] each, and r and ρ, [n, K] each, where r is 0 if
    p(target) is."""
    n, num_components, size = logits.shape
    acc = at_least_float32(logits.dtype)
    nll, spread = logits.new_empty(2, n, dtype=acc)
    posterior, rho = logits.new_empty(2, n, num_components, dtype=acc)
    rows = triton.next_power_of_2(num_components)
    launch(
        mos_smoothing_kernel,
        n,
        logits,
        contiguous(bias),
        contiguous(log_prior),
        contiguous(target),
        None if mask is None else contiguous(mask).view(torch.uint8),
        nll,
        spread,
        posterior,
        rho,
        logits.stride(1),
        stride_row=logits.stride(0),
        size=size,
        target_weight=float(target_weight),
        epsilon=float(epsilon),
        scale=float(scale),
        ACC=TL_DTYPES[acc],
        K=num_components,
        K_BLOCK=rows,
        BLOCK=min(triton.next_power_of_2(size), max(MAX_TILE // rows, 1)),
        num_warps=8,
    )
    return nll, spread, posterior, rho


# ---------------------------------------------------------------------------------------------- sigmoid tree


@triton.jit
def normal4(seed, column, row, group):
    """Four standard normals for each (column, row, group): each has 32 of the 128 bits of Philox' counter to itself, so
    that no two elements share a number however many there are."""
    zero = column * 0
    a, b, c, d = tl.philox(seed, column, zero + row, zero + group, zero, PHILOX_ROUNDS)
    w, x = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
    y, z = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d))
    return w, x, y, z


@triton.jit
def mix_kernel(
    leaves,
    gates,
    out,
    stride_leaf: tl.int64,
    stride_gate: tl.int64,
    seed,
    stride_leaf_row: tl.constexpr,
    stride_gate_row: tl.constexpr,
    stride_root_row: tl.constexpr,
    size: tl.constexpr,
    noise: tl.constexpr,
    K: tl.constexpr,
    LEAVES: tl.constexpr,
    SLOTS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (size + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    leaves += row * stride_leaf_row + columns
    gates += row * stride_gate_row + columns

    normals = ()
    if noise > 0:
        for group in tl.static_range((K + 2) // 4):
            normals = normals + normal4(seed, columns, tl.program_id(0) // blocks, group)
    values = ()  # of the nodes 2K-2, 2K-3, ... 0: that of node i has index 2K-2-i, the children of j are 2j+1 and 2j+2
    for node in tl.static_range(2 * K - 2, K - 2, -1):
        values = values + (tl.load(leaves + (LEAVES >> 16 * node & 65535) * stride_leaf, mask=inside).to(ACC),)
    for node in tl.static_range(K - 2, -1, -1):
        logit = tl.load(gates + node * stride_gate, mask=inside).to(ACC)
        if noise > 0:
            logit += noise * normals[node]
        gamma = tl.sigmoid(logit)
        difference = values[2 * K - 3 - 2 * node] - values[2 * K - 4 - 2 * node]
        values = values + (values[2 * K - 4 - 2 * node] + gamma * difference,)
        tl.store(gates + node * stride_gate, gamma, mask=inside)
        tl.store(leaves + (SLOTS >> 16 * node & 65535) * stride_leaf, difference, mask=inside)
    tl.store(out + row * stride_root_row + columns, values[2 * K - 2], mask=inside)


@triton.jit
def mix_backward_kernel(
    leaves,
    gates,
    grad,
    stride_leaf: tl.int64,
    stride_gate: tl.int64,
    stride_leaf_row: tl.constexpr,
    stride_gate_row: tl.constexpr,
    stride_root_row: tl.constexpr,
    size: tl.constexpr,
    K: tl.constexpr,
    LEAVES: tl.constexpr,
    SLOTS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (size + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    leaves += row * stride_leaf_row + columns
    gates += row * stride_gate_row + columns

    grads = (tl.load(grad + row * stride_root_row + columns, mask=inside).to(ACC),)  # of the nodes 0, 1, ... 2K-2
    for node in tl.static_range(K - 1):
        gamma = tl.load(gates + node * stride_gate, mask=inside).to(ACC)
        difference = tl.load(leaves + (SLOTS >> 16 * node & 65535) * stride_leaf, mask=inside).to(ACC)
        left = grads[node] * gamma
        tl.store(gates + node * stride_gate, left * difference * (1.0 - gamma), mask=inside)
        grads = grads + (left, grads[node] * (1.0 - gamma))
    tl.debug_barrier()  # every difference has been read before a leaf's gradient takes its place
    for node in tl.static_range(K - 1, 2 * K - 1):
        tl.store(leaves + (LEAVES >> 16 * node & 65535) * stride_leaf, grads[node], mask=inside)


def mix_(leaves: Tensor, gates: Tensor, noise: float, out: Tensor) -> None:
    """The sigmoid tree over leaves [K, n, S] with gate logits [K−1, n, S], into out [n, S]; γ stays in ``gates``,
    left − right in the slot of each left child.

    The last slot keeps its leaf: unlike in torch_ops, values of nodes never leave the registers. The noise's seed comes
    from torch's generator of the CPU.
    """
    # from 2³² on, and odd: Triton would compile another kernel for a seed of 32 bits or a multiple of 16
    seed = int(torch.randint(1 << 32, 1 << 62, ())) | 1 if noise > 0 else 1 << 32
    launch_on_tree(mix_kernel, leaves, gates, out, seed=seed, noise=float(noise))


def mix_backward_(leaves: Tensor, gates: Tensor, grad: Tensor) -> None:
    """What :func:`mix_` left behind becomes the gradients of leaves and gate logits, given that of its result."""
    launch_on_tree(mix_backward_kernel, leaves, gates, grad)


def tree_slots(num_components: int) -> Tuple[int, int]:
    """The component that each leaf is, and the slot that the difference of each node with children goes to. Node j has
    bits 16j to 16j+15 of an integer: Triton before 3.4 has no constant tuples."""
    components = sum(component << 16 * node for node, component in enumerate(rightmost_leaves(num_components)))
    differences = sum(node.left << 16 * node.number for node in nodes_bottom_up(num_components))
    return components, differences


def launch_on_tree(kernel: triton.KernelInterface, leaves: Tensor, gates: Tensor, root: Tensor, **arguments) -> None:
    num_components, n, size = leaves.shape
    assert is_row_contiguous(gates) and is_row_contiguous(root)
    component_of_leaf, slot_of_difference = tree_slots(num_components)
    # as many columns as keep the values and gates of all nodes in registers
    block = min(triton.next_power_of_2(size), MAX_MIX_BLOCK, 4096 // triton.next_power_of_2(num_components))
    launch(
        kernel,
        n * triton.cdiv(size, block),
        leaves,
        gates,
        root,
        leaves.stride(0),
        gates.stride(0),
        **arguments,
        stride_leaf_row=leaves.stride(1),
        stride_gate_row=gates.stride(1),
        stride_root_row=root.stride(0),
        size=size,
        K=num_components,
        LEAVES=component_of_leaf,
        SLOTS=slot_of_difference,
        ACC=TL_DTYPES[at_least_float32(leaves.dtype)],
        BLOCK=block,
        num_warps=4,
    )


# ---------------------------------------------------------------------------------------------- launching

TL_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def is_row_contiguous(tensor: Tensor) -> bool:
    return tensor.size(-1) == 1 or tensor.stride(-1) == 1


def warps_of(columns: int, most: int) -> int:
    """Warps for a row that is overwritten: more than it has columns for would be copies of others, and could read what
    those have written."""
    return min(most, max(triton.next_power_of_2(columns) // 32, 1))


def contiguous(tensor: Optional[Tensor]) -> Optional[Tensor]:
    return None if tensor is None else tensor.contiguous()


def launch(kernel: triton.KernelInterface, programs: int, buffer: Tensor, *arguments, **constants) -> None:
    """Runs a kernel whose first argument is a big buffer, on the buffer's device."""
    assert is_row_contiguous(buffer)
    if programs:
        with torch.cuda.device_of(buffer):  # Triton launches on the current device; does nothing for CPU tensors
            kernel[(programs,)](buffer, *arguments, **constants)
