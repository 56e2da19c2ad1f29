"""fairseq's Transformer language model with any output layer and, if asked for, relative positions."""

from argparse import ArgumentParser, Namespace

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
)
from fairseq.tasks import FairseqTask

from mixtape_plugin.errors import UserError
from mixtape_plugin.models.options import add_options, keep_in
from mixtape_plugin.models.transformer import RelativePositionConfig, decoder_with_layer, prepare_options
from mixtape_plugin.output_layers import OutputLayerConfig


@register_model("mixtape_transformer_lm")
class MixtapeTransformerLanguageModel(TransformerLanguageModel):
    """A decoder-only Transformer whose ``decoder.output_projection`` is an output layer of this plugin.

    Takes the options of fairseq's ``transformer_lm``, those of
    :class:`~mixtape_plugin.output_layers.OutputLayerConfig`, and ``--max-relative-position``. Made for ``--task
    language_modeling``, which gives every block of ``--tokens-per-sample`` tokens no context but its own.
    """

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        gen_parser_from_dataclass(parser, TransformerLanguageModelConfig(), delete_default=True)
        add_options(parser, OutputLayerConfig, RelativePositionConfig)

    @classmethod
    def build_model(cls, args: Namespace, task: FairseqTask) -> "MixtapeTransformerLanguageModel":
        given, args = args, prepare_options(args)
        for name in ("adaptive_input", "character_embeddings", "tie_adaptive_weights", "tie_adaptive_proj"):
            if getattr(args, name):
                raise UserError(
                    f"--{name.replace('_', '-')} does not go with --output-layer {args.output_layer}, which has one "
                    "embedding for each token: leave it out, or use fairseq's own transformer_lm"
                )

        if args.share_decoder_input_output_embed and len(task.source_dictionary) != len(task.target_dictionary):
            raise UserError(
                "--share-decoder-input-output-embed does not go with --output-dictionary-size "
                f"{len(task.target_dictionary)}, as there are {len(task.source_dictionary)} embeddings: leave one out"
            )
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if getattr(args, "max_target_positions", None) is None:
            task_options = getattr(task, "args", None) or task.cfg  # which of them depends on the task's age
            positions = getattr(task_options, "max_target_positions", None) or task_options.tokens_per_sample
            args.max_target_positions = positions
            keep_in(given, max_target_positions=positions)
        embed_tokens = cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
        return cls(decoder_with_layer(args, task.target_dictionary, embed_tokens, args.decoder_output_dim, True))


@register_model_architecture("mixtape_transformer_lm", "mixtape_transformer_lm")
def mixtape_transformer_lm(args: Namespace) -> None:
    base_lm_architecture(args)
