"""Damaged data, dictionaries and checkpoints end in a sentence that names the file, never in a traceback."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import USER_DIR, generate_args, run, train_args
from fairseq.data import Dictionary, data_utils, indexed_dataset
from test_command_line_errors import error_of
from toy_text import lm_args, toy_text  # noqa: F401

from mixtape_plugin.damaged_files import check_weights
from mixtape_plugin.errors import UserError

# ------------------------------------------------------------------------------------------- dictionaries and data


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"word", "Incorrect dictionary format"),
        (b"word many", "Incorrect dictionary format"),
        (b"", "Incorrect dictionary format"),
        (b"a 1", "Duplicate word found"),
        (b"\xff 1", "Incorrect encoding"),
    ],
)
def test_damaged_line_of_a_dictionary(line, reason, tmp_path):
    path = tmp_path / "dict.txt"
    path.write_bytes(b"a 3\n" + line + b"\nb 1\n")
    with pytest.raises(UserError, match=f"^dictionary {path} is damaged \\({reason}.*: restore it") as failure:
        Dictionary.load(str(path))
    assert "\n" not in str(failure.value)


@pytest.fixture
def written(tmp_path):
    """The place of a binarized text of 20 sentences, of the ids 4 to 27, and a dictionary of them all."""
    path = str(tmp_path / "train")
    builder = indexed_dataset.make_builder(path + ".bin", "mmap", vocab_size=100)
    for length in range(5, 25):
        builder.add_item(torch.arange(4, 4 + length))
    builder.finalize(path + ".idx")
    return path, ["symbol"] * 28


def test_a_negative_id_is_refused(tmp_path):
    builder = indexed_dataset.MMapIndexedDatasetBuilder(f"{tmp_path}/train.bin", dtype=np.int32)
    builder.add_item(torch.tensor([4, -1, 2]))
    builder.finalize(f"{tmp_path}/train.idx")
    with pytest.raises(UserError, match="train.bin holds the id -1, and its dictionary has 28 symbols"):
        data_utils.load_indexed_dataset(f"{tmp_path}/train", ["symbol"] * 28)


def test_numbers_of_the_right_size_that_are_floats_are_refused(tmp_path):
    builder = indexed_dataset.MMapIndexedDatasetBuilder(f"{tmp_path}/train.bin", dtype=np.int64)
    builder.add_item(torch.arange(4, 9))
    builder.finalize(f"{tmp_path}/train.idx")
    with open(f"{tmp_path}/train.idx", "r+b") as file:
        file.seek(17)
        file.write(b"\6")  # float64
    with pytest.raises(UserError, match="train.idx is cut off or damaged"):
        data_utils.load_indexed_dataset(f"{tmp_path}/train", ["symbol"] * 28)


def test_sentences_without_a_token_are_refused(tmp_path):
    builder = indexed_dataset.make_builder(f"{tmp_path}/train.bin", "mmap", vocab_size=28)
    builder.add_item(torch.tensor([]))
    builder.finalize(f"{tmp_path}/train.idx")
    with pytest.raises(UserError, match="train.bin holds no token: check the text that it was made from and run fairs"):
        data_utils.load_indexed_dataset(f"{tmp_path}/train", ["symbol"] * 28)


@pytest.mark.parametrize("impl", [None, "mmap", "cached"])
@pytest.mark.parametrize("content", [b"", b"MMIDIDY", b"no index at all, but long enough"])
def test_idx_that_is_no_index(impl, content, written):
    path, dictionary = written
    with open(path + ".idx", "r+b") as file:
        file.write(content) if content else file.truncate(0)
    with pytest.raises(UserError, match=f"^{path}.idx is no index that .* wrote, or is damaged: run fairseq-preproc"):
        data_utils.load_indexed_dataset(path, dictionary, impl)


@pytest.mark.parametrize(
    "place, value",
    {
        "version": (9, b"\2"),
        "no such type": (17, b"\0"),
        "floats": (17, b"\6"),
        "another size of numbers": (17, b"\5"),
        "too many": (18, b"\x15"),
        "one sentence longer": (26 + 4, b"\7"),
        "negative": (26 + 4, np.int32(-6).tobytes()),
        "begins elsewhere": (26 + 20 * 4 + 8, b"\x0b"),
        "first begins late": (26 + 20 * 4, b"\2"),
    }.values(),
)
def test_damaged_idx(place, value, written):
    path, dictionary = written
    assert len(data_utils.load_indexed_dataset(path, dictionary)) == 20
    with open(path + ".idx", "r+b") as file:
        file.seek(place)
        file.write(value)
    with pytest.raises(UserError, match=f"^{path}.idx is cut off or damaged"):
        data_utils.load_indexed_dataset(path, dictionary)


def test_ids_beyond_the_dictionary(written):
    path, dictionary = written
    with pytest.raises(UserError, match=f"^{path}.bin holds the id 27, and its dictionary has 27 symbols: one of"):
        data_utils.load_indexed_dataset(path, dictionary[1:])
    assert data_utils.load_indexed_dataset(path, dictionary)[19].max() == 27
    data_utils.load_indexed_dataset(path)  # alignments are no symbols


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("change", ["one more", "one less"])
def test_dictionary_of_another_size_than_the_checkpoint(change, data, trained, tmp_path):
    """The source's: of the target's the output layer knows."""
    folder, path = shutil.copytree(data, tmp_path / "data"), trained("softmax").checkpoint
    lines = (folder / "dict.x.txt").read_text().splitlines()
    lines = lines[:-1] if change == "one less" else [*lines, "new 0"]  # the last was a word that never occurs
    (folder / "dict.x.txt").write_text("\n".join(lines) + "\n")
    more = ["--output-layer", "softmax", "--share-decoder-input-output-embed", "--restore-file", path, "--no-save"]
    for sentence in (
        error_of("train", *train_args(folder, tmp_path / "none", *more)),
        error_of("generate", *generate_args(folder, path)),
    ):
        assert sentence.startswith(f"checkpoint {path} does not fit the model (size mismatch for encoder.embed_tokens")
        assert "\n" not in sentence


@pytest.mark.slow
def test_training_that_the_checkpoint_is_not_of(data, trained, tmp_path):
    path = trained("softmax").checkpoint
    more = ["--output-layer", "softmax", "--share-decoder-input-output-embed", "--restore-file", path, "--no-save"]
    sentence = error_of("train", *train_args(data, tmp_path, *more, "--optimizer", "sgd"))
    assert sentence.startswith(
        f"checkpoint {path} does not fit this training (AssertionError: Optimizer does not match"
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, [1], "weights"])
def test_a_checkpoint_without_weights_is_unreadable(model):
    with pytest.raises(UserError, match="^best.pt is damaged or is no checkpoint"):
        check_weights("best.pt", {"model": model})


def test_weights_that_are_no_numbers(data, trained, tmp_path):
    state = torch.load(trained("softmax").checkpoint, weights_only=True)
    state["model"]["decoder.output_projection.bias"][3] = np.nan
    torch.save(state, path := tmp_path / "diverged.pt")
    expected = f"checkpoint {path} holds weights that are no numbers (decoder.output_projection.bias): "
    assert error_of("train", *train_args(data, tmp_path, "--restore-file", path, "--no-save")).startswith(expected)
    assert error_of("generate", *generate_args(data, path)).startswith(expected)


# ----------------------------------------------------------------------------------------------- whatever it may be

SEED, CASES = 1, 50


@pytest.fixture(scope="module")
def trained_inputs(data, text, tmp_path_factory):
    """A folder of data and checkpoints of a translation and a language model, and the commands that read them."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(data, folder / "translation")
    shutil.copytree(text, folder / "text")
    end = "--no-epoch-checkpoints --disable-validation --max-update".split()
    run("train", *train_args(data, folder / "checkpoints", *end, 1))
    shutil.move(folder / "checkpoints" / "checkpoint_last.pt", folder / "translation.pt")
    run("train", *lm_args(text, folder / "checkpoints", "--averaging-epoch", 9, *end, 1))
    shutil.move(folder / "checkpoints" / "checkpoint_last.pt", folder / "text.pt")
    nothing = ["--no-save", *end, 2, "--restore-file"]
    arguments = {
        "translation": train_args(folder / "translation", folder / "none", *nothing, folder / "translation.pt"),
        "generate": generate_args(folder / "translation", folder / "translation.pt", "--max-len-b", 3, "--beam", 1),
        "language model": lm_args(
            folder / "text", folder / "none", "--averaging-epoch", 9, *nothing, folder / "text.pt"
        ),
    }
    arguments = {name: list(map(str, args)) for name, args in arguments.items()}
    (folder / "arguments.json").write_text(json.dumps(arguments))
    return folder


@pytest.mark.slow
def test_no_damage_ends_in_a_traceback(trained_inputs):
    script = Path(__file__).parents[1] / "support" / "mutate_inputs.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.path.dirname(USER_DIR)}
    command = [sys.executable, script, trained_inputs, SEED, CASES]
    result = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    cases = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"command"')]
    whole, damaged = cases[:3], cases[3:]
    assert [case["ended"][0] for case in whole] == ["done"] * 3, whole
    assert len(damaged) == CASES
    for case in damaged:
        how, message = case["ended"]
        assert how != "traceback", f"{case['command']}, {case['kind']} {case['file']}: {message}"
        if how == "sentence":
            assert str(trained_inputs) in message or "dictionary" in message, case
            assert "\n" not in message
    refused = Counter(Path(case["file"]).suffix for case in damaged if case["ended"][0] == "sentence")
    assert min(refused[suffix] for suffix in (".txt", ".idx", ".bin", ".pt")) >= 2, refused
