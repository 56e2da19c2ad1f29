"""The repairs of fairseq, each against what it promises: every sentence, no traceback, no noise."""

import argparse
import io
import os
import random
import subprocess
import sys
import types
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.data import (
    Dictionary,
    FairseqDataset,
    TokenBlockDataset,
    data_utils,
    indexed_dataset,
    language_pair_dataset,
)
from fairseq.data.iterators import EpochBatchIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import FairseqTask
from fairseq_cli import generate, preprocess
from fairseq_cli import train as fairseq_train
from omegaconf import OmegaConf
from toy_checkpoints import Pickled, by_allow_list, load, save

import mixtape_plugin
from mixtape_plugin import errors, fairseq_compat
from mixtape_plugin.errors import UserError

USER_DIR = os.path.dirname(mixtape_plugin.__file__)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
ENVIRONMENT.pop(errors.FULL_TRACEBACK, None)


def run_command(name, *args):
    """A fairseq command as its console script runs it, in a process of its own."""
    code = f"from fairseq_cli.{name} import cli_main; cli_main()"
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def data_bin(tmp_path_factory):
    """100 sentences to train on and to translate, 5 more as test1."""
    folder = tmp_path_factory.mktemp("toy")
    rng = random.Random(0)
    for split, sentences in ("train", 100), ("valid", 20), ("test", 100), ("five", 5):
        lines = [[rng.randrange(20) for _ in range(rng.randint(2, 9))] for _ in range(sentences)]
        for language in "xy":
            text = "".join(" ".join(f"{language}{word}" for word in line) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text)
    prefixes = [f"--trainpref={folder}/train", f"--validpref={folder}/valid"]
    prefixes.append(f"--testpref={folder}/test,{folder}/five")
    parser = options.get_preprocessing_parser()
    preprocess.main(parser.parse_args(["-s", "x", "-t", "y", f"--destdir={folder}/bin", *prefixes]))
    return folder / "bin"


def train_args(data_bin, save_dir, *more):
    size = "--{0}-layers 1 --{0}-embed-dim 8 --{0}-ffn-embed-dim 8 --{0}-attention-heads 1"
    arch = f"--arch transformer {size.format('encoder')} {size.format('decoder')}".split()
    training = "--optimizer adam --lr 1e-3 --max-tokens 300 --max-update 2 --cpu --num-workers 0".split()
    folders = [str(data_bin), f"--save-dir={save_dir}", f"--user-dir={USER_DIR}"]
    return [*folders, *arch, *training, "--no-epoch-checkpoints", *more]


@pytest.fixture(scope="module")
def trained(data_bin, tmp_path_factory):
    """fairseq-train with the options whose checkpoint holds more than tensors and plain Python."""
    save_dir = tmp_path_factory.mktemp("trained")
    bleu = ["--eval-bleu", '--eval-bleu-args={"beam": 1, "max_len_b": 5}']
    result = run_command("train", *train_args(data_bin, save_dir, *bleu))
    assert result.returncode == 0, result.stderr
    return types.SimpleNamespace(checkpoint=save_dir / "checkpoint_last.pt", stderr=result.stderr)


def test_apply_twice_changes_nothing():
    functions = [data_utils.batch_by_size, checkpoint_utils.load_checkpoint_to_cpu, options.parse_args_and_arch]
    fairseq_compat.apply()
    assert functions == [
        data_utils.batch_by_size,
        checkpoint_utils.load_checkpoint_to_cpu,
        options.parse_args_and_arch,
    ]


def test_what_failed_once_is_not_taken_for_done(monkeypatch):
    error = ImportError("no Cython here")
    for name, value in {"done": False, "failed": None}.items():
        monkeypatch.setattr(fairseq_compat.apply, name, value, raising=False)
    monkeypatch.setattr(fairseq_compat, "silence_known_deprecations", mock.Mock(side_effect=error))
    with pytest.raises(ImportError, match="no Cython here"):
        fairseq_compat.apply()
    with pytest.raises(ImportError, match="could not be repaired") as again:
        fairseq_compat.apply()
    assert again.value.__cause__ is error


# ------------------------------------------------------------------------------------------------- batching


@pytest.mark.parametrize("path", ["vector", "function"])
@pytest.mark.parametrize("multiple", [1, 3, 8])
@pytest.mark.parametrize("sentences", [0, 1, 5, 7, 8, 9, 16, 100, 257])
def test_every_sentence_is_batched_once_within_the_limits(sentences, multiple, path):
    rng = np.random.RandomState(sentences)
    lengths = rng.randint(1, 30, size=sentences)
    for max_tokens, max_sentences in (None, None), (120, None), (None, 8), (240, 16):
        indices = rng.permutation(sentences)
        batches = data_utils.batch_by_size(
            indices if max_tokens else iter(indices.tolist()),
            num_tokens_fn=lengths.__getitem__,
            num_tokens_vec=lengths[indices] if path == "vector" else None,
            max_tokens=max_tokens,
            max_sentences=max_sentences,
            required_batch_size_multiple=multiple,
        )
        assert [i for batch in batches for i in batch] == indices.tolist()
        for batch in batches:
            assert 0 < len(batch) <= (max_sentences or sentences)
            assert len(batch) * max(lengths[i] for i in batch) <= (max_tokens or np.inf)
        for batch in batches[:-1]:
            assert len(batch) % multiple == 0 or len(batch) < multiple


@pytest.mark.parametrize("sentences", [1, 5, 9, 100])
def test_every_sentence_is_batched_into_fixed_shapes(sentences):
    lengths = np.random.RandomState(0).randint(1, 30, size=sentences)
    shapes = [(8, 10), (4, 30)]
    batches = data_utils.batch_by_size(
        np.arange(sentences), lengths.__getitem__, required_batch_size_multiple=8, fixed_shapes=shapes
    )
    assert [i for batch in batches for i in batch] == list(range(sentences))


@pytest.mark.parametrize("reuse", [True, False])
def test_a_curriculum_of_two_epochs_ends_after_two(reuse):
    dataset = torch.utils.data.ConcatDataset([range(20)])
    batches, options = [[number] for number in range(20)], {"num_workers": 0, "persistent_workers": False}
    epochs = EpochBatchIterator(dataset, sum, batches, reuse_dataloader=reuse, **options)
    orders = [list(epochs.next_epoch_itr(shuffle=epoch > 2)) for epoch in (1, 2, 3, 4)]
    assert orders[0] == orders[1] == list(range(20))
    assert orders[2] != orders[3] and all(order != orders[0] and sorted(order) == orders[0] for order in orders[2:])


# ---------------------------------------------------------------------------------------------- checkpoints


@by_allow_list
def test_checkpoint_of_fairseq_train_loads_whole(trained):
    state = load(trained.checkpoint)
    assert isinstance(state["cfg"]["model"], argparse.Namespace)
    arrays = [a for a in _leaves(state["extra_state"]) if isinstance(a, np.ndarray)]
    assert arrays, "--eval-bleu keeps its n-gram counts as arrays"
    assert torch.serialization.get_unsafe_globals_in_checkpoint(str(trained.checkpoint)) == []


def _leaves(tree):
    if isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(value)
    else:
        yield tree


def test_resumed_options_reach_other_ranks_through_the_allow_list(trained, monkeypatch):
    """Rank 0 saves into a buffer, the others load it: here one process plays both."""
    sent = []

    def save_and_load(obj, *_):
        if obj is not None:
            buffer = io.BytesIO()
            torch.save(obj, buffer)
            sent.append(buffer)
        return torch.load(io.BytesIO(sent[-1].getvalue()))

    monkeypatch.setattr(distributed_utils, "_broadcast_object_slow", save_and_load)
    monkeypatch.setattr(distributed_utils, "get_rank", lambda group: 0)
    monkeypatch.setattr(distributed_utils, "broadcast_tensors", lambda tensors, *_: tensors)
    state = load(trained.checkpoint)
    received = distributed_utils.broadcast_object(state, 0, None, dist_device=torch.device("cpu"))
    assert OmegaConf.is_config(state["cfg"])
    assert received["cfg"]["model"] == state["cfg"]["model"]
    assert received["cfg"]["optimization"]["lr"] == [1e-3]
    for name, tensor in state["model"].items():
        assert torch.equal(received["model"][name], tensor)


# ----------------------------------------------------------------------------------------------------- data


class Numbers(FairseqDataset):
    """20 examples of one token each, in another order each time that it is asked for."""

    def __len__(self):
        return 20

    def num_tokens(self, index):
        return 1

    def num_tokens_vec(self, indices):
        return np.ones_like(indices)

    def ordered_indices(self):
        return np.random.permutation(20)


@pytest.mark.parametrize("option", [None, "disable_iterator_cache", "update_epoch_batch_itr"])
def test_batches_are_those_of_epoch_1_unless_they_change_with_the_epoch(option):
    found = []
    for epoch in 1, 4:
        task, options = FairseqTask(None), {option: True} if option else {}
        iterator = task.get_batch_iterator(Numbers(), max_sentences=4, epoch=epoch, **options)
        assert iterator.next_epoch_idx == epoch
        found.append([batch.tolist() for batch in iterator.frozen_batches])
    assert (found[0] == found[1]) == (option is None)


def test_a_dataset_hears_of_the_epoch_that_a_resume_goes_on_with():
    """Also where its batches are those of epoch 1."""

    class Listening(Numbers):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    dataset = Listening()
    FairseqTask(None).get_batch_iterator(dataset, max_sentences=4, epoch=4)
    assert dataset.epoch == 4


def test_names_that_numpy_removed_exist_for_fairseq_alone():
    before = hasattr(np, "compat")
    assert language_pair_dataset.np.compat.long is int
    assert data_utils.np.int is int or data_utils.np is np
    assert hasattr(np, "compat") == before
    assert list(data_utils.get_buckets(np.arange(1, 50), 3)) == [17, 33, 49]  # for --num-batch-buckets
    dataset = TokenBlockDataset(
        [torch.arange(4), torch.arange(3)], torch.tensor([4, 3]), block_size=None, pad=1, eos=2, break_mode="eos"
    )
    assert [len(item) for item in dataset] == [4, 3]
    blocks = TokenBlockDataset([torch.arange(7)], [7], block_size=3, pad=1, eos=2, break_mode="none")
    assert torch.cat(list(blocks)).tolist() == list(range(7))


@pytest.fixture
def written(tmp_path):
    """A binarized dataset of 20 sentences, and its prefix."""
    prefix = str(tmp_path / "train.x-y.x")
    builder = indexed_dataset.make_builder(prefix + ".bin", "mmap", vocab_size=100)
    sentences = [torch.arange(5 + i) for i in range(20)]
    for sentence in sentences:
        builder.add_item(sentence)
    builder.finalize(prefix + ".idx")
    return prefix, sentences


def test_whole_dataset_loads(written):
    prefix, sentences = written
    dataset = data_utils.load_indexed_dataset(prefix)
    assert all(torch.equal(dataset[i], sentence) for i, sentence in enumerate(sentences))
    assert data_utils.load_indexed_dataset(prefix + "-no-such") is None  # how fairseq finds the end of train, train1


@pytest.mark.parametrize("suffix, keep", [(".bin", -1), (".bin", 0), (".idx", -1), (".idx", 100), (".idx", 20)])
def test_truncated_dataset_is_named(written, suffix, keep):
    prefix, _ = written
    content = open(prefix + suffix, "rb").read()
    with open(prefix + suffix, "wb") as file:
        file.write(content[:keep])
    with pytest.raises(UserError) as refusal:
        data_utils.load_indexed_dataset(prefix, dataset_impl="mmap")
    assert prefix + suffix in str(refusal.value) and "run fairseq-preprocess again" in str(refusal.value)


def test_bin_of_another_idx_is_refused(written):
    prefix, _ = written
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(UserError, match="promises"):
        data_utils.load_indexed_dataset(prefix)


def test_dataset_without_a_sentence_is_refused(tmp_path):
    prefix = str(tmp_path / "empty")
    indexed_dataset.make_builder(prefix + ".bin", "mmap", vocab_size=100).finalize(prefix + ".idx")
    with pytest.raises(UserError, match="holds no sentence"):
        data_utils.load_indexed_dataset(prefix)


def test_missing_dictionary_and_folder_are_named(tmp_path):
    with pytest.raises(UserError, match=r"dict\.x\.txt does not exist"):
        Dictionary.load(str(tmp_path / "dict.x.txt"))
    with pytest.raises(UserError, match="nowhere does not exist"):
        data_utils.infer_language_pair(str(tmp_path / "nowhere"))
    assert data_utils.infer_language_pair(str(tmp_path)) == (None, None)  # which fairseq explains


def test_existing_dictionary_loads(tmp_path):
    (tmp_path / "dict.x.txt").write_text("a 3\nb 2\n")
    assert Dictionary.load(str(tmp_path / "dict.x.txt")).symbols[-2:] == ["a", "b"]


# -------------------------------------------------------------------------------------------------- options


def test_bf16_does_not_ask_for_a_tpu(data_bin, tmp_path):
    arguments = train_args(data_bin, tmp_path)
    for more, bf16, tpu in ([], False, False), (["--bf16"], True, False), (["--bf16", "--tpu"], True, True):
        args = options.parse_args_and_arch(options.get_training_parser(), arguments + more)
        assert (args.bf16, args.tpu) == (bf16, tpu)


# -------------------------------------------------------------------------------------- what the user reads


DEPRECATIONS = (
    "no longer experimental",
    "version_base",
    "package header",
    "ConfigStore schema",
    "strict flag",
    "autocast(args...)` is deprecated",
    "'pin_memory' argument",
    "mismatched key_padding_mask",
)


def test_only_known_deprecations_are_silent():
    code = """
import sys, warnings
import mixtape_plugin, torch
mixtape_plugin.register()
torch.cuda.amp.autocast(enabled=False)
warnings.warn("hydra.experimental.compose() is no longer experimental. Use hydra.compose()", UserWarning)
print("unknown ones:", file=sys.stderr)
warnings.warn("hydra is on fire", UserWarning)
warnings.warn("The version_base parameter is not specified, says another library", UserWarning)
warnings.warn("`torch.other(args...)` is deprecated", FutureWarning)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=os.path.dirname(USER_DIR), env=ENVIRONMENT, capture_output=True, text=True)
    silent, heard = result.stderr.split("unknown ones:")
    assert not [phrase for phrase in DEPRECATIONS if phrase in silent]
    assert [heard.count(word) for word in ("on fire", "another library", "torch.other")] == [1, 1, 1]


def test_log_of_fairseq_train_is_free_of_known_deprecations(trained):
    assert not [phrase for phrase in DEPRECATIONS if phrase in trained.stderr]


# ------------------------------------------------------------------------------------- the commands themselves


def call_command(monkeypatch, command, *args):
    """A fairseq command in this process, which saves the seconds of an import."""
    monkeypatch.setattr(sys, "argv", ["fairseq", *map(str, args)])
    with warnings.catch_warnings():
        command.cli_main()


def generate_args(data_bin, checkpoint, *more):
    small = "--cpu --beam 1 --max-len-b 3 -s x -t y --max-tokens 2000".split()
    return [data_bin, f"--path={checkpoint}", f"--user-dir={USER_DIR}", *small, *more]


@pytest.mark.parametrize("subset, sentences", [("test", 100), ("test1", 5)])
def test_generate_translates_every_sentence(data_bin, trained, monkeypatch, capsys, subset, sentences):
    args = generate_args(data_bin, trained.checkpoint, "--gen-subset", subset)
    call_command(monkeypatch, generate, *args)
    hypotheses = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("H-")]
    assert sorted(hypotheses) == sorted(f"H-{i}" for i in range(sentences))


@by_allow_list
@pytest.mark.slow
def test_generate_refuses_a_foreign_checkpoint_and_missing_data(data_bin, tmp_path, monkeypatch):
    path = save(Pickled(os.system, f"touch {tmp_path}/ran"), tmp_path / "attack.pt")
    with pytest.raises(UserError, match="system, which is not on the list"):
        call_command(monkeypatch, generate, *generate_args(data_bin, path))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="dict.x.txt does not exist"):
        call_command(monkeypatch, generate, *generate_args(tmp_path / "nowhere", path))
    with pytest.raises(FileNotFoundError) as missing:
        call_command(monkeypatch, fairseq_train, *train_args(data_bin, tmp_path, "--train-subset=train9"))
    assert errors.sentence_for_user(missing.value).startswith("Dataset not found: train9")


@by_allow_list
@pytest.mark.slow
def test_train_ends_in_one_sentence_without_traceback(data_bin, tmp_path):
    path = save(Pickled(os.system, f"touch {tmp_path}/ran"), tmp_path / "attack.pt")
    result = run_command("train", *train_args(data_bin, tmp_path / "new", f"--restore-file={path}"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: checkpoint {path} is not loaded: it holds a pickled ")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "ran").exists()
