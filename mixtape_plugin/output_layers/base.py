"""What every output layer shares: its interface, its embedding, and the loss that follows from its scores.

Shapes: ``...`` any leading dimensions (fairseq: B batch, T time), D features, E embedding, V vocabulary, S frequent
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixtape_plugin.errors import UserError
from mixtape_plugin.kernels.common import Smoothing
from mixtape_plugin.kernels.precision import at_least_float32, autocast_dtype
from mixtape_plugin.modules.retained_dropout import RetainsDropout
from mixtape_plugin.output_layers.config import OutputLayerConfig

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# Scores that the eager loss computes at once: 1 GiB in float32, a few times that with what autograd keeps of them. A
# loss over more of them goes through them in chunks.
MAX_SCORES = 2**28


def cross_entropy(
    log_probs: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    vocabulary_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy and negative log-likelihood, each summed over the targets, in nats.

    loss = (1 − ε − ε/(V−1)) · nll + ε/(V−1) · Σ_x −log p(x), the smoothing of fairseq's
    ``label_smoothed_cross_entropy``: the target keeps 1 − ε, every other token gets ε/(V−1).

    Args:
        log_probs: [..., V]
        target: [...]; targets equal to ``ignore_index`` count for nothing.
        vocabulary_mask: [V], true where a token cannot be predicted: no mass is spread there and V counts the others.
            A target there costs infinitely much.
    """
    ignored = target.eq(ignore_index)  # left out last: rows of log_probs that are chosen are copied
    log_prob = log_probs.gather(-1, target.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    nll = -log_prob.masked_fill(ignored, 0.0).sum()
    if label_smoothing == 0:
        return nll, nll.clone()
    if vocabulary_mask is not None:
        log_probs = log_probs[..., ~vocabulary_mask]  # a copy
    spread = -log_probs.sum(-1).masked_fill(ignored, 0.0).sum()
    return Smoothing.over(log_probs.size(-1), label_smoothing).loss(nll, spread), nll


class OutputLayer(RetainsDropout, nn.Module):
    """Turns features [..., D] into a distribution over V tokens.

    Subclasses implement :meth:`forward`, from which the eager loss follows, and say what they cost, in
    :attr:`scores_per_token` and :attr:`multiply_adds`. They may have a :meth:`fused_loss`, which has to agree with
    :meth:`forward`. What other code asks of a layer is in the attributes of the class.

    Args:
        config: :class:`~mixtape_plugin.output_layers.OutputLayerConfig`, already checked; the layer keeps a copy.
        feature_dim: D.
        vocab_size: V.
        tied_weight: the input embedding [V, E] to share; without it the layer has its own.
        masked_tokens: ids that cannot be predicted; their probability is exactly 0.

    Raises:
        UserError: without a projection, E differs from D; ``--output-embed-dim`` is not the tied embedding's width;
            ``--output-impl fused`` where there is no fused loss.
        ValueError: D or V is less than 1; ``tied_weight`` is no parameter or has other than V rows; a masked token is
            no id, or all are masked.
    """

    #: Its name in a table.
    label = ""
    #: Whether it has K components, ``--num-components``.
    has_components = False
    #: K where a comparison of layers, or an architecture, says none; None: what they give the mixtures of softmaxes.
    usual_components: int | None = None
    #: Whether it takes features [..., D] to width E; without, E = D.
    has_projection = False
    #: Parameters with a row for each token, the first token in the first row; there may be rows for the first S only.
    token_parameters = ("weight", "bias")
    #: Settings that comparisons run beside the layer itself: what is added to its name -> options.
    variants: dict = {}
    #: Options without a parameter that the distribution depends on: a training goes on with those that it had.
    fixed_options: tuple = ()
    #: S, the first tokens of the vocabulary, for which it has more parameters than for the others.
    num_frequent = 0

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        # torch.jit compiles every property of a module, for torch.jit.trace, too: these stay Python's.
        cls.__jit_unused_properties__ = [name for name in dir(cls) if isinstance(getattr(cls, name, None), property)]

    def __init__(
        self,
        config: OutputLayerConfig,
        feature_dim: int,
        vocab_size: int,
        tied_weight: nn.Parameter | None = None,
        masked_tokens: Sequence[int] = (),
    ):
        super().__init__()
        if min(feature_dim, vocab_size) < 1:
            raise ValueError(f"{feature_dim} features and {vocab_size} tokens are not allowed: at least 1 of each")
        self.config = replace(config)
        self.feature_dim = feature_dim
        self.vocab_size = vocab_size
        self.embed_dim = embedding_width(config, feature_dim, tied_weight)
        if not self.has_projection and self.embed_dim != feature_dim:
            raise UserError(
                f"--output-layer {config.output_layer} has no projection: its embedding width is {self.embed_dim} "
                f"and must be that of the features, {feature_dim}"
            )
        if config.output_impl == "fused" and not self.has_fused_loss():
            raise UserError(
                f"--output-impl fused is not allowed: --output-layer {config.output_layer} has no fused loss; "
                "auto or eager"
            )
        if tied_weight is not None and not isinstance(tied_weight, nn.Parameter):
            # it would be neither trained nor saved
            raise ValueError("a tied embedding must be the nn.Parameter itself, not a copy of it or computed from it")
        if tied_weight is not None and len(tied_weight) != vocab_size:
            raise ValueError(f"a tied embedding needs {vocab_size} rows, one for each token, not {len(tied_weight)}")
        self.masked_tokens = tuple(sorted(set(map(int, masked_tokens))))
        if not all(0 <= token < vocab_size for token in self.masked_tokens):
            raise ValueError(f"masked tokens must be ids from 0 to {vocab_size - 1}, not {list(self.masked_tokens)}")
        if len(self.masked_tokens) == vocab_size:
            raise ValueError(f"all {vocab_size} tokens are masked, and one has to be predicted")
        if tied_weight is None:
            tied_weight = nn.Parameter(torch.empty(vocab_size, self.embed_dim))
            nn.init.normal_(tied_weight, std=self.embed_dim**-0.5)
        self.weight = tied_weight
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        # None leaves no trace in a checkpoint.
        self.context_scale = nn.Parameter(torch.tensor([float(config.context_scale)])) if config.context_scale else None
        mask = None
        if self.masked_tokens:
            mask = torch.zeros(vocab_size, dtype=torch.bool)
            mask[list(self.masked_tokens)] = True
        self.register_buffer("vocabulary_mask", mask, persistent=False)
        self.build_parameters()
        self.set_optim_overrides()

    def build_parameters(self) -> None:
        """Makes what a layer has beside ``weight``, ``bias`` and ``context_scale``, from ``self.config`` and the sizes;
        raises UserError for options that do not go with them."""

    def set_optim_overrides(self) -> None:
        """Has parameters ask fairseq's optimizers for a weight decay or a learning rate of their own."""
        if self.context_scale is not None:
            overrides = {"weight_decay_scale": 0.0, "lr_scale": self.config.context_scale_lr_scale}
            self.context_scale.optim_overrides = {"optimizer": overrides}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.set_optim_overrides()  # which copy.deepcopy leaves out

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        self.set_optim_overrides()  # load_state_dict(…, assign=True) puts other parameters in

    @classmethod
    def has_fused_loss(cls) -> bool:
        return cls.fused_loss is not OutputLayer.fused_loss

    @classmethod
    def check_dictionary(cls, config: OutputLayerConfig, dictionary: Dictionary) -> None:
        """Raises UserError for a fairseq dictionary that the layer cannot use."""

    @property
    def logit_bias(self) -> Tensor:
        """The bias, −∞ where a token cannot be predicted: the way in which layers mask their vocabulary, but for
        maps of the scores, which mask what they have mapped."""
        if self.vocabulary_mask is None:
            return self.bias
        return self.bias.masked_fill(self.vocabulary_mask, -torch.inf)

    def scaled(self, contexts: Tensor) -> Tensor:
        """α·h for a context vector h: α is ``context_scale``, learned from ``--context-scale``; without it h itself.

        Not of the papers. A logit starts with the standard deviation of h·w, which the tanh, the tied embedding and
        the average over components leave far too small; α undoes that, and widens the bound |h| ≤ 1 of a tanh.

        h keeps its type, which under autocast is shorter than α's.
        """
        return contexts if self.context_scale is None else contexts * self.context_scale.to(contexts.dtype)

    @property
    def is_fused_inference(self) -> bool:
        """Whether :meth:`forward` is of evaluation or generation, and free to work in place.

        torch.jit.trace would keep the number of contexts, which it goes by.
        """
        free = not (self.training or torch.is_grad_enabled() or torch.jit.is_tracing())
        return free and self.config.output_impl != "eager"

    @property
    def scores_per_token(self) -> int:
        """About how many values, each the size of a score in memory, :meth:`forward` holds for each context."""
        raise NotImplementedError

    @property
    def contexts_at_once(self) -> int:
        """How many contexts :meth:`forward` can take with no more than ``MAX_SCORES`` scores; at least 1."""
        return max(MAX_SCORES // self.scores_per_token, 1)

    @property
    def score_rows(self) -> int:
        """Rows of V scores that a fused loss computes for each token."""
        return 1

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds a token of :meth:`forward`'s matrix products; a training step has 6 times as many FLOPs.

        Priors, and all that is no matrix product with V, S or E on one side, may be left out.
        """
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        """Scores [..., V]; ``log_softmax`` of them is the distribution."""
        raise NotImplementedError

    def log_probs(self, features: Tensor) -> Tensor:
        """log p(x|c) in nats, [..., V], in float32 or better."""
        scores = self(features)
        return F.log_softmax(scores, dim=-1, dtype=at_least_float32(scores.dtype))

    def loss(
        self, features: Tensor, target: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        """Training loss and negative log-likelihood, each summed over the targets, in nats.

        Args:
            features: [..., D]
            target: [...]; targets equal to ``ignore_index`` count for nothing.
            label_smoothing: ε of :func:`cross_entropy`.

        With label smoothing, a fused loss alone can be differentiated, its negative log-likelihood cannot.

        Raises:
            ValueError: there is not one target for each context; features are of another type than the layer, without
                autocast, or not [batch, time, D] beside a locked dropout; ε is outside [0, 1), or not 0 where there is
                but one token to predict.
        """
        predictable = self.vocab_size - len(self.masked_tokens)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing} is not allowed: from 0 to less than 1")
        if label_smoothing and predictable == 1:
            raise ValueError(f"label_smoothing {label_smoothing} is not allowed: 0, with one token to predict")
        if features.shape[:-1] != target.shape:
            raise ValueError(f"features {list(features.shape)} need one target each, not {list(target.shape)}")
        if features.dtype != self.weight.dtype and autocast_dtype(features) is None:
            raise ValueError(f"features of {features.dtype} do not go with a layer of {self.weight.dtype}")
        leading, counted = target.shape, target.flatten().ne(ignore_index)
        index = None if counted.all() else counted.nonzero().squeeze(1)  # asked of the GPU once for all
        if not self.has_locked_dropout:  # contexts of what counts are enough
            features, target, index = rows(features, leading, index), rows(target, leading, index), None
        elif index is not None:  # contexts are made of all, and what does not count may be NaN
            features = features.masked_fill(~counted.view(*leading, 1), 0.0)
        if self.config.output_impl == "eager" or not self.has_fused_loss():
            return self.eager_loss(features, target, label_smoothing, ignore_index)
        target = rows(target, target.shape, index)
        return self.fused_loss(features, target, index, Smoothing.over(predictable, label_smoothing))

    def fused_loss(
        self, features: Tensor, target: Tensor, index: Tensor | None, smoothing: Smoothing
    ) -> tuple[Tensor, Tensor]:
        """:meth:`loss` by one of :mod:`mixtape_plugin.kernels`; for layers that have none, ``auto`` is eager.

        Args:
            features: [..., D]
            target: those that are counted, [N].
            index: [N], which features the targets belong to, counted over all leading dimensions; None: one each.
        """
        raise NotImplementedError(f"--output-layer {self.config.output_layer} has no fused loss")

    def eager_loss(
        self, features: Tensor, target: Tensor, label_smoothing: float, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        """:meth:`loss` as the formula has it.

        Where all scores together would be more than ``MAX_SCORES``, chunks of contexts are gone through one by one
        and again in the backward pass: a third more work for memory that does not grow with their number.
        """
        size = self.contexts_at_once
        if target.numel() <= size:
            return self._eager_loss(features, target, label_smoothing, ignore_index)
        if self.has_locked_dropout:  # one mask a sequence: a sequence stays whole
            size = max(size // target[0].numel(), 1)
        else:
            features, target = features.flatten(0, -2), target.flatten()
        losses = [
            checkpoint(self._eager_loss, *chunk, label_smoothing, ignore_index, use_reentrant=False)
            for chunk in zip(features.split(size), target.split(size))
        ]
        return tuple(torch.stack(parts).sum() for parts in zip(*losses))

    def _eager_loss(self, features, target, label_smoothing, ignore_index):
        log_probs = self.log_probs(features)
        return cross_entropy(log_probs, target, label_smoothing, ignore_index, self.vocabulary_mask)

    @property
    def has_locked_dropout(self) -> bool:
        return False

    def extra_repr(self) -> str:
        return f"{self.config.output_layer}, D={self.feature_dim}, E={self.embed_dim}, V={self.vocab_size}"


def rows(tensor: Tensor, leading: torch.Size, index: Tensor | None = None) -> Tensor:
    """A tensor [..., *] as [N, *], its leading dimensions in one; with an index those rows alone."""
    tensor = tensor.reshape(leading.numel(), *tensor.shape[len(leading) :])
    return tensor if index is None else tensor.index_select(0, index)


def embedding_width(config: OutputLayerConfig, feature_dim: int, tied_weight: Tensor | None) -> int:
    """E: of the tied embedding, as asked for, or D."""
    if tied_weight is None:
        return config.output_embed_dim or feature_dim
    width = tied_weight.size(1)
    if config.output_embed_dim not in (None, width):
        raise UserError(
            f"--output-embed-dim {config.output_embed_dim} does not fit the tied embedding: "
            f"it must be its width, {width}, or be left out"
        )
    return width
