"""Language models: options, texts and dictionaries that do not fit are refused in a sentence."""

import math
import shutil

import pytest
import torch
from conftest import USER_DIR, make_dictionary, run
from fairseq import options, tasks
from fairseq.data import indexed_dataset
from recipes import files
from toy_text import evaluate, lm_args, toy_text, trained_on_toy_text  # noqa: F401

from mixtape_plugin.errors import UserError, sentence_for_user
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingConfig, BpttLanguageModelingTask


@pytest.mark.parametrize(
    "override, sentence",
    [
        ({"dropout": "x"}, "--dropout 'x' is not allowed: a number"),
        ({"embed_dim": 2.5}, "--embed-dim 2.5 is not allowed: a whole number"),
        ({"untie_embeddings": None}, "--untie-embeddings None is not allowed: True or False"),
    ],
)
def test_values_of_another_type_are_refused(override, sentence, text, tmp_path):
    """As --model-overrides or a yaml file may have them."""
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, lm_args(text, tmp_path))))
    vars(args).update(override)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        tasks.setup_task(args).build_model(args)


@pytest.mark.parametrize(
    "option, value, allowed",
    [
        ("--tokens-per-sample", 0, "at least 1"),
        ("--segment-length-std", -1.0, "0 or more"),
        ("--segment-length-std", math.inf, "0 or more, and finite"),
        ("--short-segment-probability", 1.5, "from 0 to 1"),
        ("--min-segment-length", 0, "at least 1"),
        ("--max-segment-length", 0, "at least 1, or left out"),
        ("--max-segment-length", 4, "--min-segment-length 5 or more"),
        ("--small-batch-size", 0, "at least 1, or left out"),
        ("--embed-dim", 0, "at least 1"),
        ("--hidden-sizes", "12,x", "whole numbers"),
        ("--hidden-sizes", "12,²", "whole numbers"),
        ("--weight-dropout", 1.0, "from 0 to less than 1"),
        ("--input-dropout", math.nan, "from 0 to less than 1, and finite"),
    ],
)
def test_options_of_task_and_model_are_checked(option, value, allowed, text, tmp_path):
    """Which fairseq-train builds first."""
    args = list(map(str, lm_args(text, tmp_path, f"{option}={value}")))
    args = options.parse_args_and_arch(options.get_training_parser(), args)
    with pytest.raises(UserError, match=f"{option} {value} is not allowed: {allowed}"):
        tasks.setup_task(args).build_model(args)


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_sample": 1},
        {"segment_length_std": 0.0, "short_segment_probability": 0.0},
        {"short_segment_probability": 1.0},
        {"min_segment_length": 1, "max_segment_length": 1},
        {"small_batch_size": 1},
    ],
)
def test_options_at_their_limits_are_taken(options):
    BpttLanguageModelingTask(BpttLanguageModelingConfig(**options), make_dictionary())


@pytest.mark.parametrize(
    "option, value, allowed",
    [
        ("--ar-alpha", -1.0, "0 or more"),
        ("--ar-alpha", math.inf, "0 or more, and finite"),
        ("--tar-beta", math.nan, "0 or more, and finite"),
        ("--weight-decay", math.inf, "0 or more, and finite"),
        ("--nonmono", 0, "at least 1"),
        ("--averaging-epoch", -1, "0 or more"),
    ],
)
def test_options_of_criterion_and_optimizer_are_checked(option, value, allowed, text, tmp_path):
    with pytest.raises(UserError, match=f"{option} {value} is not allowed: {allowed}"):
        run("train", *lm_args(text, tmp_path, f"{option}={value}"))


def test_text_shorter_than_its_columns(text, trained, tmp_path):
    with pytest.raises(UserError, match="the test2 text has 3 tokens, too few for 4 columns"):
        evaluate(text, trained[0], "--gen-subset", "test2", "--batch-size", 4)
    with pytest.raises(UserError, match="the train text has 1800 tokens, too few for 2000 columns"):
        run("train", *lm_args(text, tmp_path, "--batch-size", 2000))


def test_empty_text(text, tmp_path):
    (tmp_path / "train").write_text("")
    run(
        "preprocess",
        "--only-source",
        "--trainpref",
        tmp_path / "train",
        "--destdir",
        tmp_path,
        "--srcdict",
        text / "dict.txt",
    )
    with pytest.raises(UserError, match="train.bin holds no (line|sentence)"):
        run("train", *lm_args(tmp_path, tmp_path / "save", "--disable-validation"))


@pytest.mark.parametrize(
    "symbol, more, way_out",
    [
        ("<pad>", [], "mend the text or its dictionary$"),
        ("madeupword0000", [], "mend the text or its dictionary$"),
        ("<unk>", ["--remove-eos"], "mend the text or its dictionary, or leave out --remove-eos$"),
    ],
)
def test_a_text_with_a_symbol_that_cannot_be_predicted_is_refused(symbol, more, way_out, tmp_path):
    """Its targets would be counted as less or more than they are."""
    dictionary = make_dictionary(25)
    dictionary.finalize(padding_factor=8)  # 32 entries, some of them madeupword…
    dictionary.save(str(tmp_path / "dict.txt"))
    builder = indexed_dataset.make_builder(str(tmp_path / "valid.bin"), "mmap", vocab_size=len(dictionary))
    builder.add_item(torch.tensor([5, dictionary.index(symbol), 6, dictionary.eos()]))
    builder.finalize(str(tmp_path / "valid.idx"))
    args = list(map(str, lm_args(tmp_path, tmp_path, *more)))
    task = tasks.setup_task(options.parse_args_and_arch(options.get_training_parser(), args))
    with pytest.raises(UserError, match=f"valid holds 1 {symbol}, which the model cannot predict: {way_out}"):
        task.load_dataset("valid")


def test_no_batch_size(text, tmp_path):
    args = [arg for arg in lm_args(text, tmp_path) if arg not in ("--batch-size", "4")]
    with pytest.raises(UserError, match="needs --batch-size"):
        run("train", *args, "--max-tokens", 100)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["other order", "other words", "fewer words"])
def test_dictionary_that_does_not_match_the_checkpoint(change, text, trained, tmp_path):
    """In evaluation, and where a training resumes or begins from the checkpoint."""
    symbols = (text / "dict.txt").read_text().splitlines()
    changed = {
        "other order": symbols[1::-1] + symbols[2:],
        "other words": [line.replace("w", "v") for line in symbols],
        "fewer words": symbols[:-1],
    }[change]
    (tmp_path / "dict.txt").write_text("\n".join(changed) + "\n")
    (tmp_path / "text").write_text("w1 v1 w2\n" * 50)
    prefixes = [f"--trainpref={tmp_path}/text", f"--validpref={tmp_path}/text", "--srcdict", tmp_path / "dict.txt"]
    run("preprocess", "--only-source", *prefixes, "--destdir", tmp_path / "bin")
    save, path = tmp_path / "save", trained[0]
    save.mkdir()
    shutil.copy(path, save / "checkpoint_last.pt")
    before = files(save)
    message = "is not the one that the checkpoint was trained with"
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "bin", path, "--gen-subset", "valid")
    for folder, *flags in (
        [save],
        [tmp_path / "other", "--restore-file", path],
        [tmp_path / "finetuned", "--finetune-from-model", path],
    ):
        args = lm_args(tmp_path / "bin", folder, "--optimizer", "adam", "--max-epoch", 9, "--frequent-ratio", 1, *flags)
        with pytest.raises(Exception) as error:
            run("train", *args)
        assert message in sentence_for_user(error.value)
    assert files(save) == before and list(tmp_path.glob("*/*.pt")) == [save / "checkpoint_last.pt"]


@pytest.mark.slow
def test_a_checkpoint_without_its_vocabulary_is_taken(text, trained, tmp_path):
    state = torch.load(trained[0], weights_only=True)
    del state["model"]["decoder.vocabulary_version"]
    torch.save(state, tmp_path / "old.pt")
    flags = ["--gen-subset", "test"]
    assert evaluate(text, tmp_path / "old.pt", *flags) == evaluate(text, trained[0], *flags)


def test_nt_asgd_that_would_be_sgd_to_its_end_is_refused(text, tmp_path):
    with pytest.raises(UserError, match="needs --task bptt_language_modeling, not LanguageModelingTask"):
        run("train", *lm_args(text, tmp_path, "--task", "language_modeling", "--tokens-per-sample", 20))
    with pytest.raises(UserError, match="which --disable-validation leaves out: give --averaging-epoch"):
        run("train", *lm_args(text, tmp_path, "--disable-validation"))
    with pytest.raises(UserError, match="does not go with --use-bmuf"):
        run("train", *lm_args(text, tmp_path, "--use-bmuf"))


@pytest.mark.parametrize("flag", ["--memory-efficient-bf16", "--memory-efficient-fp16"])
def test_an_optimizer_that_needs_float32_weights_is_refused(text, tmp_path, flag):
    with pytest.raises(UserError, match="do not go with --optimizer nt_asgd, .*: use --bf16 or --fp16"):
        run("train", *lm_args(text, tmp_path, flag))


def test_no_columns(text, tmp_path):
    with pytest.raises(UserError, match="needs --batch-size"):
        run("train", *lm_args(text, tmp_path, "--batch-size", 0))


def test_checkpoints_chosen_by_a_number_that_is_not_reported(text, tmp_path):
    with pytest.raises(UserError, match="^--best-checkpoint-metric bpc needs --report-bpc: add it$"):
        run("train", *lm_args(text, tmp_path, "--best-checkpoint-metric", "bpc"))


def test_a_text_has_no_sentences_whose_prefix_could_be_ignored(text, tmp_path):
    more = ["--criterion", "output_layer_cross_entropy", "--ignore-prefix-size", 5]
    with pytest.raises(UserError, match="^--ignore-prefix-size 5 does not go with --task bptt_language_modeling"):
        run("train", *lm_args(text, tmp_path, *more))


def test_a_model_without_a_hidden_state_is_refused(text, tmp_path):
    more = "--task bptt_language_modeling --arch lstm_lm --decoder-layers 1 --batch-size 4 --cpu".split()
    with pytest.raises(UserError, match="needs a model that keeps its hidden state, .* not LSTMLanguageModel"):
        run("train", text, "--save-dir", tmp_path, "--user-dir", USER_DIR, *more)


@pytest.mark.parametrize("task", ["bptt_language_modeling", "language_modeling"])
def test_a_model_that_translates_is_refused(task, text, tmp_path):
    more = f"--task {task} --arch mixtape_transformer_tiny --batch-size 4 --cpu".split()
    with pytest.raises(UserError, match="^--arch mixtape_transformer_tiny is no language model: .* awd_lstm_lm"):
        run("train", text, "--save-dir", tmp_path, "--user-dir", USER_DIR, *more)


def test_a_number_that_is_not_reported(text, tmp_path):
    with pytest.raises(UserError, match="^--best-checkpoint-metric bleu is none of loss, .*, ppl, accuracy, bpc$"):
        run("train", *lm_args(text, tmp_path, "--best-checkpoint-metric", "bleu"))


def test_an_epoch_without_its_end_is_refused(text, tmp_path):
    with pytest.raises(UserError, match="^--skip-remainder-batch is not allowed"):
        run("train", *lm_args(text, tmp_path, "--skip-remainder-batch", "--update-freq", 4))


@pytest.mark.parametrize("smoothing", [[], ["--label-smoothing", 0.1]])
def test_stock_label_smoothing_is_refused(smoothing, text, tmp_path):
    more = ["--criterion", "label_smoothed_cross_entropy", *smoothing]
    args = [arg for arg in lm_args(text, tmp_path, *more)]
    with pytest.raises(UserError, match="gives mass to symbols that cannot be predicted"):
        run("train", *args)


def test_the_task_of_a_language_model_is_asked_for(text, tmp_path):
    args = lm_args(text, tmp_path)
    for option in "--task", "--tokens-per-sample":
        del args[args.index(option) : args.index(option) + 2]
    with pytest.raises(UserError, match=f"{text} holds the text of a language model, .* give --task bptt_language_mod"):
        run("train", *args)


def test_the_data_of_a_translation_are_refused(data, tmp_path):
    """Also where its dictionary is there under the name that a language model's has."""
    folder = shutil.copytree(data, tmp_path / "data")
    shutil.copy(data / "dict.y.txt", folder / "dict.txt")
    with pytest.raises(UserError, match=f"{folder} holds a language pair: run fairseq-preprocess --only-source"):
        run("train", *lm_args(folder, tmp_path / "save"))


def test_dataset_that_is_missing(text, trained):
    with pytest.raises(FileNotFoundError, match="Dataset not found: test9"):
        evaluate(text, trained[0], "--gen-subset", "test9")
