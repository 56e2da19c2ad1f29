"""From a corpus to scored translations through fairseq's own commands, with each output layer."""

import re
import shutil

import pytest
import sacrebleu
import torch
from conftest import LAYERS, SENTENCES, USER_DIR, generate_args, hypotheses, load_parameters, run, train_args
from fairseq import checkpoint_utils
from recipes import load_script
from toy_text import NO_DROPOUT, lm_args

from mixtape_plugin.errors import UserError
from mixtape_plugin.models.transformer import MixtapeTransformerModel

pytestmark = pytest.mark.slow


def printed_bleu(stdout):
    return float(re.search(r"BLEU4 = ([\d.]+)", stdout)[1])


def printed_lines(stdout, letter):
    """Sentence number -> what follows it in the lines S-, H-, P- …"""
    lines = [line.split("\t") for line in stdout.splitlines() if re.match(rf"{letter}-\d+\t", line)]
    return {int(line[0][2:]): line[-1] for line in lines}


def assert_token_scores(stdout, models, task, count, language_model=None, weight=0.0):
    """Printed scores of the tokens are log2 of the models' mean probability, each hypothesis scored as a whole, and
    `weight` times that of a language model's."""
    sources, outputs, printed_scores = (printed_lines(stdout, letter) for letter in "SHP")
    eos = task.target_dictionary.eos()
    for number in sorted(outputs)[:count]:
        source = task.source_dictionary.encode_line(sources[number], add_if_not_exist=False).long()[None]
        target = task.target_dictionary.encode_line(outputs[number], add_if_not_exist=False).long()[None]
        previous = torch.cat([torch.tensor([[eos]]), target[:, :-1]], dim=1)
        length = torch.tensor([source.size(1)])
        with torch.no_grad():
            probs = sum(model(source, length, previous)[0].double().softmax(-1) for model in models) / len(models)
            scores = probs.log2()
            if language_model is not None:
                scores = scores + weight * language_model(previous)[0].double().softmax(-1).log2()
        expected = scores.gather(-1, target.unsqueeze(-1)).flatten()
        printed = torch.tensor([float(score) for score in printed_scores[number].split()], dtype=torch.float64)
        torch.testing.assert_close(printed, expected, rtol=0, atol=2e-4)  # four digits are printed


@pytest.mark.parametrize("output_layer", LAYERS)
def test_train_generate_interactive_validate_score(output_layer, trained, data, corpus, tmp_path):
    training = trained(output_layer)
    losses = [float(line["nll_loss"]) for line in training.log["train_inner"]]
    assert len(losses) == 80 and losses[-1] < losses[0] - 2  # bits; the alphabet can be learned
    (validated,) = (line for line in training.log["valid"] if line["valid_num_updates"] == "80")
    assert float(validated["valid_ppl"]) < 2

    stdout = run("generate", *generate_args(data, training.checkpoint)).stdout
    found = hypotheses(stdout)
    assert sorted(found) == list(range(SENTENCES["test"]))
    assert printed_lines(stdout, "S") == dict(enumerate((corpus / "test.x").read_text().splitlines()))

    typed = tmp_path / "typed.x"
    typed.write_text("".join((corpus / "test.x").open().readlines()[:20]))
    args = generate_args(data, training.checkpoint, "--input", typed, "--buffer-size", 20)
    assert hypotheses(run("interactive", *args).stdout) == {number: found[number] for number in range(20)}

    # Without --task, fairseq-validate ends in a KeyError of its own.
    args = [data, "--task", "translation", "--path", training.checkpoint, "--user-dir", USER_DIR, "--cpu"]
    (again,) = run("validate", *args, *"--num-workers 0 --max-tokens 512 --log-format json".split()).log["valid"]
    for name in ("valid_loss", "valid_nll_loss", "valid_ppl", "valid_accuracy", "valid_total"):
        assert again[name] == validated[name]
    assert int(again["valid_total"]) == len((corpus / "valid.y").read_text().split()) + SENTENCES["valid"]

    translations = [found[number] for number in range(SENTENCES["test"])]
    (tmp_path / "sys").write_text("\n".join(translations) + "\n")
    bleu = printed_bleu(run("score", "--sys", tmp_path / "sys", "--ref", corpus / "test.y").stdout)
    references = (corpus / "test.y").read_text().splitlines()
    independent = sacrebleu.corpus_bleu(translations, [references], tokenize="none", smooth_method="none", force=True)
    assert bleu == pytest.approx(independent.score, abs=0.006)  # two digits are printed
    assert bleu == printed_bleu(stdout.splitlines()[-1])
    assert bleu > 50


def test_from_python(trained, data, corpus):
    """from_pretrained, and its method translate, as fairseq-generate does."""
    checkpoint = trained("mixtape").checkpoint
    model = MixtapeTransformerModel.from_pretrained(str(checkpoint.parent), checkpoint.name, str(data))
    found = hypotheses(run("generate", *generate_args(data, checkpoint)).stdout)
    sentences = (corpus / "test.x").read_text().splitlines()[:20]
    assert model.translate(sentences, beam=2, max_len_b=12) == [found[number] for number in range(20)]


def test_five_sentences_give_five_hypotheses(trained, data):
    """Fewer than --required-batch-size-multiple, 8 by default."""
    stdout = run("generate", *generate_args(data, trained("mixtape").checkpoint, "--gen-subset", "test1")).stdout
    assert sorted(hypotheses(stdout)) == list(range(SENTENCES["five"]))


def test_ensemble_of_two_output_layers(trained, data):
    paths = [str(trained(output_layer).checkpoint) for output_layer in ("softmax", "mixtape")]
    stdout = run("generate", *generate_args(data, ":".join(paths))).stdout
    assert sorted(hypotheses(stdout)) == list(range(SENTENCES["test"]))
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(paths)
    assert [model.decoder.output_projection.config.output_layer for model in models] == ["softmax", "mixtape"]
    assert_token_scores(stdout, [model.eval() for model in models], task, count=10)


def test_a_language_model_beside_it(trained, data, corpus, tmp_path):
    """--lm-path adds its log-probabilities; to subtract one that masks tokens would always give these, and
    with one that has no </s> a search finds no end."""
    with_dictionary = shutil.copytree(data, tmp_path / "data")
    shutil.copy(data / "dict.y.txt", with_dictionary / "dict.txt")
    prefixes = [f"--{split}pref={corpus}/{split}.y" for split in ("train", "valid", "test")]
    run("preprocess", "--only-source", "--srcdict", data / "dict.y.txt", "--destdir", tmp_path / "text", *prefixes)
    more = ["--output-layer", "mixtape", "--max-update", 20]
    run("train", *lm_args(tmp_path / "text", tmp_path / "lm", *NO_DROPOUT, *more))
    beside = ["--lm-path", tmp_path / "lm" / "checkpoint_last.pt", "--lm-weight"]
    args = generate_args(with_dictionary, trained("softmax").checkpoint, *beside)
    stdout = run("generate", *args, 0.5).stdout
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(trained("softmax").checkpoint)])
    (language_model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(beside[1])])
    assert_token_scores(stdout, [models[0].eval()], task, 10, language_model.eval(), 0.5)
    assert hypotheses(run("generate", *args, 0.0).stdout) == hypotheses(
        run("generate", *generate_args(with_dictionary, trained("softmax").checkpoint)).stdout
    )
    with pytest.raises(UserError, match="--lm-weight -0.5 is not allowed: 0 or more, since the language model gives"):
        run("generate", *args, -0.5)
    run("train", *lm_args(tmp_path / "text", tmp_path / "no_end", *NO_DROPOUT, *more, "--remove-eos"))
    args[args.index(beside[1])] = tmp_path / "no_end" / "checkpoint_last.pt"
    with pytest.raises(UserError, match="--lm-path is a language model of --remove-eos, which predicts no </s>"):
        run("generate", *args, 0.0)


@pytest.mark.parametrize("output_layer", ["moc", "mixtape"])
def test_dropout_of_the_layer_is_retained(output_layer, trained, data):
    """--retain-dropout: with all others off, translations differ by the layer's own, from seed to seed."""
    checkpoint = trained(output_layer).checkpoint
    own = "'dropout': 0, 'attention_dropout': 0, 'activation_dropout': 0, 'context_dropout': 0.9"
    args = generate_args(data, checkpoint, "--model-overrides", "{" + own + "}")
    plain, *retained = (
        hypotheses(run("generate", *args, *more).stdout)
        for more in ([], ["--retain-dropout", "--seed", 1], ["--retain-dropout", "--seed", 2])
    )
    assert plain == hypotheses(run("generate", *generate_args(data, checkpoint)).stdout)
    assert plain != retained[0] != retained[1] != plain


def test_average_of_checkpoints_generates(trained, data, tmp_path):
    """An average of one training's checkpoints translates as the model with the mean of their parameters."""
    training, average = trained("mixtape"), tmp_path / "average.pt"
    paths = [str(training.halfway), str(training.checkpoint)]
    load_script("average_checkpoints").main(["--inputs", *paths, "--output", str(average)])
    stdout = run("generate", *generate_args(data, average)).stdout
    assert sorted(hypotheses(stdout)) == list(range(SENTENCES["test"]))

    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(paths[:1])
    halfway, last = map(load_parameters, paths)
    assert not torch.equal(halfway["decoder.output_projection.weight"], last["decoder.output_projection.weight"])
    model.load_state_dict({name: (halfway[name] + last[name]) / 2 for name in last})
    assert_token_scores(stdout, [model.eval()], task, count=10)


@pytest.mark.parametrize("output_layer", LAYERS)
def test_checkpoint_brings_its_options(output_layer, trained):
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(trained(output_layer).checkpoint)])
    config = model.decoder.output_projection.config
    assert (config.output_layer, config.gate_dim, config.num_components) == (output_layer, 8, 4)


def test_a_checkpoint_from_before_an_option(trained, data, tmp_path):
    """One of before --context-scale and the monotone layers: it translates, and trains on, as one that has them."""
    checkpoint, older = trained("mixtape").checkpoint, tmp_path / "checkpoint_last.pt"
    state = torch.load(checkpoint, weights_only=True)
    model = vars(state["cfg"]["model"])
    later = ["context_scale", "locked_context_dropout", "freeze_plif", *(o for o in model if o[:4] in ("gss_", "plif"))]
    for option in later:
        del model[option]
    torch.save(state, older)
    assert hypotheses(run("generate", *generate_args(data, older)).stdout) == hypotheses(
        run("generate", *generate_args(data, checkpoint)).stdout
    )
    shutil.copytree(checkpoint.parent, tmp_path / "today")
    logs = [
        run("train", *train_args(data, folder, "--share-decoder-input-output-embed", "--max-update", 82)).log
        for folder in (tmp_path, tmp_path / "today")
    ]
    losses = [[line["loss"] for line in log["train_inner"]] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 2
