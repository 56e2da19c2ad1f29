"""Language modelling on one long text with truncated back-propagation through time."""

import glob
import logging
import math
import os
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Iterator, List, Optional, Tuple, Union

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset, data_utils, iterators
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import II, DictConfig, open_dict
from torch import Tensor

from mixtape_plugin.data.bptt_dataset import BpttDataset, TokenStream, draw_segment_lengths
from mixtape_plugin.errors import AFTER_DIVERGENCE, UserError, check_values
from mixtape_plugin.models.awd_lstm_lm import LANGUAGE_MODEL_GATES, check_vocabulary, vocabulary_digest
from mixtape_plugin.optim.nt_asgd import find_nt_asgd, swap_weights

logger = logging.getLogger(__name__)
OF_SEGMENTS = (
    *("tokens_per_sample", "segment_length_std", "short_segment_probability", "min_segment_length"),
    *("max_segment_length", "small_batch_size", "remove_eos"),
)


@dataclass
class BpttLanguageModelingConfig(FairseqDataclass):
    data: Optional[str] = field(
        default=None,
        metadata={
            "help": "folder that fairseq-preprocess --only-source wrote; several with : between "
            "them are walked through one an epoch"
        },
    )
    tokens_per_sample: int = field(default=70, metadata={"help": "length of a segment (bptt); in training its mean"})
    segment_length_std: float = field(default=5.0, metadata={"help": "its standard deviation in training"})
    short_segment_probability: float = field(
        default=0.05, metadata={"help": "how often that mean is half of --tokens-per-sample"}
    )
    min_segment_length: int = field(default=5, metadata={"help": "shortest segment in training"})
    max_segment_length: Optional[int] = field(default=None, metadata={"help": "longest segment in training"})
    small_batch_size: Optional[int] = field(
        default=None,
        metadata={"help": "columns that go through the network at once; gradients of all --batch-size are summed"},
    )
    remove_eos: bool = field(
        default=False,
        metadata={"help": "a text without lines, such as text8: </s> is taken out, and never predicted, nor is <unk>"},
    )
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II("dataset.dataset_impl")


def check_options(args: BpttLanguageModelingConfig) -> None:
    """Raises UserError for the first option whose value is not allowed."""
    if args.tokens_per_sample < 0:
        raise UserError(
            f"--tokens-per-sample {args.tokens_per_sample} is not allowed: at least 1, after fairseq-eval-lm has taken "
            "off --context-window, which is 0 with this task: the hidden state is the context"
        )
    allowed = {
        "tokens_per_sample": (args.tokens_per_sample >= 1, "at least 1"),
        "segment_length_std": (args.segment_length_std >= 0, "0 or more"),
        "short_segment_probability": (0 <= args.short_segment_probability <= 1, "from 0 to 1"),
        "min_segment_length": (args.min_segment_length >= 1, "at least 1"),
        "max_segment_length": (
            args.max_segment_length is None or args.max_segment_length >= 1,
            "at least 1, or left out",
        ),
        "small_batch_size": (args.small_batch_size is None or args.small_batch_size >= 1, "at least 1, or left out"),
    }
    check_values(args, allowed)
    shortest, longest = args.min_segment_length, args.max_segment_length
    if longest is not None and longest < shortest:
        raise UserError(f"--max-segment-length {longest} is not allowed: --min-segment-length {shortest} or more")


@register_task("bptt_language_modeling", dataclass=BpttLanguageModelingConfig)
class BpttLanguageModelingTask(LanguageModelingTask):
    """A text in B columns, walked through segment by segment, the hidden state carried along (Merity et al. 2018).

    - Training: ``--batch-size`` columns for each process. Segment lengths are drawn by seed and epoch
      (:func:`~mixtape_plugin.data.bptt_dataset.draw_segment_lengths`), and a segment's learning rate is
      lr·L/``--tokens-per-sample``, set after clipping; with ``--update-freq`` L is the mean over the segments of an
      update. The model keeps the hidden state, which starts from zeros in each epoch.
    - Evaluation: ``--batch-size-valid`` columns, shared by all processes, segments of equal length; every token is
      predicted and counted once. ``fairseq-eval-lm`` takes ``--batch-size`` columns, 1 unless given.
    - Symbols that fairseq adds (``<s>``, ``<pad>``, ``madeupword…``) are in ``masked_tokens``: a model of this plugin
      gives them probability 0.
    - With ``--optimizer nt_asgd`` validation and saved models use the averaged weights.
    - A checkpoint in the middle of an epoch has the hidden states of all processes; none in stock fairseq 0.12.2: a
      resume there starts from zeros, with a warning.

    Raises:
        UserError: an option's value is not allowed; no ``--batch-size``; ``--skip-remainder-batch``; a text with a
            symbol that is masked; a model that keeps no hidden state; a prompt to continue with ``--remove-eos``; a
            checkpoint of another dictionary or ``--remove-eos``, or of the middle of an epoch with other segments; a
            loss that is not finite, in validation or in training without a loss scale.
    """

    def __init__(
        self,
        args: BpttLanguageModelingConfig,
        dictionary: Dictionary,
        output_dictionary: Optional[Dictionary] = None,
        targets: Optional[List[str]] = None,
    ):
        super().__init__(args, dictionary, output_dictionary, targets)
        check_options(args)
        self.masked_tokens = tuple(
            token
            for token, symbol in enumerate(dictionary.symbols)
            if token in (dictionary.bos(), dictionary.pad())
            or symbol.startswith("madeupword")
            or (args.remove_eos and token in (dictionary.eos(), dictionary.unk()))
        )
        self.optimizer = None
        self.lr_scales = []  # of the segments since the last update
        self.update_begin, self.states_before = None, {}
        self.epoch_ended = False
        self.validations = 0
        self.walk = {}
        self.states_of_all = []
        self.restored_states = None

    @classmethod
    def setup_task(cls, args: BpttLanguageModelingConfig, **kwargs) -> "BpttLanguageModelingTask":
        for path in utils.split_paths(args.data or ""):
            if not os.path.isdir(path):
                raise UserError(f"data folder {path} does not exist: give the one that fairseq-preprocess wrote")
        dictionary = cls.load_dictionary(os.path.join(utils.split_paths(args.data)[0], "dict.txt"))
        logger.info(f"dictionary: {len(dictionary)} types")
        return cls(args, dictionary)

    # ------------------------------------------------------------------------------------------------- model

    def build_model(self, args: Union[Namespace, DictConfig], from_checkpoint: bool = False) -> BaseFairseqModel:
        """Builds the model, and keeps with its options what a checkpoint must agree with this task in.

        The model checks its vocabulary once more when parameters are loaded; here it comes before all other checks.
        """
        if isinstance(args, Namespace):
            eos_masked = self.dictionary.eos() in getattr(args, "masked_tokens", self.masked_tokens)
            if eos_masked != self.args.remove_eos:
                raise UserError(
                    f"the checkpoint was trained {'without' if self.args.remove_eos else 'with'} --remove-eos: "
                    "do the same here"
                )
            digest = vocabulary_digest(self.dictionary, self.masked_tokens)
            check_vocabulary(getattr(args, "vocabulary_digest", digest), self.dictionary, self.masked_tokens)
            args.vocabulary_digest, args.masked_tokens = digest, list(self.masked_tokens)
        elif not from_checkpoint:  # of fairseq-hydra-train, whose checkpoints hold what is given alone
            with open_dict(args):
                for option, value in LANGUAGE_MODEL_GATES.items():
                    args.setdefault(option, value)
        model = super().build_model(args, from_checkpoint)
        if not hasattr(model.decoder, "states"):
            raise UserError(
                f"--task bptt_language_modeling needs a model that keeps its hidden state, such as awd_lstm_lm, not "
                f"{type(model).__name__}: use --task language_modeling with it"
            )
        return model

    def build_criterion(self, cfg: DictConfig, *args, **kwargs) -> FairseqCriterion:
        if cfg._name == "label_smoothed_cross_entropy":  # without smoothing, too, where its loss is 0 · ∞
            raise UserError(
                "--criterion label_smoothed_cross_entropy gives mass to symbols that cannot be predicted: "
                "use --criterion output_layer_cross_entropy or awd_lstm_cross_entropy"
            )
        if getattr(cfg, "ignore_prefix_size", 0):
            raise UserError(
                f"--ignore-prefix-size {cfg.ignore_prefix_size} does not go with --task bptt_language_modeling, which "
                "predicts each token of a text once, and has no sentences: leave it out"
            )
        return super().build_criterion(cfg, *args, **kwargs)

    # -------------------------------------------------------------------------------------------------- data

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Loads a split as one stream; of several data folders the training text is in that of the epoch."""
        paths = utils.split_paths(self.args.data)
        folder = paths[(epoch - 1) % len(paths)] if split == self.args.train_subset else paths[0]
        path = os.path.join(folder, split)
        lines = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl, combine=combine)
        if lines is None:
            if glob.glob(f"{glob.escape(path)}.*-*.*.idx"):
                raise UserError(
                    f"{folder} holds a language pair: run fairseq-preprocess --only-source for a language model"
                )
            raise FileNotFoundError(f"Dataset not found: {split} ({path})")
        if len(lines) == 0:
            raise UserError(f"{path}.bin holds no line: check the text that it was made from")
        tokens = torch.cat([lines[i] for i in range(len(lines))]).int()
        if self.args.remove_eos:
            tokens = tokens[tokens != self.dictionary.eos()]
        counts = torch.bincount(tokens, minlength=len(self.dictionary))
        for token in self.masked_tokens:
            if counts[token] > 0:
                raise UserError(
                    f"{path} holds {counts[token]} {self.dictionary[token]}, which the model cannot predict: "
                    "mend the text or its dictionary" + (", or leave out --remove-eos" if self.args.remove_eos else "")
                )
        unknown = counts[self.dictionary.unk()]
        logger.info(f"{path}: {len(tokens):,} tokens, {unknown:,} of them <unk>")
        self.datasets[split] = TokenStream(tokens, self.dictionary.eos(), self.dictionary.pad(), split)

    def get_batch_iterator(self, dataset: FairseqDataset, *args, **kwargs) -> iterators.EpochBatchIterating:
        """The segments of a text in order; for anything but a text (a prompt to continue) fairseq's own iterator."""
        if isinstance(dataset, TokenStream):
            return self.segment_iterator(dataset, *args, **kwargs)
        return super().get_batch_iterator(dataset, *args, **kwargs)

    def segment_iterator(
        self,
        dataset: TokenStream,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        *,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        **kwargs,
    ) -> iterators.EpochBatchIterating:
        """fairseq's :meth:`get_batch_iterator` of a text."""
        if not max_sentences:
            raise UserError("--task bptt_language_modeling needs --batch-size, the number of columns")
        # Evaluation may be of the training text too; only the iterator that fairseq trains with has this option.
        training = dataset.split == self.args.train_subset and "grouped_shuffling" in kwargs
        lengths, name = self.args.tokens_per_sample, dataset.split
        if training:
            if kwargs.get("skip_remainder_batch"):
                raise UserError(
                    "--skip-remainder-batch is not allowed with --task bptt_language_modeling: it leaves out the end "
                    "of the text, and with it that of the epoch"
                )
            if max_tokens is not None:
                logger.warning(f"--max-tokens {max_tokens} is not used: --batch-size is the number of columns")
            # What a training that was interrupted in mid-epoch must agree in, to be at the same place of the text.
            self.walk = {"batch_size": max_sentences, "seed": seed, **{n: getattr(self.args, n) for n in OF_SEGMENTS}}
            lengths = draw_segment_lengths(
                len(dataset) // (max_sentences * num_shards),
                self.args.tokens_per_sample,
                self.args.segment_length_std,
                self.args.short_segment_probability,
                self.args.min_segment_length,
                self.args.max_segment_length,
                seed,
                epoch,
            )
        elif dataset.split == self.args.train_subset:  # beside the training, whose hidden state has the split's name
            name = f"{dataset.split} (evaluation)"
        segments = BpttDataset(
            dataset, max_sentences, lengths, training, self.args.tokens_per_sample, num_shards, shard_id, name
        )
        return iterators.EpochBatchIterator(
            segments,
            segments.collater,
            [[i] for i in range(len(segments))],
            seed=seed,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
            disable_shuffling=True,
        )

    def eval_lm_dataloader(
        self,
        dataset: FairseqDataset,
        batch_size: Optional[int] = None,
        context_window: int = 0,
        max_positions: Optional[int] = None,
        **kwargs,
    ) -> Iterator:
        if context_window > 0:
            raise UserError(f"--context-window {context_window} is not allowed: the hidden state is the context, 0")
        return self.get_batch_iterator(dataset, max_sentences=batch_size or 1, **kwargs).next_epoch_itr(shuffle=False)

    def inference_step(self, generator: Union[SequenceGenerator, SequenceScorer], *args, **kwargs) -> List[List[dict]]:
        if self.args.remove_eos and isinstance(generator, SequenceGenerator):
            raise UserError(
                "a model of --remove-eos predicts no </s>, where fairseq's search ends: it cannot continue a prompt"
            )
        return super().inference_step(generator, *args, **kwargs)

    # ---------------------------------------------------------------------------------------------- training

    def begin_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        self.epoch = epoch
        if self.restored_states is not None:
            like = next(model.parameters())
            for stream, states in self.restored_states.items():
                model.decoder.states[stream] = [tuple(part.to(like) for part in state) for state in states]
            self.restored_states = None

    def train_step(
        self,
        sample: dict,
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Tuple[Tensor, int, dict]:
        """fairseq's, for ``--small-batch-size`` columns after the other."""
        self.optimizer = optimizer
        swap_weights(optimizer, average=False)
        first, nt_asgd = sample["net_input"]["first_segment"], find_nt_asgd(optimizer)
        if nt_asgd:  # not at a first segment alone: it may take over in mid-epoch
            nt_asgd.begin_epoch(self.epoch)
        # An update begins without gradients, also after one that fairseq has given up because of an overflow.
        if all(parameter.grad is None for parameter in model.parameters()):
            self.lr_scales = []
            begin = (self.epoch, sample["segment"])
            if begin == self.update_begin:  # --amp tries it again
                model.decoder.states = self.states_before
            # What is kept at a first segment is of the epoch before.
            self.update_begin, self.states_before = begin, {} if first else dict(model.decoder.states)
        self.lr_scales.append(sample["lr_scale"])
        self.epoch_ended = sample["last_segment"]
        loss, sample_size, logging_output = 0.0, 0, {}
        for small_batch in self.small_batches(sample):
            part, size, log = super().train_step(small_batch, model, criterion, optimizer, update_num, ignore_grad)
            loss, sample_size = loss + part, sample_size + size
            logging_output = {name: logging_output.get(name, 0) + value for name, value in log.items()}
        if not torch.isfinite(loss):
            scaler = getattr(optimizer, "scaler", None)  # of --fp16, and of --amp, where it may be disabled
            if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
                raise UserError(
                    f"the loss is {loss.item()} at update {update_num + 1} (epoch {self.epoch}): {AFTER_DIVERGENCE}"
                )
            model.decoder.states = dict(self.states_before)  # it skips such an update, whose state may be no number
        return loss, sample_size, logging_output

    def small_batches(self, sample: dict) -> List[dict]:
        """The columns of a segment in turn, each with a hidden state of its own."""
        size = self.args.small_batch_size
        columns = sample["nsentences"]
        if size is None or size >= columns:
            return [sample]
        parts = []
        for begin in range(0, columns, size):
            rows = slice(begin, begin + size)
            target = sample["target"][rows]
            net_input = {
                **sample["net_input"],
                "src_tokens": sample["net_input"]["src_tokens"][rows],
                "src_lengths": sample["net_input"]["src_lengths"][rows],
                "stream": f"{sample['net_input']['stream']}:{begin}",
            }
            sizes = {"nsentences": len(target), "ntokens": target.numel()}  # no padding: training columns are full
            parts.append({**sample, **sizes, "net_input": net_input, "target": target})
        return parts

    def optimizer_step(self, optimizer: FairseqOptimizer, model: BaseFairseqModel, update_num: int) -> None:
        lr = optimizer.get_lr()
        optimizer.set_lr(lr * sum(self.lr_scales) / len(self.lr_scales))
        optimizer.step()
        optimizer.set_lr(lr)

    def begin_valid_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        self.validations = 0
        if self.optimizer is not None:
            swap_weights(self.optimizer, average=True)

    def post_validate(self, model: BaseFairseqModel, stats: dict, agg: dict) -> None:
        """Hands the validation loss of an epoch's end, on the first of ``--valid-subset``, to the optimizer.

        Raises UserError for one that is not finite, before fairseq saves such a model over the last good one.
        """
        loss = float(agg["nll_loss" if "nll_loss" in agg else "loss"].avg)
        if not math.isfinite(loss):
            raise UserError(f"the validation loss is {loss} in epoch {self.epoch}: {AFTER_DIVERGENCE}")
        self.validations += 1
        nt_asgd = find_nt_asgd(self.optimizer)
        if nt_asgd and self.epoch_ended and self.validations == 1:
            nt_asgd.end_epoch(loss)

    # ------------------------------------------------------------------------------------------- checkpoints

    def begin_save(self, model: BaseFairseqModel, optimizer: FairseqOptimizer) -> None:
        """What every process does before the first one saves (``fairseq_compat.training_loop``).

        Puts the average of ``nt_asgd`` into the model, validated or not, and collects the hidden states of all.
        """
        swap_weights(optimizer, average=True)
        if self.epoch_ended:  # the next one starts from zeros
            self.states_of_all = []
            return
        processes = distributed_utils.get_data_parallel_world_size()
        self.states_of_all = [self.training_states(model)] * processes
        if processes > 1:
            group = distributed_utils.get_data_parallel_group()
            torch.distributed.all_gather_object(self.states_of_all, self.states_of_all[0], group=group)

    def training_states(self, model: BaseFairseqModel) -> dict:
        names = (self.args.train_subset, f"{self.args.train_subset}:")
        return {
            stream: [tuple(part.cpu() for part in state) for state in states]
            for stream, states in model.decoder.states.items()
            if stream == names[0] or stream.startswith(names[1])
        }

    def get_checkpoint_dict(self) -> dict:
        return {type(self).__name__: {"hidden_states": self.states_of_all, "walk": self.walk}}

    def set_checkpoint_dict(self, state_dict: dict) -> None:
        states = state_dict["hidden_states"]
        if not states:
            return
        for name, value in state_dict.get("walk", {}).items():  # older checkpoints have none
            if value != self.walk[name]:
                option = "--" + name.replace("_", "-")
                raise UserError(
                    f"the checkpoint was saved in the middle of an epoch with {option} {value}, and cannot be resumed "
                    f"with {self.walk[name]}: give the same, go on from a checkpoint of an epoch's end, or begin the "
                    "text anew by --reset-dataloader"
                )
        processes = distributed_utils.get_data_parallel_world_size()
        if len(states) != processes:
            raise UserError(
                f"the checkpoint was saved in the middle of an epoch by {len(states)} processes, and cannot be resumed "
                f"by {processes}: use as many, go on from a checkpoint of an epoch's end, or begin the text anew by "
                "--reset-dataloader"
            )
        self.restored_states = states[distributed_utils.get_data_parallel_rank() if processes > 1 else 0]
