"""fairseq's Transformer with any output layer and, if asked for, relative positions in self-attention."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from typing import Union

from fairseq.data import Dictionary
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.models.transformer.transformer_legacy import base_architecture, tiny_architecture, transformer_iwslt_de_en
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig
from torch import nn

from mixtape_plugin.errors import UserError, check_least, check_type, check_values
from mixtape_plugin.models.options import add_options, complete_options, output_layer_for
from mixtape_plugin.modules.relative_attention import RelativeMultiheadAttention
from mixtape_plugin.output_layers import OutputLayerConfig, output_layer_class

RATES = (
    *("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"),
    *("quant_noise_pq", "quant_noise_scalar"),
)


@dataclass
class RelativePositionConfig:
    max_relative_position: int = field(
        default=0,
        metadata={"help": "k: self-attention tells positions apart up to this distance (Shaw et al. 2018); 0: off"},
    )


class RelativeEncoderLayer(TransformerEncoderLayerBase):
    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> RelativeMultiheadAttention:
        return relative_attention(cfg, embed_dim, cfg.encoder.attention_heads)


class RelativeDecoderLayer(TransformerDecoderLayerBase):
    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> RelativeMultiheadAttention:
        return relative_attention(cfg, embed_dim, cfg.decoder.attention_heads)


class Encoder(TransformerEncoderBase):
    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        if not cfg.max_relative_position:
            return super().build_encoder_layer(cfg)
        return wrap(named_as_fairseqs(RelativeEncoderLayer(cfg), "TransformerEncoderLayerBase"), cfg)


class Decoder(TransformerDecoderBase):
    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        if not cfg.max_relative_position:
            return super().build_decoder_layer(cfg, no_encoder_attn)
        return wrap(named_as_fairseqs(RelativeDecoderLayer(cfg, no_encoder_attn), "TransformerDecoderLayerBase"), cfg)


@register_model("mixtape_transformer")
class MixtapeTransformerModel(TransformerModel):
    """Transformer (Vaswani et al. 2017) whose ``decoder.output_projection`` is an output layer of this plugin.

    Takes fairseq's Transformer options, those of :class:`~mixtape_plugin.output_layers.OutputLayerConfig`, and
    ``--max-relative-position``. With relative positions the absolute ones usually go: add
    ``--no-token-positional-embeddings``, as the ``wmt`` architectures do.
    """

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        super().add_args(parser)
        add_options(parser, OutputLayerConfig, RelativePositionConfig)

    @classmethod
    def build_model(cls, args: Namespace, task: FairseqTask) -> "MixtapeTransformerModel":
        return super().build_model(prepare_options(args), task)

    @classmethod
    def build_encoder(cls, args: Namespace, src_dict: Dictionary, embed_tokens: nn.Embedding) -> Encoder:
        encoder = Encoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)
        return named_as_fairseqs(encoder, "TransformerEncoder")

    @classmethod
    def build_decoder(cls, args: Namespace, tgt_dict: Dictionary, embed_tokens: nn.Embedding) -> Decoder:
        return decoder_with_layer(args, tgt_dict, embed_tokens, args.decoder.output_dim, args.no_cross_attention)


def decoder_with_layer(
    args: Namespace, dictionary: Dictionary, embed_tokens: nn.Embedding, feature_dim: int, no_encoder_attn: bool
) -> Decoder:
    """fairseq's decoder with the output layer that the options ask for, tied to the embedding where they say so."""
    tied_weight = embed_tokens.weight if args.share_decoder_input_output_embed else None
    layer = output_layer_for(args, dictionary, feature_dim, tied_weight=tied_weight)
    config = TransformerConfig.from_namespace(args)
    decoder = Decoder(config, dictionary, embed_tokens, no_encoder_attn=no_encoder_attn, output_projection=layer)
    return named_as_fairseqs(decoder, "TransformerDecoder")


def prepare_options(args: Union[Namespace, DictConfig]) -> Namespace:
    """The options of a model, whole and checked; a Namespace even of an omegaconf tree, out of which
    TransformerConfig.from_namespace would lose ours."""
    args = complete_options(args, OutputLayerConfig, RelativePositionConfig)
    check_options(args)
    return args


def check_options(args: Namespace) -> None:
    """Raises UserError where an option of the Transformer contradicts this plugin's, or a dropout is no rate."""
    for name in RATES:
        if hasattr(args, name):
            check_type(args, name, float)
            check_values(args, {name: (0 <= getattr(args, name) <= 1, "from 0 to 1")})
    for side in ("encoder", "decoder"):
        for name, least in (("embed_dim", 1), ("attention_heads", 1), ("layers", 0)):
            if hasattr(args, f"{side}_{name}"):
                check_type(args, f"{side}_{name}", int)
                check_least(args, **{f"{side}_{name}": least})
        if hasattr(args, f"{side}_layers_to_keep"):
            check_type(args, f"{side}_layers_to_keep", str, optional=True)
        width, heads = getattr(args, f"{side}_embed_dim", 0), getattr(args, f"{side}_attention_heads", 1)
        if width % heads:
            raise UserError(
                f"--{side}-attention-heads {heads} is not allowed: a number that divides --{side}-embed-dim {width}"
            )
    if getattr(args, "adaptive_softmax_cutoff", None) is not None:
        raise UserError(
            f"--adaptive-softmax-cutoff {args.adaptive_softmax_cutoff} does not go with --output-layer "
            f"{args.output_layer}: leave it out, or use fairseq's own transformer"
        )
    if getattr(args, "base_layers", 0):
        raise UserError(f"--base-layers {args.base_layers} is not allowed: this plugin's Transformer has none, 0")
    if getattr(args, "merge_src_tgt_embed", False):
        raise UserError(
            "--merge-src-tgt-embed is not allowed, with which fairseq takes words of the target for others: use "
            "fairseq-preprocess --joined-dictionary, and --share-all-embeddings"
        )
    if args.max_relative_position < 0:
        raise UserError(f"--max-relative-position {args.max_relative_position} is not allowed: 0 (off) or more")
    if args.max_relative_position:
        for name in ("cross_self_attention", "encoder_xformers_att_config", "decoder_xformers_att_config"):
            if getattr(args, name, None):
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(args, name)} does not go with --max-relative-position "
                    f"{args.max_relative_position}: use --max-relative-position 0 or leave it out"
                )


def relative_attention(cfg: TransformerConfig, embed_dim: int, num_heads: int) -> RelativeMultiheadAttention:
    attention = RelativeMultiheadAttention(
        embed_dim,
        num_heads,
        cfg.max_relative_position,
        dropout=cfg.attention_dropout,
        q_noise=cfg.quant_noise.pq,
        qn_block_size=cfg.quant_noise.pq_block_size,
    )
    return named_as_fairseqs(attention, "MultiheadAttention")


def named_as_fairseqs(module: nn.Module, name: str) -> nn.Module:
    """Gives a module's dropouts the name that --retain-dropout-modules has for those of fairseq's own."""
    for child in module.children():
        if isinstance(child, FairseqDropout):
            child.module_name = name
    return module


def wrap(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Activation checkpointing and FSDP for a layer, as fairseq does it for its own."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


@register_model_architecture("mixtape_transformer", "mixtape_transformer")
def mixtape_transformer(args: Namespace) -> None:
    base_architecture(args)


@register_model_architecture("mixtape_transformer", "mixtape_transformer_tiny")
def mixtape_transformer_tiny(args: Namespace) -> None:
    tiny_architecture(args)


@register_model_architecture("mixtape_transformer", "mixtape_transformer_iwslt")
def mixtape_transformer_iwslt(args: Namespace) -> None:
    transformer_iwslt_de_en(args)


def wmt_big(args: Namespace) -> None:
    """What the Mixtape paper's two translation models share (section 4.2, tensor2tensor's conventions)."""
    # K: 4 for Mixtape (section 3.2), 9 for the MoS it is compared with (Kong et al. 2018).
    args.output_layer = getattr(args, "output_layer", "mixtape")
    layer_class = output_layer_class(args.output_layer)
    usual_components = layer_class.usual_components or (9 if layer_class.has_components else 4)
    args.num_components = getattr(args, "num_components", usual_components)
    args.encoder_attention_heads = getattr(args, "encoder_attention_heads", 16)
    args.decoder_attention_heads = getattr(args, "decoder_attention_heads", 16)
    args.attention_dropout = getattr(args, "attention_dropout", 0.15)
    args.encoder_normalize_before = getattr(args, "encoder_normalize_before", True)
    args.decoder_normalize_before = getattr(args, "decoder_normalize_before", True)
    args.share_all_embeddings = getattr(args, "share_all_embeddings", True)
    # The clip is not in the paper; 20 is tensor2tensor's.
    args.max_relative_position = getattr(args, "max_relative_position", 20)
    # Without either the order of words would be lost.
    without = args.max_relative_position > 0
    args.no_token_positional_embeddings = getattr(args, "no_token_positional_embeddings", without)
    base_architecture(args)


@register_model_architecture("mixtape_transformer", "mixtape_transformer_wmt_en_de_big")
def mixtape_transformer_wmt_en_de_big(args: Namespace) -> None:
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 1024)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 4096)
    args.dropout = getattr(args, "dropout", 0.3)
    args.gate_dropout = getattr(args, "gate_dropout", 0.2)
    wmt_big(args)


@register_model_architecture("mixtape_transformer", "mixtape_transformer_wmt_en_fr_big")
def mixtape_transformer_wmt_en_fr_big(args: Namespace) -> None:
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 2048)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 8192)
    args.dropout = getattr(args, "dropout", 0.25)
    args.gate_dropout = getattr(args, "gate_dropout", 0.15)
    wmt_big(args)
