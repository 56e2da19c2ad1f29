"""examples/multi30k on Multi30k itself, from raw text to the table of results."""

import json
import math
import re

import pytest
import recipes
import sacrebleu
from real_data import real_lines
from recipes import lines, output

pytestmark = pytest.mark.slow


def prepare(target, bpe, tmp_path):
    """1,000 pairs, prepared, each stage checked: the folder of the data and the raw sentences."""
    folder, data = tmp_path / "raw", tmp_path / "data"
    folder.mkdir()
    raw = {}
    for split, name, size in (("train", "train", 1000), ("valid", "val", 40), ("test", "test_2016_flickr", 40)):
        for lang in ("en", target):
            raw[split, lang] = real_lines(f"multi30k/{name}.{lang}", size)
            (folder / f"{name}.{lang}").write_text("\n".join(raw[split, lang]), encoding="utf-8")
    options = ["--from", folder, "--target", target, "--out", data, "--merges", 600, "--bpe", bpe]
    output("multi30k", "prepare.sh", *options)
    for split, lang in raw:
        stages = [lines(data / "text" / f"{stage}.{split}.{lang}") for stage in ("raw", "tok", "bpe")]
        assert stages[0] == raw[split, lang]
        if bpe == "sentencepiece":
            joined = [line.replace(" ", "").replace("\u2581", " ").strip() for line in stages[2]]
        else:
            joined = [line.replace("@@ ", "") for line in stages[2]]
        assert joined == stages[1]
    return data, raw


def test_preparation_with_subword_nmt(tmp_path):
    """Training on such data is in test_multi30k_example.py."""
    prepare("de", "subword-nmt", tmp_path)


def test_from_raw_text_with_sentencepiece_to_the_table(tmp_path, capsys):
    """A score in the end, which is sacrebleu's of what was translated."""
    target, layer, save = "fr", "moc", tmp_path / "save"
    data, raw = prepare(target, "sentencepiece", tmp_path)
    flags = ["--data", data, "--save", save, *recipes.TINY_TRANSFORMER, "--max-epoch", 5]
    output("multi30k", "train.sh", layer, *flags)
    output("multi30k", "evaluate.sh", save, "--data", data, "--last", 5)
    hypotheses = lines(save / "test.hyp")
    assert len(hypotheses) == 40 and not any("@@" in line or "\u2581" in line for line in hypotheses)
    scores = {row["metric"]: row["score"] for row in json.loads((save / "score.json").read_text())}
    bleu = sacrebleu.corpus_bleu(hypotheses, [raw["test", target]]).score
    assert scores["BLEU 13a"] == pytest.approx(bleu, abs=0.01)
    (nll,) = re.findall(r"nll_loss ([\d.]+)", (save / "test-perplexity.txt").read_text())
    assert float(nll) < math.log2(len(lines(data / f"dict.{target}.txt")))  # it has learned something
    recipes.load_script("collect_results").main([str(save)])
    header, _, row = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[:3]
    )
    row = dict(zip(header, row))
    assert (row["layer"], row["BLEU 13a"], row["ended"]) == (f"{layer}-4", f"{bleu:.2f}", "yes")
