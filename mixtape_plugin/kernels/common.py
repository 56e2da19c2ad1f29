"""What the fused losses share: chunks, products that add up in float32, and the class that a layer's loss fills in.

Shapes: N tokens, n of a chunk, E embedding, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from mixtape_plugin.kernels.dispatch import elementwise, uses_triton
from mixtape_plugin.kernels.precision import at_least_float32, gradient_scale, score_bytes

# Scores of a chunk. On a CPU, glibc keeps blocks of up to 32 MiB for the next step; larger ones are given back to the
# system, and clearing their pages anew takes longer than using them. On a GPU a chunk costs some dozens of launches,
# which take longer than what they start unless that is large; without Triton some operations copy a chunk, or more.
CHUNK_BYTES = {"torch": 2**25, "triton": 2**29}
# A matrix product of fewer rows no longer runs at full speed, whatever memory it saves.
MIN_ROWS = 256


class Smoothing(NamedTuple):
    """Label smoothing: loss = target_weight · nll + epsilon · Σ_x −log p(x), over the tokens that are not masked."""

    num_predictable: int
    target_weight: float = 1.0
    epsilon: float = 0.0

    @classmethod
    def over(cls, num_predictable: int, label_smoothing: float) -> Smoothing:
        """The target keeps 1 − ε, each of the others, V' − 1 of V' that are not masked, gets ε / (V' − 1), as in
        fairseq."""
        if label_smoothing == 0:
            return cls(num_predictable)
        epsilon = label_smoothing / (num_predictable - 1)
        return cls(num_predictable, 1 - label_smoothing - epsilon, epsilon)

    def loss(self, nll: Tensor, spread: Tensor) -> Tensor:
        return self.target_weight * nll + self.epsilon * spread


def chunks(
    num_tokens: int, scores_per_token: int, dtype: torch.dtype, device: torch.device, rows_per_token: int = 1
) -> list:
    """Slices of equal size, but for the last, whose scores fit into :data:`CHUNK_BYTES`, or have :data:`MIN_ROWS`."""
    budget = CHUNK_BYTES["triton" if uses_triton(device) else "torch"]
    size = max(budget // (scores_per_token * score_bytes(dtype)), -(-MIN_ROWS // rows_per_token), 1)
    number = max(-(-num_tokens // size), 1)
    size = max(-(-num_tokens // number), 1)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def longest(slices: list) -> int:
    """Tokens of the longest chunk, which is the first."""
    return slices[0].stop - slices[0].start if slices else 0


@functools.lru_cache(maxsize=None)
def has_float32_products() -> bool:
    """Whether torch multiplies half-precision matrices on a GPU into a float32 one."""
    return "dtype_out" in torch.ops.aten.addmm.overloads()


def rounds_products(matrix: Tensor) -> bool:
    """Whether products of such a matrix are rounded to its type before :func:`add_product_` adds them up."""
    return matrix.dtype == torch.bfloat16 and not (matrix.is_cuda and has_float32_products())


def add_product_(
    total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0, constant: Tensor | None = None
) -> None:
    """total += alpha · left @ right, where total may be of a wider type than the factors; and += constant, in each row.

    Where the product is rounded, the constant is added before: later it would be rounded away where it is small, in
    the same direction in each row.
    """
    if constant is not None:
        if rounds_products(left):
            total.add_(torch.addmm(constant.to(left.dtype), left, right, alpha=alpha))
            return
        total.add_(constant)
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=alpha)
    elif rounds_products(left):
        total.add_(torch.mm(left, right), alpha=alpha)
    elif left.is_cuda and has_float32_products():
        torch.addmm(total, left, right, total.dtype, alpha=alpha, out=total)
    else:  # sums over a chunk can be beyond float16's range
        total.addmm_(left.to(total.dtype), right.to(total.dtype), alpha=alpha)


def zeros(tensor: Tensor) -> Tensor:
    """To add up a tensor's gradient in, in float32 or better."""
    return torch.zeros(tensor.shape, dtype=at_least_float32(tensor.dtype), device=tensor.device)


class FusedLoss:
    """Label-smoothed cross entropy of an output layer, chunk by chunk, and the gradients of its inputs with it.

    A layer's loss is a subclass that fills in :meth:`begin`, :meth:`add_chunk` and perhaps :meth:`finish`. It is made
    for one batch and called once, by :meth:`loss_and_nll`. What it finds and adds to:

    - ``ops``: the elementwise operations of the device; ``dtype``: the type of the first input, in which matrices are
      multiplied; ``wide``: that of sums, float32 or better; ``scale``: by how much gradients of scores are held larger;
    - ``nll``, ``spread``: −log p(target), and Σ_x −log p(x) where there is label smoothing, summed over tokens;
    - ``grad``: by its name, the gradient of the loss in each input, in float32 or better; None for those that nobody
      asks for, and ``needs_gradient`` is false where that is all of them.

    Args:
        target: [N]
        smoothing: without it loss and nll are the same, and both can be differentiated; else only the loss can.
        mask: [V], true where a token cannot be predicted.
    """

    def __init__(self, target: Tensor, smoothing: Smoothing, mask: Tensor | None):
        self.target = target
        self.smoothing = smoothing
        self.mask = mask

    def begin(self, **inputs: Tensor) -> list:
        """Keeps what all chunks need, and returns the chunks, slices of the N tokens."""
        raise NotImplementedError

    def add_chunk(self, rows: slice) -> None:
        """Computes the scores of these tokens, turns them into their own gradient, and adds up what follows."""
        raise NotImplementedError

    def finish(self) -> None:
        """Adds what takes no pass over the scores."""

    def loss_and_nll(self, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the negative log-likelihood of these inputs, each summed over the targets, in nats."""
        tensors = list(inputs.values())
        with torch.autocast(tensors[0].device.type, enabled=False):
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
                return _GradientInForward.apply(self, list(inputs), *tensors)
            self.run(inputs, [False] * len(inputs))
            return self.loss, self.nll.clone()

    def run(self, inputs: dict, needed: Sequence[bool]) -> None:
        """Goes through all chunks, for the gradients of those inputs that need one."""
        first = next(iter(inputs.values()))
        self.ops = elementwise(first.device)
        self.dtype, self.wide = first.dtype, at_least_float32(first.dtype)
        self.scale = gradient_scale(first.dtype)
        self.nll = torch.zeros((), dtype=self.wide, device=first.device)
        self.spread = torch.zeros_like(self.nll)
        self.needs_gradient = any(needed)
        self.grad = {name: zeros(tensor) if need else None for (name, tensor), need in zip(inputs.items(), needed)}
        for rows in self.begin(**inputs):
            self.add_chunk(rows)
        self.finish()

    @property
    def loss(self) -> Tensor:
        return self.smoothing.loss(self.nll, self.spread) if self.smoothing.epsilon > 0 else self.nll

    def softmax_minus_label_(self, scores: Tensor, target: Tensor) -> None:
        """scores [n, V], to which the bias is added, become the gradient of target_weight · nll + ε·V'·logsumexp, which
        nll and spread get, too. What is left of the spread is −Σ_x z_x."""
        smoothing = self.smoothing
        nll, log_sum_exp = self.ops.softmax_minus_label_(scores, self.bias, target, smoothing.target_weight, self.scale)
        self.nll += nll.sum()
        if smoothing.epsilon > 0:
            self.spread += smoothing.num_predictable * log_sum_exp.sum()

    def add_product(
        self, name: str, left: Tensor, right: Tensor, rows: slice = slice(None), constant: Tensor | None = None
    ) -> None:
        """The gradient in an input, or in some rows of it, gets left @ right, one of them gradients of scores, and in
        each row a constant."""
        total = self.grad[name]
        if total is not None:
            add_product_(total[rows].view(len(left), right.size(1)), left, right, 1 / self.scale, constant)

    def add_rows(self, name: str, scores: Tensor) -> None:
        """The gradient in a vector, the bias, gets the sum of the rows of scores, which are gradients."""
        total = self.grad[name]
        if total is not None:
            total.add_(scores.sum(0, dtype=self.wide), alpha=1 / self.scale)


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fused, names, *tensors):
        fused.run(dict(zip(names, tensors)), ctx.needs_input_grad[2:])
        ctx.save_for_backward(*fused.grad.values())
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        if fused.smoothing.epsilon > 0:
            ctx.mark_non_differentiable(fused.nll)
            return fused.loss, fused.nll
        return fused.nll, fused.nll.clone()

    @staticmethod
    def backward(ctx, grad_loss, grad_nll):
        if torch.is_grad_enabled():  # create_graph: what comes before the loss could be derived again, the loss not
            raise RuntimeError("a fused loss has no second derivative: use --output-impl eager")
        scale = grad_loss + grad_nll  # of nll there is one only where it is the loss, and zero otherwise
        in_place = not keeps_graph()  # where backward may run again, what is saved has to stay
        gradients = (
            None if total is None else scaled(total, scale, dtype, in_place)
            for total, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return None, None, *gradients


def scaled(total: Tensor, scale: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    """total · scale, for an input of the type. A second [V, E] would take longer than all else in backward."""
    if total.is_cuda and total.dtype != dtype:
        return torch.mul(total, scale, out=torch.empty_like(total, dtype=dtype))
    return total.mul_(scale) if in_place else total * scale  # autograd rounds it, which on a CPU is faster


def keeps_graph() -> bool:
    """Whether the backward pass that is running may run again (``retain_graph``); true where torch does not tell."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return tell is None or tell()
