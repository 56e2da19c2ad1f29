"""The options of every output layer."""

from dataclasses import dataclass, field
from typing import Optional

from mixtape_plugin.errors import check_types, check_values

OUTPUT_IMPLS = ("auto", "eager", "fused")


@dataclass
class OutputLayerConfig:
    """The options of every output layer, shared by every model.

    On the command line a field's ``help`` explains it, underscores are hyphens: ``--num-components``.
    """

    output_layer: str = field(
        default="mixtape", metadata={"help": "how features become a distribution over the vocabulary"}
    )
    num_components: int = field(default=4, metadata={"help": "K, components of mos, moc (>= 1) and mixtape (>= 2)"})
    output_embed_dim: Optional[int] = field(
        default=None,
        metadata={"help": "E, width of an untied output embedding (default: that of the features; tied: its own)"},
    )
    context_scale: Optional[float] = field(
        default=None,
        metadata={"help": "h_k, or softmax's features, times a learned scale that starts here; 0 or left out: none"},
    )
    context_scale_lr_scale: float = field(
        default=1.0, metadata={"help": "learning rate of the scale, in units of that of the others"}
    )
    context_dropout: float = field(default=0.0, metadata={"help": "dropout on the context vectors h_k"})
    locked_context_dropout: bool = field(
        default=False, metadata={"help": "one context dropout mask for all time steps of a sequence"}
    )
    gate_dim: int = field(default=64, metadata={"help": "mixtape: d2, width of the gate embedding v_x"})
    gate_dropout: float = field(default=0.0, metadata={"help": "mixtape: dropout on tanh(U_k g)"})
    gate_noise: float = field(
        default=0.1, metadata={"help": "mixtape: standard deviation of the noise on gate logits in training"}
    )
    frequent_ratio: float = field(
        default=0.5, metadata={"help": "mixtape: r, share of the vocabulary with gates of its own; 1: no gate sharing"}
    )
    gate_weight_norm: bool = field(
        default=False, metadata={"help": "mixtape: weight normalisation of constant scale 1 on U_k"}
    )
    gss_c: float = field(default=-1.5, metadata={"help": "gss: c, the score around which the slope goes from k to 1"})
    gss_k: float = field(default=2.5, metadata={"help": "gss: k, slope of the map below c (1: softmax)"})
    plif_pieces: int = field(default=100_000, metadata={"help": "plif: K, linear pieces of the map"})
    plif_range: float = field(default=20.0, metadata={"help": "plif: T, the pieces lie between the scores -T and T"})
    plif_init_std: float = field(
        default=1.0, metadata={"help": "plif: standard deviation of the raw slopes at the start; 0: the map is a line"}
    )
    plif_lr_scale: float = field(
        default=1.0, metadata={"help": "plif: learning rate of the raw slopes, in units of that of the others"}
    )
    freeze_plif: bool = field(default=False, metadata={"help": "plif: slopes stay as they were drawn"})
    output_impl: str = field(
        default="auto",
        metadata={
            "help": "fused: the loss chunk by chunk, its gradient with it; eager: the formula written out; auto: fused"
        },
    )

    @classmethod
    def from_args(cls, args: object) -> "OutputLayerConfig":
        """The output layer's options out of a model's (a Namespace or a config), defaults where they are missing."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)})

    def check(self) -> None:
        """Raises UserError for the first option whose value is not allowed, whatever the layer; or of another type,
        which comes from Python alone."""
        check_types(self, type(self))
        allowed = {
            "num_components": (self.num_components >= 1, "at least 1"),
            "output_embed_dim": (self.output_embed_dim is None or self.output_embed_dim >= 1, "at least 1"),
            "context_scale": ((self.context_scale or 0) >= 0, "more than 0, or 0 (none)"),
            "context_scale_lr_scale": (self.context_scale_lr_scale > 0, "more than 0"),
            "context_dropout": (0 <= self.context_dropout < 1, "from 0 to less than 1"),
            "gate_dim": (self.gate_dim >= 1, "at least 1"),
            "gate_dropout": (0 <= self.gate_dropout < 1, "from 0 to less than 1"),
            "gate_noise": (self.gate_noise >= 0, "0 or more"),
            "frequent_ratio": (0 < self.frequent_ratio <= 1, "more than 0 and at most 1"),
            "gss_c": (True, "any number"),
            "gss_k": (self.gss_k > 0, "more than 0"),
            "plif_pieces": (self.plif_pieces >= 1, "at least 1"),
            "plif_range": (self.plif_range > 0, "more than 0"),
            "plif_init_std": (self.plif_init_std >= 0, "0 or more"),
            "plif_lr_scale": (self.plif_lr_scale > 0, "more than 0"),
            "output_impl": (self.output_impl in OUTPUT_IMPLS, " or ".join(OUTPUT_IMPLS)),
        }
        check_values(self, allowed)
