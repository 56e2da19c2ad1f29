"""scripts/analyze.py on small models, trained for some updates through fairseq: what it says about them is true."""

import csv
import json
import math
import os
import shutil
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy_language_models
from conftest import USER_DIR, load_parameters, run
from recipes import load_script

from mixtape_plugin.analysis import trained_model
from mixtape_plugin.analysis.results import collect
from mixtape_plugin.errors import UserError

analyze = load_script("analyze")
LAYERS = {"softmax": [], "mos": ["--num-components", 3], "mixtape": ["--frequent-ratio", 0.5]}


@pytest.fixture(scope="session")
def trained_language_models(tmp_path_factory):
    """Binarized text, and a folder of each layer's training as train.sh would leave it."""
    folders, data = [], None
    for layer, options in LAYERS.items():
        trained = toy_language_models.train(
            tmp_path_factory.mktemp(layer), "--output-layer", layer, "--max-epoch", 3, *options
        )
        folder = tmp_path_factory.mktemp("checkpoints") / f"lm.{layer}"
        folder.mkdir()
        shutil.copy(trained.path, folder / "checkpoint_best.pt")
        (folder / "train.log").write_text("")
        folders.append(folder)
        data = data or trained.data
    return data, folders


@pytest.fixture
def translation_model(data, trained, tmp_path):
    """The same of a translation model with Mixtape, whose checkpoint stands for the average."""
    shutil.copy(trained("mixtape").checkpoint, tmp_path / "average.pt")
    shutil.copy(trained("mixtape").halfway, tmp_path / "checkpoint_best.pt")
    return data, tmp_path


def read_csv(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells(line):
    return [cell.strip() for cell in line[1:-1].split(" | ")]


def log_probs_of(data, folder, split="test"):
    """log P [N, V] of a language model in one piece, in the model's own words: its forward and log-softmax."""
    trained = trained_model.load(folder, str(data))
    tokens = trained.read(split).targets
    inputs = torch.cat([tokens.new_tensor([trained.task.target_dictionary.eos()]), tokens[:-1]])
    with torch.no_grad():
        scores, _ = trained.model(inputs.unsqueeze(0))
    return scores[0].double().log_softmax(-1), tokens, trained


# --------------------------------------------------------------------------------------------------------------- rank


def test_rank_of_language_models(trained_language_models, tmp_path, capsys):
    data, folders = trained_language_models
    out = tmp_path / "out"
    analyze.main(["rank", data, *map(str, folders), "--out", str(out), "--cpu"])
    printed = capsys.readouterr()
    assert {path.name for path in out.iterdir()} == {"rank.csv", "rank.png", "singular_values.csv"}
    assert (out / "rank.png").read_bytes().startswith(b"\x89PNG")
    assert "300 contexts × 13 tokens" in printed.err
    rows, sigma = read_csv(out / "rank.csv"), read_csv(out / "singular_values.csv")
    lines = printed.out.splitlines()
    assert cells(lines[0]) == [
        "training", "contexts", "tokens", "perplexity", "rank", "rank 1e-3", "rank 1e-4", "rank 1e-5", "KLD",
    ]  # fmt: skip
    for line, row, folder in zip(lines[2:], rows, folders):
        log_probs, tokens, trained = log_probs_of(data, folder)
        log_probs = log_probs[:, ~trained.layer.vocabulary_mask]
        expected = torch.linalg.svdvals(log_probs)
        found = torch.tensor([float(r[folder.name]) for r in sigma])
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        assert int(row["rank"]) == (expected > 0.5 * math.sqrt(300 + 13 + 1) * 2**-23 * expected[0]).sum()
        probs = log_probs.exp()
        divergence = (probs * log_probs).sum(1).mean() - (probs.mean(0) * log_probs.mean(0)).sum()
        assert float(row["KLD"]) == pytest.approx(divergence.item(), rel=1e-5)
        assert cells(line)[:2] == [folder.name, "300"] and cells(line)[4] == row["rank"]
        saved = json.loads((folder / "rank.json").read_text())
        assert saved["columns"]["rank"] == int(row["rank"]) and saved["contexts"] == 300
        assert saved["checkpoint"] == "checkpoint_best.pt"
    evaluated = run(
        "eval_lm", data, "--path", folder / "checkpoint_best.pt", "--user-dir", USER_DIR, "--batch-size", 1, "--cpu",
        "--task", "bptt_language_modeling", "--gen-subset", "test",
    ).stdout  # fmt: skip
    assert f"Perplexity: {saved['perplexity']:.2f}" in evaluated
    assert collect(folders[0])[0]["rank"] == int(rows[0]["rank"])


def test_columns_read_the_whole_text(trained_language_models):
    """5 columns begin without what is before them: other features, of the same targets."""
    data, (folder, *_) = trained_language_models
    trained = trained_model.load(folder, data)
    one, five = (list(trained.contexts("test", columns)) for columns in (1, 5))
    assert sorted(torch.cat([t for _, t in five]).tolist()) == sorted(torch.cat([t for _, t in one]).tolist())
    assert torch.equal(torch.cat([t for _, t in one]), trained.read("test").targets)
    torch.testing.assert_close(five[0][0][0], one[0][0][0])


def test_fewer_contexts_than_tokens(trained_language_models, tmp_path, capsys):
    data, (folder, *_) = trained_language_models
    analyze.main(["rank", data, str(folder), "--out", str(tmp_path), "--contexts", "7", "--cpu"])
    log_probs, _, trained = log_probs_of(data, folder)
    expected = torch.linalg.svdvals(log_probs[:7, ~trained.layer.vocabulary_mask])
    found = torch.tensor([float(row[folder.name]) for row in read_csv(tmp_path / "singular_values.csv")])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert json.loads((folder / "rank.json").read_text())["contexts"] == 7


def test_rank_of_a_translation_model(translation_model, tmp_path, capsys):
    """Target positions of the test set, teacher-forced: with the perplexity that fairseq-validate finds."""
    data, folder = translation_model
    analyze.main(["rank", str(data), str(folder), "--out", str(tmp_path / "out"), "--cpu"])
    saved = json.loads((folder / "rank.json").read_text())
    assert saved["checkpoint"] == "average.pt"
    log = run(
        "validate", data, "--path", folder / "average.pt", "--user-dir", USER_DIR, "--task", "translation",
        "--valid-subset", "test", "--max-tokens", 500, "--cpu", "--log-format", "json",
    ).log  # fmt: skip
    (validated,) = log["test"]
    assert math.log2(saved["perplexity"]) == pytest.approx(float(validated["test_nll_loss"]), abs=2e-3)
    by_sentence = [trained_model.load(folder, str(data)).contexts("test", size) for size in (1, 32)]
    one, many = (list(contexts) for contexts in by_sentence)
    assert torch.equal(torch.cat([t for _, t in one]), torch.cat([t for _, t in many]))
    torch.testing.assert_close(torch.cat([f for f, _ in one]), torch.cat([f for f, _ in many]), rtol=1e-4, atol=1e-5)
    assert saved["contexts"] == len(torch.cat([t for _, t in one])) and saved["columns"]["rank"] > 2


def test_what_does_not_fit_is_refused(trained_language_models, tmp_path, monkeypatch):
    data, (folder, *_) = trained_language_models
    monkeypatch.setattr(analyze, "available_memory", lambda device: analyze.RESERVE + 14_000_000)
    with pytest.raises(UserError) as error:
        analyze.estimate(400_000, 30_000, "cpu")
    assert str(error.value) == (
        "the rank of 400,000 contexts × 30,000 tokens takes 7.4 GB for the Gram matrix, and 0.0 GB are free: "
        "free some memory"
    )
    monkeypatch.setattr(analyze, "available_memory", lambda device: analyze.RESERVE + 2 * 10**9)
    with pytest.raises(UserError, match="2.0 GB are free: --contexts 5000 fits"):
        analyze.estimate(400_000, 30_000, "cpu")


# -------------------------------------------------------------------------------------------------------- predictions


def test_predictions_of_language_models(trained_language_models, tmp_path, capsys):
    data, folders = trained_language_models
    analyze.main(
        ["predictions", data, *map(str, folders), "--out", str(tmp_path), "--at", "2:3", "--random", "4", "--at", "1:1",
         "--search", "lm.mos", f"{folders[0]}/", "--top", "3", "--cpu"]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("## ")] == [
        "## chosen", "## random", "## lm.mos above lm.softmax",
    ]  # fmt: skip
    rows, rates = read_csv(tmp_path / "predictions.csv"), read_csv(tmp_path / "hits.csv")
    assert len(rows) == 3 * 3 * (2 + 4 + 6)
    assert (tmp_path / "predictions.png").read_bytes().startswith(b"\x89PNG")
    losses = {}
    for folder, rate in zip(folders, rates):
        log_probs, tokens, trained = log_probs_of(data, folder)
        losses[folder.name] = -log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        top = log_probs.topk(3)
        hits = top.indices.eq(tokens.unsqueeze(1))
        assert float(rate["top-1 %"]) == pytest.approx(100 * hits[:, 0].double().mean().item())
        assert float(rate["top-3 %"]) == pytest.approx(100 * hits.any(1).double().mean().item())
        assert float(rate["perplexity"]) == pytest.approx(losses[folder.name].mean().exp().item(), rel=1e-5)
        symbols = trained.task.target_dictionary
        found = [r for r in rows if r["training"] == folder.name and r["position"] == "2:3"][:3]
        index = 10 + 2  # lines have nine words and </s>
        assert [r["word"] for r in found] == [symbols[token] for token in top.indices[index]]
        assert [float(r["probability"]) for r in found] == pytest.approx(top.values[index].exp().tolist(), rel=1e-4)
        assert {r["reference"] for r in found} == {symbols[tokens[index]]}
        assert json.loads((folder / "predictions.json").read_text())["columns"] == {
            name: pytest.approx(float(rate[name])) for name in ("top-1 %", "top-3 %")
        }
    gain = losses["lm.softmax"] - losses["lm.mos"]
    searched = [r["position"] for r in rows if r["group"] == "lm.mos above lm.softmax"][::9]
    best = [f"{i // 10 + 1}:{i % 10 + 1}" for i in gain.argsort(descending=True)[:6].tolist()]
    assert searched == best


def test_predictions_of_a_translation_model(translation_model, tmp_path, capsys):
    """The source is shown, and the word at a position is that of the test set's target line."""
    data, folder = translation_model
    out = tmp_path / "out"
    analyze.main(["predictions", str(data), str(folder), "--out", str(out), "--at", "3:2", "--cpu"])
    target = (data.parent / "test.y").read_text().splitlines()[2].split()
    source = (data.parent / "test.x").read_text().splitlines()[2].split()
    assert {row["reference"] for row in read_csv(out / "predictions.csv")} == {target[1]}
    shown = [f"**{word}**" if n == 1 else word for n, word in enumerate(target)]
    assert f"3:2: {' '.join(source)} </s> / {' '.join(shown)} </s>" in capsys.readouterr().out


def test_hit_rates_alone(trained_language_models, tmp_path, capsys):
    data, (folder, *_) = trained_language_models
    analyze.main(["predictions", data, str(folder), "--out", str(tmp_path), "--cpu"])
    assert [path.name for path in tmp_path.iterdir()] == ["hits.csv"]
    assert cells(capsys.readouterr().out.splitlines()[0]) == ["training", "perplexity", "top-1 %", "top-5 %"]


# ---------------------------------------------------------------------------------------------------------- frequency


def test_frequency_of_language_models(trained_language_models, tmp_path, capsys):
    """Classes by the counts of the words in the training text itself; no folder is written to."""
    data, folders = trained_language_models
    before = [sorted(folder.iterdir()) for folder in folders]
    analyze.main(["frequency", data, *map(str, folders), "--out", str(tmp_path), "--cpu"])
    assert [sorted(folder.iterdir()) for folder in folders] == before
    assert (tmp_path / "frequency.png").read_bytes().startswith(b"\x89PNG")
    rows = read_csv(tmp_path / "frequency.csv")
    losses = {}
    for folder in folders:
        log_probs, tokens, trained = log_probs_of(data, folder)
        losses[folder.name] = -log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    read = trained.read("train")
    counts = Counter(read.dictionary[token] for token in read.targets)
    frequent = {word for word, _ in counts.most_common() if word not in ("</s>", "<unk>")}
    frequent = set(sorted(frequent, key=lambda word: (-counts[word], read.dictionary.index(word)))[:10])
    words = [read.dictionary[token] for token in tokens]
    for rank, here in {
        "special": [word in ("</s>", "<unk>") for word in words], "1–10": [word in frequent for word in words],
        "all": [True] * len(words),
    }.items():  # fmt: skip
        for row in (row for row in rows if row["rank"] == rank):
            loss = losses[row["training"]]
            assert int(row["tokens"]) == sum(here)
            assert float(row["nats"]) == pytest.approx(loss[here].sum().item() / len(words), rel=1e-5)
            if row["training"] != "lm.softmax":
                gap = (loss - losses["lm.softmax"])[here].sum().item() / len(words)
                assert float(row["difference"]) == pytest.approx(gap, rel=1e-3, abs=1e-6)
    assert cells(capsys.readouterr().out.splitlines()[-1])[0] == "all"


def test_what_is_read_is_said(translation_model, trained_language_models, tmp_path, capsys):
    _, folder = translation_model
    analyze.tell_checkpoints(analyze.parse_args(["mixing", "data", str(folder), "--out", str(tmp_path / "out")]))
    assert capsys.readouterr().err == f"reading {folder / 'average.pt'}\n"

    shutil.copy(folder / "checkpoint_best.pt", folder / "checkpoint_last.pt")
    os.utime(folder / "average.pt", (1e9, 1e9))
    other = trained_language_models[1][0]
    args = ["frequency", "data", str(folder), str(other), "--out", str(tmp_path / "out")]
    analyze.tell_checkpoints(analyze.parse_args(args))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"reading {folder / 'average.pt'}" and said[2] == f"reading {other / 'checkpoint_best.pt'}"
    assert said[1].startswith(f"warning: {folder / 'checkpoint_last.pt'} is newer: the average is of an earlier")
    assert said[3].startswith("warning: averages beside single checkpoints") and len(said) == 4


def test_frequency_of_one_model(translation_model, tmp_path):
    data, folder = translation_model
    analyze.main(["frequency", str(data), str(folder), "--out", str(tmp_path / "out"), "--cpu"])
    rows = read_csv(tmp_path / "out" / "frequency.csv")
    assert {row["difference"] for row in rows} == {""} and (tmp_path / "out" / "frequency.png").exists()


# ------------------------------------------------------------------------------------------------------------- mixing


def test_mixing_of_language_models(trained_language_models, tmp_path, capsys):
    """Means over the text and its classes of what the model's own priors and contexts give; no folder is written to."""
    data, folders = trained_language_models
    folders = folders[1:]
    before = [sorted(folder.iterdir()) for folder in folders]
    analyze.main(["mixing", data, *map(str, folders), "--out", str(tmp_path), "--cpu"])
    assert [sorted(folder.iterdir()) for folder in folders] == before
    assert (tmp_path / "mixing.png").read_bytes().startswith(b"\x89PNG")
    rows = {(row["rank"], row["training"]): row for row in read_csv(tmp_path / "mixing.csv")}
    for folder in folders:
        _, tokens, trained = log_probs_of(data, folder)
        inputs = torch.cat([tokens.new_tensor([trained.task.target_dictionary.eos()]), tokens[:-1]])
        with torch.no_grad():
            features = trained.model(inputs.unsqueeze(0), features_only=True)[0][0]
            priors = trained.layer.priors(features, tokens)
        components = [math.exp(-sum(p * math.log(p) for p in prior if p)) for prior in priors.tolist()]
        ends = tokens.eq(trained.task.target_dictionary.eos()) | tokens.eq(trained.task.target_dictionary.unk())
        for rank, here in {"all": torch.ones_like(ends), "special": ends}.items():
            row = rows[rank, folder.name]
            expected = [value for value, counted in zip(components, here) if counted]
            assert int(row["tokens"]) == len(expected)
            assert float(row["components"]) == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert cells(capsys.readouterr().out.splitlines()[0])[:4] == ["rank", "tokens", "training", "K"]


def test_mixing_of_a_translation_model(translation_model, tmp_path):
    data, folder = translation_model
    analyze.main(["mixing", str(data), str(folder), "--out", str(tmp_path / "out"), "--cpu"])
    rows = read_csv(tmp_path / "out" / "mixing.csv")
    assert all(1 <= float(row["components"]) <= int(row["K"]) and 0 < float(row["length"]) <= 1 for row in rows)


def test_mixing_of_softmax_is_refused_before_any_is_read(trained_language_models, tmp_path, monkeypatch):
    data, (softmax, mixture, *_) = trained_language_models
    monkeypatch.setattr(analyze.mixing, "walk", None)
    with pytest.raises(UserError, match="--output-layer softmax, which mixes nothing"):
        analyze.main(["mixing", data, str(mixture), str(softmax), "--out", str(tmp_path), "--cpu"])


# --------------------------------------------------------------------------------------------------------- similarity


def test_similarity_of_language_models(trained_language_models, tmp_path, capsys):
    from scipy.stats import spearmanr

    data, folders = trained_language_models
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    words = [line.split()[0] for line in open(f"{data}/dict.txt")]
    lines = [(words[n], words[(3 * n + 1) % len(words)], (7 * n) % 11) for n in range(len(words))]
    (pairs / "toy.txt").write_text("".join("{}\t{}\t{}\r\n".format(*line) for line in [*lines, ("no", "word", 3)]))
    (pairs / "few.txt").write_text("{} {} {}\n".format(*lines[0]))
    out = tmp_path / "out"
    analyze.main(["similarity", data, *map(str, folders), "--pairs", str(pairs), "--out", str(out), "--cpu"])
    printed = capsys.readouterr().out.splitlines()
    assert cells(printed[2])[:2] == ["few", "1"] and cells(printed[2])[3:] == ["n/a"] * 3
    rows = {(row["set"], row["training"]): row for row in read_csv(out / "similarity.csv")}
    assert (out / "similarity.png").read_bytes().startswith(b"\x89PNG")
    for folder in folders:
        embedding = load_parameters(folder / "checkpoint_best.pt")["decoder.embed_tokens.weight"].double()
        index = {word: n + 4 for n, word in enumerate(words)}
        cosines = [torch.cosine_similarity(embedding[index[a]], embedding[index[b]], 0).item() for a, b, _ in lines]
        rho = spearmanr(cosines, [score for *_, score in lines]).statistic
        row = rows["toy", folder.name]
        assert float(row["rho"]) == pytest.approx(rho) and (row["pairs"], row["skipped"]) == (str(len(lines)), "1")
        assert float(row["low"]) <= rho <= float(row["high"])
        assert json.loads((folder / "similarity.json").read_text())["columns"] == {"similarity": pytest.approx(rho)}
    assert cells(printed[-1])[0] == folders[-1].name and cells(printed[-1])[-1] == ""


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "args, sentence",
    [
        ("rank DATA nowhere", "nowhere is no folder: give those that train.sh wrote"),
        ("rank DATA empty", "empty holds no average.pt or checkpoint_best.pt: train.sh and evaluate.sh write them"),
        ("rank DATA DIR --checkpoint x.pt", "DIR holds no x.pt: train.sh and evaluate.sh write them"),
        ("rank DATA DIR --contexts 1", "--contexts 1 is not allowed: at least 2"),
        ("rank DATA DIR --contexts 301", "--contexts 301 is not allowed: the text has 300"),
        ("rank DATA DIR --batch-size 0", "--batch-size 0 is not allowed: at least 1"),
        ("predictions DATA DIR --top 0", "--top 0 is not allowed: at least 1"),
        ("predictions DATA DIR --top 14", "--top 14 is not allowed: at most 13, the tokens there are"),
        ("predictions DATA DIR --at 9", "--at 9 is not allowed: LINE:WORD, such as 124:25, both from 1"),
        ("predictions DATA DIR --search DIR no", "--search no is none of the folders: lm.softmax"),
        ("predictions DATA DIR --seed 5", "--seed 5 needs --random"),
        ("predictions DATA DIR --search-count 3", "--search-count 3 needs --search"),
        ("predictions DATA DIR --paper", "--paper: 124:25 is not in the text: it has lines 1 to 30"),
        ("similarity DATA DIR --pairs no", "--pairs no is no folder: give one of files 'word word score'"),
        (
            "similarity DATA DIR --pairs empty",
            "--pairs empty holds no .txt file: give a folder of files 'word word score'",
        ),
    ],
)
def test_mistakes(args, sentence, trained_language_models, tmp_path, monkeypatch):
    data, (folder, *_) = trained_language_models
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError) as error:
        analyze.main(args.replace("DATA", data).replace("DIR", str(folder)).split())
    assert str(error.value).replace(str(folder), "DIR") == sentence
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_name_that_two_folders_have_chooses_neither():
    args = Namespace(names={Path("one/same"): "one/same", Path("two/same"): "two/same"})
    assert analyze.find_name(args, "two/same/") == "two/same"
    with pytest.raises(UserError, match="^--search same is several of the folders: one/same, two/same$"):
        analyze.find_name(args, "same")


def test_a_model_without_our_output_layer_is_refused(trained_language_models, monkeypatch):
    data, (folder, *_) = trained_language_models
    stock = ([torch.nn.Linear(1, 1)], None, None)
    monkeypatch.setattr(trained_model.checkpoint_utils, "load_model_ensemble_and_task", lambda *_, **__: stock)
    with pytest.raises(UserError, match="checkpoint_best.pt holds a Linear without an output layer of this plugin"):
        trained_model.load(folder, data)


def test_models_of_different_texts_are_refused(trained_language_models, tmp_path, monkeypatch):
    data, (first, second, *_) = trained_language_models
    read = trained_model.TrainedModel.read

    def read_shorter(trained, split):
        text = read(trained, split)
        return text if Path(trained.checkpoint).is_relative_to(first) else replace(text, targets=text.targets[1:])

    monkeypatch.setattr(trained_model.TrainedModel, "read", read_shorter)
    with pytest.raises(UserError, match=f"^{second} reads another text than the first folder"):
        analyze.main(["predictions", str(data), str(first), str(second), "--cpu", "--out", str(tmp_path)])
