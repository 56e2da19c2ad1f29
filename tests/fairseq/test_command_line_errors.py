"""What a user can get wrong on the command line: one sentence with the option or file, its value and what is allowed.

And no file half written: the folder for checkpoints stays empty.
"""

import os
import re
import shutil

import pytest
import torch
from conftest import LAYERS, USER_DIR, console_script, generate_args, run, start, train_args
from fairseq import options, tasks
from fairseq.data import Dictionary

from mixtape_plugin import errors
from mixtape_plugin.errors import UserError


class Attack:
    """Becomes, in a pickle, a call of a shell command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def attack(tmp_path):
    """A checkpoint that would make the file `ran` if it were unpickled."""
    path = tmp_path / "attack.pt"
    torch.save({"model": {}, "extra_state": Attack(f"touch {tmp_path}/ran")}, path)
    return path


@pytest.fixture
def save_dir(tmp_path):
    """The folder for checkpoints, in which no test of this file may leave anything."""
    folder = tmp_path / "checkpoints"
    yield folder
    assert not folder.exists() or os.listdir(folder) == []


def build(data, *more):
    """fairseq-train up to the model and the criterion, without the seconds that hydra takes."""
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, train_args(data, "none", *more))))
    task = tasks.setup_task(args)
    return task.build_model(args), task.build_criterion(args)


def error_of(command, *args):
    """The sentence printed where a command fails."""
    with pytest.raises(Exception) as failure:
        run(command, *args)
    return errors.sentence_for_user(failure.value)


# -------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_amp_beside_half_precision(data, save_dir, half):
    """fairseq trains a bfloat16 model without float32 weights, each update rounded."""
    sentence = error_of("train", *train_args(data, save_dir, "--cpu", "--amp", f"--{half}", "--max-update", 1))
    assert sentence == f"--amp and --{half} exclude each other: --amp keeps float32 weights by itself"


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("--num-components 1", "--num-components 1 .*--output-layer mixtape: at least 2"),
        ("--output-layer mos --num-components 0", "--num-components 0 is not allowed: at least 1"),
        ("--output-layer moc --num-components -3", "--num-components -3 is not allowed: at least 1"),
        ("--frequent-ratio 0", "--frequent-ratio 0.0 is not allowed: more than 0 and at most 1"),
        ("--frequent-ratio 1.5", "--frequent-ratio 1.5 is not allowed: more than 0 and at most 1"),
        ("--frequent-ratio 1e-3", "--frequent-ratio 0.001 of 40 tokens .* the first 0, none .*: at least 0.025"),
        ("--gate-dropout 1.0", "--gate-dropout 1.0 is not allowed: from 0 to less than 1"),
        ("--gate-noise -0.1", "--gate-noise -0.1 is not allowed: 0 or more"),
        ("--gate-noise nan", "--gate-noise nan is not allowed: 0 or more, and finite"),
        ("--gate-noise inf", "--gate-noise inf is not allowed: 0 or more, and finite"),
        ("--gate-noise 1e39", r"--gate-noise 1e\+39 is not allowed: 0 or more, and finite in float32"),
        ("--frequent-ratio nan", "--frequent-ratio nan is not allowed: more than 0 and at most 1, and finite"),
        ("--frequent-ratio=-inf", "--frequent-ratio -inf is not allowed: more than 0 and at most 1, and finite"),
        ("--context-scale nan", r"--context-scale nan is not allowed: more than 0, or 0 \(none\), and finite"),
        ("--context-scale inf", r"--context-scale inf is not allowed: more than 0, or 0 \(none\), and finite"),
        ("--context-dropout nan", "--context-dropout nan is not allowed: from 0 to less than 1, and finite"),
        ("--gate-dropout nan", "--gate-dropout nan is not allowed: from 0 to less than 1, and finite"),
        ("--label-smoothing nan", "--label-smoothing nan is not allowed: from 0 to less than 1, and finite"),
        ("--attention-dropout nan", "--attention-dropout nan is not allowed: from 0 to 1, and finite"),
        ("--dropout inf", "--dropout inf is not allowed: from 0 to 1, and finite"),
        ("--encoder-layerdrop 2", "--encoder-layerdrop 2.0 is not allowed: from 0 to 1"),
        ("--decoder-layerdrop nan", "--decoder-layerdrop nan is not allowed: from 0 to 1, and finite"),
        ("--quant-noise-scalar 2", "--quant-noise-scalar 2.0 is not allowed: from 0 to 1"),
        ("--quant-noise-pq nan", "--quant-noise-pq nan is not allowed: from 0 to 1, and finite"),
        (
            "--encoder-attention-heads 3",
            "--encoder-attention-heads 3 is not allowed: .* --encoder-embed-dim 16",
        ),
        ("--decoder-attention-heads 0", "--decoder-attention-heads 0 is not allowed: at least 1"),
        ("--encoder-embed-dim 0", "--encoder-embed-dim 0 is not allowed: at least 1"),
        ("--decoder-layers -1", "--decoder-layers -1 is not allowed: at least 0"),
        ("--gate-dim 0", "--gate-dim 0 is not allowed: at least 1"),
        ("--context-dropout -0.5", "--context-dropout -0.5 is not allowed: from 0 to less than 1"),
        ("--output-embed-dim 0", "--output-embed-dim 0 is not allowed: at least 1"),
        (
            "--share-decoder-input-output-embed --output-embed-dim 8",
            "--output-embed-dim 8 does not fit the tied embedding: it must be its width, 16,",
        ),
        ("--output-layer softmax --output-embed-dim 8", "--output-layer softmax .* is 8 and must be .* features, 16"),
        (
            "--output-layer softmax --share-decoder-input-output-embed --decoder-output-dim 8",
            "--output-layer softmax .* is 16 and must be .* features, 8",
        ),
        ("--adaptive-softmax-cutoff 10,20", "--adaptive-softmax-cutoff .*10.*20.* does not go with --output-layer"),
        ("--base-layers 1", "--base-layers 1 is not allowed"),
        ("--merge-src-tgt-embed", "--merge-src-tgt-embed is not allowed"),
        ("--max-relative-position -1", r"--max-relative-position -1 is not allowed: 0 \(off\) or more"),
        ("--label-smoothing 1", "--label-smoothing 1.0 is not allowed: from 0 to less than 1"),
    ],
)
def test_option_with_a_value_that_is_not_allowed(given, sentence, data):
    with pytest.raises(UserError, match=sentence) as failure:
        build(data, *given.split())
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "given",
    [
        "--num-components 2 --frequent-ratio 1",
        "--frequent-ratio 0.025 --gate-dropout 0.99 --gate-noise 0",
        "--output-layer mos --num-components 1",
        "--output-layer moc --output-embed-dim 1",
        "--share-decoder-input-output-embed --output-embed-dim 16 --decoder-output-dim 8",
        "--output-layer softmax --num-components 1 --share-decoder-input-output-embed",
    ],
)
def test_values_at_the_edge_of_what_is_allowed(given, data):
    build(data, *given.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, sentence",
    [
        ("--share-all-embeddings", "--share-all-embeddings requires a joined dictionary"),
        ("--finetune-from-model nowhere.pt", "--finetune-from-model nowhere.pt does not exist"),
        ("--best-checkpoint-metric accuracy", "--best-checkpoint-metric accuracy needs --report-accuracy: add it"),
        (
            "--best-checkpoint-metric bpc",
            "--best-checkpoint-metric bpc does not go with --criterion output_layer_cross_entropy, which reports none: "
            "use ppl, or awd_lstm_cross_entropy with --report-bpc",
        ),
        ("--best-checkpoint-metric bleu", "--best-checkpoint-metric bleu needs --eval-bleu: add it"),
        (
            "--best-checkpoint-metric acuracy",
            "--best-checkpoint-metric acuracy is none of loss, nll_loss, ppl, accuracy, bleu",
        ),
        ("--distributed-world-size 2", "world size is 2 but have 0 available devices"),
        (
            "--task multilingual_translation --lang-pairs x-y",
            "MultilingualTranslationTask requires a FairseqMultiModel architecture",
        ),
        pytest.param(
            "--fp16",
            "--fp16 makes all gradients one tensor on a GPU, and there is none: add --fp16-no-flatten-grads",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_options_that_do_not_go_together(given, sentence, data, save_dir):
    assert error_of("train", *train_args(data, save_dir, *given.split())) == sentence


@pytest.mark.parametrize("arch", ["mixtape_transformer_lm", "awd_lstm_lm"])
def test_a_language_model_does_not_translate(arch, data, save_dir):
    assert error_of("train", data, "--user-dir", USER_DIR, "--arch", arch, "--max-tokens", 512, "--cpu") == (
        f"--arch {arch} is a language model, which cannot translate: take one such as mixtape_transformer, "
        "or --task language_modeling with a text of one language"
    )


def test_a_model_of_fairseqs_own(data, save_dir):
    """Before anything is trained: nothing is left in the folder for checkpoints."""
    args = train_args(data, save_dir, "--arch", "transformer_tiny")
    place = args.index("--gate-dim")
    assert error_of("train", *args[:place], *args[place + 2 :]) == (
        "--criterion output_layer_cross_entropy needs a model of this plugin, such as mixtape_transformer, not "
        "TransformerModel: use label_smoothed_cross_entropy with it"
    )


@pytest.mark.slow
def test_a_validation_text_with_sentences_too_long(data, save_dir):
    sentence = error_of("train", *train_args(data, save_dir, "--max-target-positions", 6))
    assert re.match(r"Size of sample #\d+ is invalid \(=.*\) since max_positions=.*, skip this example with", sentence)


def test_validation_without_a_task(data):
    sentence = error_of("validate", data, "--path", "none.pt", "--user-dir", USER_DIR, "--cpu", "--max-tokens", 512)
    assert sentence == "fairseq-validate needs --task: that of the training, such as translation"


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["output_layer_cross_entropy", "label_smoothed_cross_entropy"])
def test_a_translation_training_that_diverges(criterion, data, tmp_path):
    more = ["--lr", 1e30, "--max-update", 20, "--criterion", criterion]
    sentence = error_of("train", *train_args(data, tmp_path, *more))
    assert re.fullmatch(r"gradients are Nan/Inf at update \d+: lower --lr; checkpoints that .*", sentence)


# --------------------------------------------------------------------------------------------- dictionaries

SHARED = ["--output-layer", "mixtape"]


def with_counts(data, folder, counts):
    """A copy of the data whose target dictionary has these counts: a function of the word's number, 0 first."""
    shutil.copytree(data, folder)
    words = [line.split()[0] for line in (data / "dict.y.txt").read_text().splitlines()]
    (folder / "dict.y.txt").write_text("".join(f"{word} {counts(n)}\n" for n, word in enumerate(words)))
    return folder


@pytest.mark.parametrize(
    "counts, problem",
    [
        (lambda n: n + 1, "is not ordered by frequency"),
        (lambda n: 5 if n == 10 else 30 - n // 2, "is not ordered by frequency"),  # among the 20 first ids
        (lambda n: 50 if n == 30 else 40 - n, "is not ordered by frequency"),  # after them
        (lambda n: 1, r"gives every token the same count \(1\)"),
        # fairseq-preprocess fills a dictionary up to a multiple of 8 with words that never occur
        (lambda n: 1 if n < 30 else 0, r"gives every token the same count \(1\)"),
    ],
    ids=["ascending", "one out of place", "a frequent one among the rare", "all equal", "all equal before padding"],
)
def test_gate_sharing_refuses_a_dictionary_without_frequencies(counts, problem, data, tmp_path):
    folder = with_counts(data, tmp_path / "data", counts)
    with pytest.raises(UserError, match=f"^--frequent-ratio 0.5 .* {problem}: .* or use --frequent-ratio 1$"):
        build(folder, *SHARED)
    build(folder, *SHARED, "--frequent-ratio", 1)
    for output_layer in set(LAYERS) - {"mixtape"}:
        build(folder, "--output-layer", output_layer)


def test_gate_sharing_takes_ties_and_padding(data, tmp_path):
    build(data, *SHARED)
    assert Dictionary.load(str(data / "dict.y.txt")).count[-1] == 0
    build(with_counts(data, tmp_path / "data", lambda n: 9 - n // 8), *SHARED)


# ---------------------------------------------------------------------------------------------------- files


def test_missing_folder_and_dictionary(data, tmp_path):
    with pytest.raises(UserError, match=f"^data folder {tmp_path}/nowhere does not exist: give the one that"):
        build(tmp_path / "nowhere")
    folder = shutil.copytree(data, tmp_path / "data")
    (folder / "dict.y.txt").unlink()
    with pytest.raises(UserError, match=f"^dictionary {folder}/dict.y.txt does not exist"):
        build(folder)


@pytest.mark.slow
def test_missing_and_truncated_data(data, tmp_path, save_dir):
    folder = shutil.copytree(data, tmp_path / "data")
    cut = folder / "train.x-y.y.bin"
    cut.write_bytes(cut.read_bytes()[:-1])
    assert re.match(f"{cut} has .* bytes where .* promises", error_of("train", *train_args(folder, save_dir)))
    for path in folder.glob("train.*"):
        path.unlink()
    assert error_of("train", *train_args(folder, save_dir)).startswith("Dataset not found: train")


@pytest.mark.slow
@pytest.mark.parametrize("missing", [["train.x-y.y.bin"], ["train.x-y.y.bin", "train.x-y.y.idx"]])
def test_missing_target_side(missing, data, tmp_path, save_dir):
    """fairseq takes it for data without a target, and finds out in the first update."""
    folder = shutil.copytree(data, tmp_path / "data")
    for name in missing:
        (folder / name).unlink()
    assert "train.x-y.y" in str(error_of("train", *train_args(folder, save_dir)))


@pytest.mark.slow
def test_checkpoint_of_another_layer(data, trained, save_dir):
    checkpoint = trained("softmax").checkpoint
    args = train_args(data, save_dir, "--share-decoder-input-output-embed", "--restore-file", checkpoint)
    sentence = error_of("train", *args)
    assert sentence.startswith("the checkpoint's output layer does not fit --output-layer mixtape: ")
    assert "gate_embedding [20, 8]" in sentence and "\n" not in sentence


@pytest.mark.slow
def test_cut_foreign_and_missing_checkpoint(data, trained, attack, tmp_path, save_dir):
    cut = tmp_path / "cut.pt"
    cut.write_bytes(trained("softmax").checkpoint.read_bytes()[:-1000])
    sentence = error_of("train", *train_args(data, save_dir, "--restore-file", cut))
    assert sentence == f"{cut} is damaged or is no checkpoint: it cannot be read"
    sentence = error_of("train", *train_args(data, save_dir, "--restore-file", attack))
    assert re.match(f"checkpoint {attack} is not loaded: it holds a pickled .*system, which is not on the", sentence)
    assert not (tmp_path / "ran").exists()
    assert error_of("generate", *generate_args(data, tmp_path / "no.pt")) == f"Model file not found: {tmp_path}/no.pt"


# ----------------------------------------------------------------------------------- the commands themselves


def test_unknown_output_layer(data, capsys):
    """argparse's own sentence, after the usage."""
    with pytest.raises(SystemExit) as end:
        build(data, "--output-layer", "sparsemax")
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: argument --output-layer: invalid choice: 'sparsemax'" in last
    assert all(output_layer in last for output_layer in LAYERS)


@pytest.mark.slow
def test_commands_print_one_sentence_and_fail(data, attack, tmp_path, save_dir):
    train = start(console_script("train"), *train_args(data, save_dir, "--num-components", 1))
    generate = start(console_script("generate"), *generate_args(data, attack))
    expected = {
        train: "error: --num-components 1 is too few for --output-layer mixtape: at least 2",
        generate: f"error: checkpoint {attack} is not loaded: it holds a pickled ",
    }
    for process, sentence in expected.items():
        _, stderr = process.communicate()
        assert process.returncode == 1
        assert stderr.splitlines()[-1].startswith(sentence)
        assert stderr.count("error: ") == 1 and "Traceback" not in stderr
    assert not (tmp_path / "ran").exists()
