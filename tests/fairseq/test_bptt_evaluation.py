"""A trained language model through fairseq's commands: every token counted once, by every way to evaluate."""

import math
import shutil

import pytest
import torch
from conftest import USER_DIR, run
from fairseq.sequence_scorer import SequenceScorer
from toy_text import VALID_TOKENS, evaluate, lm_args, open_lines, toy_text, trained_on_toy_text  # noqa: F401

from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.language_model import load_language_model, perplexity
from mixtape_plugin.evaluation.language_model import text as task_text
from mixtape_plugin.models.awd_lstm_lm import AWDLSTMLanguageModel


@pytest.mark.slow
def test_every_evaluation_agrees(text, trained):
    """Whatever the segment length, through validation, fairseq-eval-lm, fairseq-validate and our own loop."""
    path, log = trained
    valid = log["valid"][-1]
    assert valid["valid_loss"] == valid["valid_nll_loss"]
    for length in 1, 7, 35, 70:
        flags = ["--gen-subset", "valid", "--batch-size", 3, "--tokens-per-sample", length]
        loss, tokens = evaluate(text, path, *flags)
        assert tokens == VALID_TOKENS
        assert loss == pytest.approx(float(valid["valid_loss"]), abs=6e-4)  # both are rounded
        model, task = load_language_model(str(path), str(text))
        assert math.log2(perplexity(model, task, "valid", columns=3, length=length).perplexity) == pytest.approx(
            loss, abs=1e-4
        )
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu"]
    args += "--valid-subset valid --batch-size 3 --num-workers 0 --log-format json".split()
    line = run("validate", *args).log["valid"][-1]
    assert float(line["valid_loss"]) == pytest.approx(float(valid["valid_loss"]), abs=6e-4)


@pytest.mark.slow
def test_from_python(text, trained):
    """from_pretrained: scores are log-probabilities of a line that follows </s>, in nats, and a sample goes on."""
    path, _ = trained
    model = AWDLSTMLanguageModel.from_pretrained(str(path.parent), path.name, str(text))
    words = model.task.source_dictionary.symbols[4:10]
    (language_model,), tokens = model.models, model.encode(" ".join(words))[:-1]
    previous = torch.cat([torch.tensor([model.task.source_dictionary.eos()]), tokens[:-1]])
    log_probs = language_model(previous.unsqueeze(0))[0].squeeze(0).double().log_softmax(-1)
    expected = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    scores = model.score(" ".join(words))["positional_scores"]
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)
    assert model.sample(" ".join(words[:2]), beam=2, max_len_b=6).split()[:2] == words[:2]


@pytest.mark.slow
def test_test_set_one_column_by_default(text, trained):
    path, _ = trained
    assert evaluate(text, path, "--gen-subset", "test") == evaluate(
        text, path, "--gen-subset", "test", "--batch-size", 1
    )
    assert evaluate(text, path, "--gen-subset", "test")[1] == 30 * 9


@pytest.mark.slow
def test_blank_lines_and_unknown_words_count(text, trained):
    path, _ = trained
    assert evaluate(text, path, "--gen-subset", "test1")[1] == 5  # two blank lines, two words, a </s>
    assert evaluate(text, path, "--gen-subset", "test3")[1] == 6
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu"]
    assert "6 tokens, 2 of them <unk>" in run("eval_lm", *args, "--gen-subset", "test3").stdout


@pytest.mark.slow
def test_statistics_are_of_all_the_training_text(text, trained, tmp_path):
    """A text in parts, train and train1, is one to fairseq-train, and to dynamic evaluation after it."""
    data = tmp_path / "parts"
    shutil.copytree(text, data)
    for end in "bin", "idx":
        shutil.copy(data / f"valid.{end}", data / f"train1.{end}")
    _, task = load_language_model(str(trained[0]), str(data))
    assert len(task_text(task, "train")) == 1800 + VALID_TOKENS
    assert len(task_text(task, "valid")) == VALID_TOKENS


@pytest.mark.slow
def test_a_window_of_context_is_refused(text, trained):
    for window in 20, 400:  # less than a segment, and more
        with pytest.raises(UserError, match="--context-window"):
            evaluate(text, trained[0], "--context-window", window)


@pytest.mark.slow
def test_the_training_text_is_evaluated_whole(text, trained):
    """7 columns leave a remainder, which only training drops."""
    assert evaluate(text, trained[0], "--gen-subset", "train", "--batch-size", 7)[1] == 1800
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", trained[0], "--cpu"]
    args += "--valid-subset train --batch-size 7 --num-workers 0 --log-format json".split()
    assert float(run("validate", *args).log["train"][-1]["train_wpb"]) == 1800


@pytest.mark.slow
def test_continues_a_prompt(text, trained, monkeypatch):
    path, _ = trained
    monkeypatch.setattr("fairseq_cli.interactive.fileinput.input", lambda **_: open_lines(["w3 w4 w5"]))
    args = [text, "--user-dir", USER_DIR, "--task", "bptt_language_modeling", "--path", path, "--cpu", "--beam", 2]
    stdout = run("interactive", *args).stdout
    (best,) = (line.split("\t")[2] for line in stdout.splitlines() if line.startswith("H-"))
    assert best.startswith("w3 w4 w5 w")
    # each token's score is what the model gives it after all those before it, log base 2
    (scores,) = (line.split("\t")[1].split() for line in stdout.splitlines() if line.startswith("P-"))
    model, task = load_language_model(str(path), str(text))
    tokens = task.dictionary.encode_line(best, add_if_not_exist=False).long()
    with torch.no_grad():
        features, _ = model(tokens.roll(1).unsqueeze(0), features_only=True)
        log_probs = model.decoder.output_projection.log_probs(features)[0]
    expected = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1) / math.log(2)
    torch.testing.assert_close(torch.tensor([float(score) for score in scores]), expected, atol=2e-4, rtol=0)
    for masked in "madeupword", "<s>", "<pad>":
        assert masked not in best


@pytest.mark.slow
def test_characters_without_lines(tmp_path, monkeypatch):
    """27 symbols, </s> and <unk> masked: bits per character of a uniform model are log2 27."""
    letters = "abcdefghijklmnopqrstuvwxyz_"
    for split, repeats in ("train", 40), ("valid", 10):
        lines = [" ".join(letters)] * repeats
        (tmp_path / split).write_text("\n".join(lines) + "\n")
    prefixes = [f"--{split}pref={tmp_path}/{split}" for split in ("train", "valid")]
    run("preprocess", "--only-source", "--padding-factor", 1, "--destdir", tmp_path / "bin", *prefixes)
    more = ["--remove-eos", "--report-bpc", "--lr", 1e-9, "--max-epoch", 1, "--frequent-ratio", 1]
    log = run("train", *lm_args(tmp_path / "bin", tmp_path / "save", *more, "--output-layer", "mos")).log
    assert float(log["valid"][-1]["valid_bpc"]) == pytest.approx(math.log2(27), abs=0.02)
    path = tmp_path / "save" / "checkpoint_last.pt"
    assert evaluate(tmp_path / "bin", path, "--gen-subset", "valid", "--remove-eos")[1] == 270
    with pytest.raises(UserError, match="the checkpoint was trained with --remove-eos: do the same here"):
        evaluate(tmp_path / "bin", path, "--gen-subset", "valid")
    monkeypatch.setattr("fairseq_cli.interactive.fileinput.input", lambda **_: open_lines(["a b c"]))
    args = "--task bptt_language_modeling --remove-eos --cpu --path".split()
    with pytest.raises(UserError, match="predicts no </s>, .*: it cannot continue a prompt"):
        run("interactive", tmp_path / "bin", "--user-dir", USER_DIR, *args, path)
    model, task = load_language_model(str(path), str(tmp_path / "bin"))  # to be scored a text needs no </s>
    tokens = torch.tensor([[4, 5, 6]])
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([3])}, "target": tokens}
    ((scored,),) = task.inference_step(SequenceScorer(task.dictionary), [model], sample)
    assert scored["positional_scores"].tolist() == pytest.approx([-math.log(27)] * 3, abs=0.1)


@pytest.mark.slow
def test_a_model_of_another_task_is_refused(text, tmp_path):
    args = [text, "--user-dir", USER_DIR, "--task", "language_modeling", "--arch", "awd_lstm_lm", "--cpu"]
    args += "--embed-dim 4 --hidden-sizes 4 --criterion output_layer_cross_entropy --optimizer sgd --lr 0.1".split()
    args += ["--max-tokens", 200, "--tokens-per-sample", 20, "--max-update", 1, "--disable-validation"]
    run("train", *args, "--num-workers", 0, "--save-dir", tmp_path)
    with pytest.raises(UserError, match="checkpoint_last.pt was not trained with --task bptt_language_modeling"):
        load_language_model(str(tmp_path / "checkpoint_last.pt"), str(text))
