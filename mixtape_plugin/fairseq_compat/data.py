"""Data: read with any numpy, named where damaged, nothing skipped; batches: the last, too, the same after a resume."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import queue
import threading
import time
import types
import warnings
import weakref

import numpy as np
from fairseq.data import Dictionary, data_utils, indexed_dataset, language_pair_dataset, token_block_dataset
from fairseq.data.iterators import BackgroundConsumer, EpochBatchIterator
from fairseq.modules import dynamic_crf_layer
from fairseq.tasks import FairseqTask, translation
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer

from mixtape_plugin.damaged_files import check_dataset, damaged_dictionary
from mixtape_plugin.errors import UserError
from mixtape_plugin.fairseq_compat.patching import replace

SECONDS_TO_END_READING = 5.0


class _NumpyWithRemovedNames(types.ModuleType):
    """numpy, plus the names in its `__dict__`."""

    def __getattr__(self, name):
        return getattr(np, name)


def provide_removed_numpy_names() -> None:
    """Give np.int, np.float (gone since numpy 1.24), np.compat.long (since 2.0) and the interpolation of np.percentile
    (called method, since 2.4) to the modules that use them.

    Only those modules see them: other libraries ask numpy itself what it has.
    """
    removed = {"int": int, "float": float, "compat": types.SimpleNamespace(long=int)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy 1.20 to 1.23 warn about np.int when asked for it
        missing = {name: value for name, value in removed.items() if not hasattr(np, name)}
    if "interpolation" not in inspect.signature(np.percentile).parameters:

        def percentile(*args, interpolation="linear", **kwargs):
            return np.percentile(*args, method=interpolation, **kwargs)

        missing["percentile"] = percentile
    if not missing:
        return
    numpy = _NumpyWithRemovedNames("numpy")
    vars(numpy).update(missing)
    for module in (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer):
        module.np = numpy


def keep_last_batch() -> None:
    """Batch every sentence: fairseq-fixed drops the last batch unless its size divides by bsz_mult.

    Batches are consecutive pieces of `indices`, so what is missing is the end of it: one batch, which obeyed the
    limits on tokens and sentences when it was made.
    """
    five = np.arange(5)
    if len(data_utils.batch_by_size(five, None, np.ones_like(five), required_batch_size_multiple=8)) == 1:
        return

    def wrapper(batch_by_size):
        def batch_all_by_size(indices, *args, **kwargs):
            if not isinstance(indices, np.ndarray):
                indices = np.fromiter(indices, dtype=np.int64, count=-1)
            if len(indices) == 0:
                return []
            batches = batch_by_size(indices, *args, **kwargs)
            batched = sum(len(batch) for batch in batches)
            return batches if batched == len(indices) else list(batches) + [indices[batched:]]

        return batch_all_by_size

    replace(data_utils, "batch_by_size", wrapper)


def keep_batches_after_a_resume() -> None:
    """Let a training that is resumed in a later epoch go on with the batches that it had.

    fairseq puts sentences into batches once, by a seed that counts the epoch, and after that changes their order alone:
    an uninterrupted training keeps those of epoch 1. A resumed one made those of its present epoch, and in the middle
    of it saw some sentences twice and others not at all. With --update-ordered-indices-seed the trainer, too, counts
    the epoch in the seed.
    """
    raised = 0  # the seed, since the first epoch

    def wrapper(get_batch_iterator):
        signature = inspect.signature(get_batch_iterator)

        def get_batches_of_the_first_epoch(self, *args, **kwargs):
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            options, dataset, epoch = given.arguments, given.arguments["dataset"], given.arguments["epoch"]
            other_each_epoch = options["disable_iterator_cache"] or options["update_epoch_batch_itr"]
            if other_each_epoch or not self.can_reuse_epoch_itr(dataset) or dataset in self.dataset_to_epoch_iter:
                return get_batch_iterator(self, *args, **kwargs)
            options["epoch"], options["seed"] = 1, options["seed"] - raised
            batches = get_batch_iterator(*given.args, **given.kwargs)
            batches.epoch = epoch
            dataset.set_epoch(epoch)
            return batches

        return get_batches_of_the_first_epoch

    def note_seed(get_train_iterator):
        def get_and_note_seed(self, epoch, *args, **kwargs):
            nonlocal raised
            raised = epoch - 1 if self.cfg.dataset.update_ordered_indices_seed else 0
            try:
                return get_train_iterator(self, epoch, *args, **kwargs)
            finally:
                raised = 0

        return get_and_note_seed

    replace(FairseqTask, "get_batch_iterator", wrapper)
    replace(Trainer, "get_train_iterator", note_seed)


def shuffle_after_the_curriculum() -> None:
    """End ``--curriculum N`` after N epochs: fairseq kept the order of the first epoch for good, until a resume."""

    def wrapper(get_iterator_for_epoch):
        def get_iterator_in_order_or_shuffled(self, epoch, shuffle, *args, **kwargs):
            if getattr(self, "epoch_batch_sampler", None) is not None:  # else it is made, by this epoch's order
                self.epoch_batch_sampler.shuffle = shuffle
            return get_iterator_for_epoch(self, epoch, shuffle, *args, **kwargs)

        return get_iterator_in_order_or_shuffled

    replace(EpochBatchIterator, "_get_iterator_for_epoch", wrapper)


def end_reading_before_the_interpreter() -> None:
    """Stop the threads that read batches ahead before the interpreter ends, and wait for the batch they are at.

    fairseq leaves them running. A training that ended in the middle of an epoch, by --max-update say, then died now and
    then with status 134 and "terminate called without an active exception", its checkpoint written: a thread that comes
    back from torch's C++ to an interpreter that is gone is ended in a way that C++ does not survive.
    """
    the_end = threading.Event()
    readers = weakref.WeakSet()

    def read_until_the_end(source):
        for batch in source:
            if the_end.is_set():
                return
            yield batch

    def wrapper(initialize):
        def initialize_with_an_end(self, batches, source, *args, **kwargs):
            initialize(self, batches, read_until_the_end(source), *args, **kwargs)
            readers.add(self)

        return initialize_with_an_end

    @atexit.register
    def end_reading():
        the_end.set()
        deadline = time.monotonic() + SECONDS_TO_END_READING
        for reader in list(readers):
            while reader.is_alive() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    reader._queue.get_nowait()  # one that waits for a place in a full queue would wait for ever
                reader.join(0.01)

    replace(BackgroundConsumer, "__init__", wrapper)


def refuse_blocks_that_would_be_skipped() -> None:
    """Let fairseq-eval-lm say that a model has too few positions for the blocks of a text, or that these are empty.

    It leaves out blocks that are too long, with a warning: where it is all of them, it reports a perplexity of 1.
    """

    def wrapper(eval_lm_dataloader):
        def checked_dataloader(self, dataset, *args, max_positions=None, **kwargs):
            longest = max(dataset.sizes, default=0)
            if max_positions is not None and longest > max_positions:
                mode = self.args.sample_break_mode
                # in other modes a long sentence is a block, whatever length is asked for
                cut = mode in (None, "none")
                raise UserError(
                    f"a {'block of the text' if cut else 'sentence'} has {longest} tokens, and the model has "
                    f"{max_positions} positions: "
                    + (f"give --tokens-per-sample {max_positions}, or less" if cut else "give --sample-break-mode none")
                )
            return eval_lm_dataloader(self, dataset, *args, max_positions=max_positions, **kwargs)

        return checked_dataloader

    def load_blocks(load_dataset):
        def load_blocks_of_tokens(self, *args, **kwargs):
            if self.args.tokens_per_sample < 1:  # by now fairseq-eval-lm has taken off the --context-window
                raise UserError(
                    f"blocks of {self.args.tokens_per_sample} tokens are not allowed: --tokens-per-sample, "
                    "in fairseq-eval-lm less --context-window, is at least 1"
                )
            return load_dataset(self, *args, **kwargs)

        return load_blocks_of_tokens

    replace(LanguageModelingTask, "eval_lm_dataloader", wrapper)
    replace(LanguageModelingTask, "load_dataset", load_blocks)


def refuse_broken_data() -> None:
    """Name the file and the way out where binarized data or a dictionary is damaged or missing.

    fairseq reads garbage or ends in a traceback of numpy.
    """

    def check_dataset_first(make_dataset):
        def make_checked_dataset(path, impl, fix_lua_indexing=False, dictionary=None):
            check_dataset(path, impl, dictionary)
            return make_dataset(path, impl, fix_lua_indexing, dictionary)

        return make_checked_dataset

    def check_dictionary(add_from_file):
        def add_from_existing_file(self, f):
            if isinstance(f, str) and not os.path.exists(f):
                raise UserError(f"dictionary {f} does not exist: give the folder that fairseq-preprocess wrote")
            try:
                return add_from_file(self, f)
            except Exception as error:
                if not isinstance(f, str):  # fairseq opens the file and calls this again
                    raise
                raise damaged_dictionary(f, error) from error

        return add_from_existing_file

    def check_folder(infer_language_pair):
        def infer_from_existing_folder(path):
            if not os.path.isdir(path):
                raise UserError(f"data folder {path} does not exist: give the one that fairseq-preprocess wrote")
            return infer_language_pair(path)

        return infer_from_existing_folder

    def check_target(load_langpair_dataset):
        def load_with_target(data_path, split, src, src_dict, tgt, *args, **kwargs):
            dataset = load_langpair_dataset(data_path, split, src, src_dict, tgt, *args, **kwargs)
            if dataset.tgt is None and kwargs.get("combine"):  # only training combines the shards of a split
                pair = (
                    f"{src}-{tgt}" if os.path.exists(f"{data_path}/{split}.{src}-{tgt}.{src}.idx") else f"{tgt}-{src}"
                )
                raise UserError(f"{data_path} lacks {split}.{pair}.{tgt}.bin or .idx: run fairseq-preprocess again")
            return dataset

        return load_with_target

    replace(indexed_dataset, "make_dataset", check_dataset_first)
    replace(translation, "load_langpair_dataset", check_target)
    replace(Dictionary, "add_from_file", check_dictionary)
    replace(data_utils, "infer_language_pair", check_folder)
