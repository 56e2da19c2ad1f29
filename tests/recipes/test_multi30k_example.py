"""examples/multi30k on a small corpus made here: prepare.sh whole, killed and resumed; train.sh and evaluate.sh."""

import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import time
from functools import partial

import pytest
import recipes
import sacrebleu
import torch
from recipes import files, lines
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from mixtape_plugin.analysis.results import collect

start, run, output, mistake = (
    partial(function, "multi30k") for function in (recipes.start, recipes.run, recipes.output, recipes.mistake)
)
WORDS = {
    "en": """dog man woman T-shirt guitar street plays runs sees isn't "hello" 3.5 &""".split(),
    "de": "Hund Mann Frau T-Shirt Gitarre Straße spielt läuft sieht ist's „hallo“ 3,5 &".split(),
}
SIZES = {"train": 200, "val": 7, "test_2016_flickr": 5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The same sentence in both languages word by word; compressed, plain, with a mark of the byte order and \\r\\n, or
    without a last \\n."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(1)
    for name, size in SIZES.items():
        sentences = [[rng.randrange(len(WORDS["en"])) for _ in range(rng.randint(3, 8))] for _ in range(size)]
        for lang, words in WORDS.items():
            text = "".join(" ".join(words[i] for i in sentence) + ".\n" for sentence in sentences)
            if name == "train":
                with gzip.open(folder / f"{name}.{lang}.gz", "wt", encoding="utf-8") as file:
                    file.write(text)
            else:
                text = "\ufeff" + text.replace("\n", "\r\n") if lang == "de" else text[:-1]
                (folder / f"{name}.{lang}").write_bytes(text.encode())
    with gzip.open(folder / "test_2016_flickr.lc.norm.tok.de.gz", "wt", encoding="utf-8") as file:
        file.write(tokenized((folder / "test_2016_flickr.de").read_text("utf-8-sig")).lower())
    return folder


def tokenized(text):
    normalizer, tokenizer = MosesPunctNormalizer("de"), MosesTokenizer("de")
    return "".join(tokenizer.tokenize(normalizer.normalize(x), return_str=True) + "\n" for x in text.splitlines())


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "en-de"
    done = run("prepare.sh", "--from", corpus, "--out", out, "--merges", 60, PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stderr
    assert f"{SIZES['train']} training pairs" in done.stdout
    return out


def check_prepared(out):
    for split in ("train", "valid", "test"):
        for lang in ("en", "de"):
            raw, tok, bpe = (lines(out / "text" / f"{stage}.{split}.{lang}") for stage in ("raw", "tok", "bpe"))
            assert len(raw) == len(tok) == len(bpe)
            assert [line.replace("@@ ", "") for line in bpe] == tok
            assert (out / f"{split}.en-de.{lang}.idx").stat().st_size > 0
    counts = [int(line.split()[1]) for line in lines(out / "dict.de.txt")]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] > 0  # what Mixtape's gate sharing needs
    subwords = [
        word for lang in ("en", "de") for line in lines(out / "text" / f"bpe.train.{lang}") for word in line.split()
    ]
    assert sum(counts) == len(subwords) and len(counts) == len(set(subwords))
    assert (out / "dict.de.txt").read_bytes() == (out / "dict.en.txt").read_bytes()
    assert not [name for name in files(out) if name.endswith(".part") or name.startswith("binarizing")]


@pytest.mark.slow
def test_prepare(prepared, corpus):
    check_prepared(prepared)
    assert (
        lines(prepared / "text" / "raw.test.de") == (corpus / "test_2016_flickr.de").read_text("utf-8-sig").splitlines()
    )
    tokens = "\n".join(lines(prepared / "text" / "tok.train.de"))
    assert "„" not in tokens and "&quot; hallo &quot;" in tokens and "T-Shirt" in tokens
    assert len(lines(prepared / "text" / "codes")) == 61  # the version of the format, then the merges


@pytest.mark.slow
def test_prepare_in_lower_case(corpus, tmp_path):
    out = tmp_path / "en-de"
    options = ["--from", corpus, "--out", out, "--merges", 60]
    done = run("prepare.sh", *options, "--case", "lower")
    assert done.returncode == 0, done.stderr
    raw = lines(out / "text" / "raw.test.de")
    assert "Hund" in " ".join(raw), "the references keep theirs"
    assert lines(out / "text" / "tok.test.de") == tokenized("\n".join(raw).lower()).splitlines()
    assert "prepared with other settings" in mistake("prepare.sh", *options)
    assert "--case is 'title', allowed are keep and lower" in mistake("prepare.sh", *options, "--case", "title")


@pytest.mark.slow
def test_prepare_again_changes_nothing(prepared, corpus):
    before, times = files(prepared), {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()}
    done = run("prepare.sh", "--from", corpus, "--out", prepared, "--merges", 60)
    assert done.returncode == 0, done.stderr
    assert files(prepared) == before
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()} == times


@pytest.mark.slow
def test_prepare_killed_and_resumed_gives_the_same_bytes(prepared, corpus, tmp_path):
    out, partial = tmp_path / "en-de", tmp_path / "en-de" / "text" / "tok.train.de.part"
    process = start("prepare.sh", "--from", corpus, "--out", out, "--merges", 60, PYTHONHASHSEED="2")
    while process.poll() is None and not partial.exists():
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert partial.exists() and not (out / "text" / "tok.train.de").exists()
    (out / "binarizing").mkdir()  # as if killed later, while binarizing
    (out / "binarizing" / "dict.en.txt").write_text("half\n")
    done = run("prepare.sh", "--from", corpus, "--out", out, "--merges", 60, PYTHONHASHSEED="3")
    assert done.returncode == 0, done.stderr
    assert files(out) == files(prepared)


@pytest.mark.slow
def test_prepare_refuses_mistakes(corpus, prepared, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    out = ["--from", folder, "--out", tmp_path / "out"]
    with open(folder / "val.de", "ab") as file:
        file.write(b"noch einer\n")
    assert mistake("prepare.sh", *out).startswith("prepare.sh: valid has 7 lines of en and 8 of de; ")
    (folder / "val.en").unlink()
    shutil.rmtree(tmp_path / "out")
    assert mistake("prepare.sh", *out) == f"prepare.sh: --from has neither {folder}/val.en nor val.en.gz"
    (folder / "train.en.gz").write_bytes((corpus / "train.en.gz").read_bytes()[:500])
    shutil.rmtree(tmp_path / "out")
    assert mistake("prepare.sh", *out) == f"prepare.sh: {folder}/train.en.gz cannot be read as UTF-8 text"
    assert not (tmp_path / "out" / "text" / "raw.train.en").exists()
    (folder / "train.en").write_bytes(b"caf\xe9\n")
    assert mistake("prepare.sh", *out) == f"prepare.sh: {folder}/train.en cannot be read as UTF-8 text"
    assert "was prepared with other settings" in mistake("prepare.sh", "--from", corpus, "--out", prepared)
    for out in ("a,b", "a:b"):
        assert mistake("prepare.sh", "--from", corpus, "--out", tmp_path / out).endswith(
            f"--out {tmp_path / out} has a comma or a colon, at which fairseq takes a name apart: choose another one"
        )
        assert not (tmp_path / out).exists()
    assert mistake("prepare.sh", "--target", "cs") == "prepare.sh: --target is 'cs', allowed are de and fr"
    assert mistake("prepare.sh", "--merges", "0") == "prepare.sh: --merges is '0', allowed is a positive whole number"
    assert mistake("prepare.sh", "--from", "nowhere") == "prepare.sh: --from nowhere is no folder that can be read"
    assert "--help" in mistake("prepare.sh", "--form", "x") and "--help" in mistake("prepare.sh", "--out")
    message = "{0}: {1} needs a value; see {0} --help"
    assert mistake("prepare.sh", "--out", "--merges", "5") == message.format("prepare.sh", "--out")
    assert mistake("evaluate.sh", folder, "--data", "--cpu") == message.format("evaluate.sh", "--data")


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_prepare_downloads(corpus, tmp_path):
    """From a folder in place of the server: goes on with a part, and notices what is not Multi30k."""
    text = tmp_path / "out" / "text"
    text.mkdir(parents=True)
    whole = (corpus / "train.en.gz").read_bytes()
    (text / "train.en.gz.part").write_bytes(whole[:100])
    args = ["--out", tmp_path / "out"]
    assert mistake("prepare.sh", *args, MULTI30K_URL=corpus.as_uri()) == (
        f"prepare.sh: {text}/raw.train.en has {SIZES['train']} lines, Multi30k has 29000; "
        f"remove {tmp_path}/out and run it again"
    )
    assert (text / "train.en.gz").read_bytes() == whole
    (text / "settings").unlink()
    (text / "train.en.gz").unlink()
    (text / "raw.train.en").unlink()
    url = tmp_path.as_uri() + "/nowhere"
    message = (
        f"prepare.sh: {url}/train.en.gz could not be downloaded whole; run it again, or give a local copy as --from"
    )
    assert mistake("prepare.sh", *args, MULTI30K_URL=url) == message


@pytest.mark.slow
def test_train_and_evaluate(prepared, tmp_path):
    save = tmp_path / "R&D"  # & stands for what is replaced, in bash's ${name/pattern/replacement}
    done = run("train.sh", "mixtape", "--data", prepared, "--save", save, "--seed", 3, *recipes.TINY_TRANSFORMER)
    assert done.returncode == 0, done.stderr
    log = (save / "train.log").read_text()
    assert log == done.stdout and "epoch 006" in log
    kept = sorted(path.name for path in save.glob("checkpoint?.pt"))
    assert kept == [f"checkpoint{epoch}.pt" for epoch in range(1, 7)]

    done = run("evaluate.sh", save, "--data", prepared, "--last", 5, "--valid", "--tune-lenpen", "0 1 3")
    assert done.returncode == 0, done.stderr
    assert "average of checkpoint2.pt, checkpoint3.pt, checkpoint4.pt, checkpoint5.pt, checkpoint6.pt" in done.stdout
    hypotheses = lines(save / "test.hyp")
    assert len(hypotheses) == SIZES["test_2016_flickr"] and not any("@@" in line for line in hypotheses)
    scores = json.loads((save / "score.json").read_text())
    assert [row["metric"] for row in scores][:2] == ["BLEU 13a", "BLEU intl"]
    (papers,) = [row for row in scores if row["metric"] == "BLEU lower-cased tokens"]
    tokens = [line.lower() for line in lines(prepared / "text" / "tok.test.de")]
    assert lines(prepared / "text" / "lower-cased-tokens.test.de") == tokens and papers["preprocessing"].startswith(
        "lower-casing, "
    )
    assert (save / "score.txt").read_text() in done.stdout
    bleu = sacrebleu.corpus_bleu(hypotheses, [lines(prepared / "text" / "raw.test.de")]).score
    assert scores[0]["score"] == pytest.approx(bleu, abs=0.01)
    bleu = sacrebleu.corpus_bleu(lines(save / "valid.hyp"), [lines(prepared / "text" / "raw.valid.de")]).score
    assert json.loads((save / "valid-score.json").read_text())[0]["score"] == pytest.approx(bleu, abs=0.01)

    found, row = json.loads((save / "lenpen.json").read_text())["columns"], collect(save)[0]
    texts = {lenpen: lines(save / "lenpen" / f"valid.{lenpen}.hyp") for lenpen in (0, 1, 3)}
    assert texts[0] != texts[1] == lines(save / "valid.hyp") != texts[3]
    tried = {n: sacrebleu.corpus_bleu(text, [lines(prepared / "text" / "raw.valid.de")]) for n, text in texts.items()}
    # a penalty chooses among five hypotheses, which may have as many words: none is shorter by a larger one
    assert tried[0].sys_len <= tried[1].sys_len <= tried[3].sys_len > tried[0].sys_len
    best = max(tried, key=lambda lenpen: tried[lenpen].score)
    bleu = sacrebleu.corpus_bleu(lines(save / "lenpen" / "test.hyp"), [lines(prepared / "text" / "raw.test.de")]).score
    assert found == {
        "lenpen": best,
        "valid BLEU 13a at lenpen": pytest.approx(tried[best].score, abs=0.0051),
        "BLEU 13a at lenpen": pytest.approx(bleu, abs=0.0051),
    }
    assert found.items() <= row.items()

    ppl = re.fullmatch(r"test nll_loss [\d.]+ \| ppl ([\d.]+)\n", (save / "test-perplexity.txt").read_text())[1]
    assert float(ppl) == pytest.approx(2 ** true_bits(save / "average.pt", prepared), abs=0.0051)  # fairseq rounds it

    # what was found out about an average stays with the same one, and no longer
    (save / "rank.json").write_text('{"columns": {"rank": 5}}')
    found_out = {
        name: (save / name).read_bytes() for name in ("valid.hyp", "valid-score.json", "lenpen.json", "test.hyp")
    }
    (save / "test.hyp").write_text("half\n")
    done = run("evaluate.sh", save, "--data", prepared, "--last", 5)
    assert done.returncode == 0, done.stderr
    assert {name: (save / name).read_bytes() for name in found_out} == found_out
    assert (save / "lenpen" / "test.hyp").exists() and (save / "rank.json").exists()
    broken = recipes.stub(tmp_path / "broken", fairseq_validate="echo no memory; exit 1")
    for last, kept in ((5, True), (4, False)):
        sentence = mistake("evaluate.sh", save, "--data", prepared, "--last", last, MIXTAPE_VENV=broken)
        assert sentence.endswith("no memory")
        left = [
            (save / name).exists() for name in ("rank.json", "score.json", "valid-score.json", "lenpen", "lenpen.json")
        ]
        assert left == [kept] * len(left)
    other = shutil.copytree(prepared, tmp_path / "other")
    (save / "score.json").write_text("of the same text elsewhere")
    older = (save / "average.md5").read_text().split()[0]  # older versions wrote this alone
    (save / "average.md5").write_text(older + "\n")
    assert mistake("evaluate.sh", save, "--data", other, "--last", 4, MIXTAPE_VENV=broken).endswith("no memory")
    assert (save / "score.json").exists()
    (other / "text" / "raw.test.de").write_text("\n".join(reversed(lines(other / "text" / "raw.test.de"))) + "\n")
    (save / "score.json").write_text("of another text")
    assert mistake("evaluate.sh", save, "--data", other, "--last", 4, MIXTAPE_VENV=broken).endswith("no memory")
    assert not (save / "score.json").exists()

    french = tmp_path / "french"
    (french / "text").mkdir(parents=True)
    (french / "text" / "raw.test.fr").write_text("un chien\n")
    message = f"evaluate.sh: --data {french} is for fr, and {save}/train.log says that it translates to de"
    assert mistake("evaluate.sh", save, "--data", french) == message


def true_bits(path, data):
    """Mean of -log2 p over every target subword and </s> of the test set, sentence by sentence, in float64."""
    import mixtape_plugin  # noqa: I001

    mixtape_plugin.register()
    from fairseq import checkpoint_utils

    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides={"data": str(data)})
    model.double().eval()
    total, count = 0.0, 0
    for source, target in zip(*(lines(data / "text" / f"bpe.test.{lang}") for lang in ("en", "de"))):
        source, target = (
            torch.tensor(
                [[task.target_dictionary.index(word) for word in line.split()] + [task.target_dictionary.eos()]]
            )
            for line in (source, target)
        )
        scores, _ = model(source, torch.tensor([source.size(1)]), target.roll(1))
        total -= scores.log_softmax(-1).gather(-1, target.unsqueeze(-1)).sum().item()
        count += target.numel()
    return total / count / math.log(2)


def test_train_and_evaluate_refuse_mistakes(tmp_path):
    assert mistake("train.sh", "plif").startswith(
        "train.sh: the output layer is 'plif', allowed are softmax, mos, moc and"
    )
    message = f"train.sh: --data {tmp_path} holds no binarized data; run prepare.sh first"
    assert mistake("train.sh", "mos", "--data", tmp_path, "--save", tmp_path / "save") == message
    assert not (tmp_path / "save").exists()
    assert mistake("evaluate.sh", tmp_path / "save") == f"evaluate.sh: {tmp_path}/save is no folder"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "raw.test.de").write_text("ein Hund\n")
    (tmp_path / "12:30").mkdir()
    message = f"evaluate.sh: {tmp_path}/12:30 has a colon, at which fairseq-generate takes paths apart: rename it"
    assert mistake("evaluate.sh", tmp_path / "12:30", "--data", tmp_path) == message
    message = "evaluate.sh: --tune-lenpen is '1,2', allowed are numbers, 0 or more, such as '1 1.5 2'"
    assert mistake("evaluate.sh", tmp_path, "--data", tmp_path, "--tune-lenpen", "1,2") == message
    (tmp_path / "text" / "raw.test.en").write_text("a dog\n")
    for name in ("lower-cased-tokens.test.de", "raw.test.de"):
        (tmp_path / "text" / name).write_text("ein Hund\nzwei Hunde\n")
        other = (
            f"evaluate.sh: {tmp_path}/text/{name} has 2 lines, and the test text, {tmp_path}/text/raw.test.en, has 1"
        )
        assert mistake("evaluate.sh", tmp_path, "--data", tmp_path) == other
        (tmp_path / "text" / name).write_text("ein Hund\n")
    brackets = tmp_path / "data[1]"  # a pattern of the shell that matches another name
    shutil.copytree(tmp_path / "text", brackets / "text")
    assert mistake("evaluate.sh", tmp_path, "--data", brackets, "--tune-lenpen", "1,2") == message
    shutil.rmtree(tmp_path / "text")
    assert mistake("evaluate.sh", tmp_path, "--data", tmp_path).startswith(
        f"evaluate.sh: --data {tmp_path} holds no text/"
    )
