"""examples/wmt14_en_{de,fr}: prepare.sh on small archives laid out as the originals, and training on what it makes."""

import csv
import gzip
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import sacrebleu
import sacremoses
import torch
from real_data import has_real_data, real_lines
from recipes import HEADER, files, lines, load_script, mistake, output, run, start, stub, write_archive
from subword_nmt import apply_bpe, learn_bpe

WORDS = {
    "en": ["dog", "man", "isn't", '"hello"', "3.5", "U.S.", "house.", "T-shirt", "&", "don’t", "(a)", "50 %"],
    "de": ["Hund", "Mann", "ist's", "„hallo“", "3,5", "z.B.", "Haus.", "T-Shirt", "&", "geht’s", "(ein)", "50\u00a0%"],
    "fr": [
        "chien",
        "homme",
        "l'eau",
        "«\u00a0salut\u00a0»",
        "3,5",
        "M.",
        "mur.",
        "T-shirt",
        "&",
        "d’or",
        "(un)",
        "5 %",
    ],
}
EUROPARL = "wmt13/training-parallel-europarl-v7.tgz"
COMMON_CRAWL = "wmt13/training-parallel-commoncrawl.tgz"
needs_curl = pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")


collect_results, prepare_parallel = load_script("collect_results"), load_script("prepare_parallel")

# ------------------------------------------------------------------------------------- archives as statmt.org has them


def sentences(count, language, seed):
    """Word for word the same sentences in each language, a text (bytes) of one a line."""
    rng = random.Random(seed)
    lines = [[rng.randrange(len(WORDS["en"])) for _ in range(rng.randint(3, 8))] for _ in range(count)]
    return "".join(" ".join(WORDS[language][i] for i in line) + " .\n" for line in lines).encode()


def segments(count, language, seed):
    """The lines that sacrebleu takes out of the file of `sgm`: white space is one space."""
    return [re.sub(r"\s+", " ", line) for line in sentences(count, language, seed).decode().splitlines()]


def sgm(count, language, seed):
    lines = sentences(count, language, seed).decode().splitlines()
    parts = "".join(f'<seg id="{n + 1}"> {line}</seg>\n' for n, line in enumerate(lines))
    return f'<refset setid="newstest">\n<doc docid="a">\n<p>\n{parts}</p>\n</doc>\n</refset>\n'.encode()


# (English, the other language): what the cleaning must drop, and next to it what it must keep.
DROPPED = [
    (b"", b""),
    (b"no translation", b" \t "),
    (b"word " * 100_000, b"word " * 100_000),
    (b"word " * 251, b"word " * 251),
    (b"x" * 1001, b"y"),
    (b"caf\xe9", b"caf"),
    (b"one two three four", b"one two"),
    (b"two", b"one two"),
]
KEPT = [
    (b"word " * 250, b"word " * 250),
    (b"a line\xe2\x80\xa8separator and a\x0cform feed\r", b"five words and a feed"),
    (b"a b c", b"a b"),  # 1.5 times as long
]


def crawl(language):
    side = 0 if language == "en" else 1
    odd = b"".join(pair[side] + b"\n" for pair in DROPPED + KEPT)
    return sentences(60, language, 2) + odd + sentences(60, language, 3)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A folder with all archives of both language pairs under the paths that they have on the server."""
    folder = tmp_path_factory.mktemp("statmt.org")
    pairs = [(pair, language) for pair in ("de", "fr") for language in ("en", pair)]
    write_archive(
        folder / EUROPARL,
        {f"training/europarl-v7.{pair}-en.{language}": sentences(150, language, 1) for pair, language in pairs},
    )
    write_archive(
        folder / COMMON_CRAWL, {f"commoncrawl.{pair}-en.{language}": crawl(language) for pair, language in pairs}
    )
    write_archive(
        folder / "wmt13" / "training-parallel-un.tgz",
        {f"un/undoc.2000.fr-en.{language}": sentences(20, language, 4) for language in ("en", "fr")},
    )
    write_archive(
        folder / "wmt16" / "translation-task" / "training-parallel-nc-v11.tgz",
        {
            f"training-parallel-nc-v11/news-commentary-v11.de-en.{language}": sentences(30, language, 5)
            for language in ("de", "en")
        },
    )
    write_archive(
        folder / "wmt14" / "training-parallel-nc-v9.tgz",
        {f"training/news-commentary-v9.fr-en.{language}": sentences(30, language, 6) for language in ("en", "fr")},
    )
    write_archive(
        folder / "wmt10" / "training-giga-fren.tar",
        {
            f"giga-fren.release2.fixed.{language}.gz": gzip.compress(sentences(40, language, 7))
            for language in ("en", "fr")
        },
    )
    dev = {
        f"dev/newstest{year}-{kind}.{language}.sgm": sgm(5, language, year)
        for year in (2013, 2012)
        for kind, language in (("src", "en"), ("ref", "de"), ("ref", "fr"))
    }
    write_archive(folder / "wmt16" / "translation-task" / "dev.tgz", dev)
    write_archive(folder / "wmt14" / "dev.tgz", dev)
    write_archive(
        folder / "wmt14" / "test-full.tgz",
        {
            f"test-full/newstest2014-{pair}en-{kind}.{language}.sgm": sgm(6, language, 2014)
            for pair, other in (("de", "de"), ("fr", "fr"))
            for kind, language in (("src", "en"), ("ref", other))
        },
    )
    return folder


# ------------------------------------------------------------------------------------------------- running prepare.sh


def assert_leads_to_the_table(example, data, layers, folder, capsys):
    """What prepare.sh wrote is what train.sh and evaluate.sh take: all layers are trained, the last is evaluated."""
    target = example[-2:]
    width = {"de": 1024, "fr": 2048}[target] // 32
    for layer in layers:
        save = folder / layer
        log = output(example, "train.sh", layer, "--smoke", "--data", data, "--save", save, "--seed", 3)
        assert (save / "train.log").read_text() == log
        assert re.match(rf"{HEADER}examples/{example}/train\.sh {layer} --smoke --data ", log)
        assert len(list(save.glob("checkpoint_*_*.pt"))) == 3 and (save / "checkpoint_last.pt").exists()
        model = torch.load(save / "checkpoint_last.pt", weights_only=True)["model"]
        assert model["decoder.layers.1.fc1.weight"].shape == (4 * width, width)
        assert ("decoder.output_projection.gate_embedding" in model) == (layer == "mixtape")

    printed = output(example, "evaluate.sh", save, "--data", data, "--last", 2, "--cpu")
    paths = sorted(save.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))
    assert printed.startswith(f"{save}/average.pt: average of {paths[1].name}, {paths[2].name}\n")
    hypotheses = lines(save / "test.hyp")
    assert len(hypotheses) == 6 and not any("@@" in line or "\u2581" in line for line in hypotheses)
    assert printed.endswith((save / "score.txt").read_text())
    scores = {row["metric"]: row for row in json.loads((save / "score.json").read_text())}
    bleu = sacrebleu.corpus_bleu(hypotheses, [lines(data / "text" / f"raw.test.{target}")]).score
    assert scores["BLEU 13a"]["score"] == pytest.approx(bleu, abs=0.01)
    assert ("BLEU tokenized, compounds split" in scores) == (target == "de")
    # Not far from knowing nothing, after 10 updates of a learning rate that has hardly begun to warm up.
    types = len(lines(data / f"dict.{target}.txt")) + 4
    perplexity = (save / "test-perplexity.txt").read_text()
    nll, ppl = re.fullmatch(r"test nll_loss ([\d.]+) \| ppl ([\d.]+)\n", perplexity).groups()
    assert float(nll) == pytest.approx(math.log2(types), abs=0.8)

    capsys.readouterr()
    collect_results.main([*(str(folder / layer) for layer in layers), "--csv", str(folder / "results.csv")])
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [dict(zip(table[0], row)) for row in table[2 : 2 + len(layers)]]
    names = {"softmax": "softmax", "mos": "mos-9", "moc": "moc-9", "mixtape": "mixtape-4"}
    assert [row["layer"] for row in rows] == [names[layer] for layer in layers]
    assert all((row["seed"], row["updates"], row["ended"]) == ("3", "10", "yes") for row in rows)
    *trained, evaluated = rows
    assert all((row["test ppl"], row["BLEU 13a"]) == ("not run", "not run") for row in trained)
    assert (evaluated["test ppl"], evaluated["BLEU 13a"]) == (ppl, f"{scores['BLEU 13a']['score']:.2f}")
    row = list(csv.DictReader(open(folder / "results.csv")))[-1]
    assert float(row["chrF"]) == scores["chrF"]["score"] and row["chrF signature"] == scores["chrF"]["signature"]
    assert row["command"].startswith(f"examples/{example}/train.sh {layers[-1]} --smoke ")


def moses(language, sentences):
    """sacremoses itself, as its command line does it."""
    normalizer, tokenizer = sacremoses.MosesPunctNormalizer(language), sacremoses.MosesTokenizer(language)
    return [tokenizer.tokenize(normalizer.normalize(line + "\n"), return_str=True) for line in sentences]


@pytest.fixture(scope="module")
def en_de(archives, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "en_de"
    done = run("wmt14_en_de", "prepare.sh", "--from", archives, "--out", out, "--merges", 60, "--workers", 1)
    assert done.returncode == 0, done.stderr
    return out, done.stderr + done.stdout


@pytest.mark.slow
def test_english_german(en_de, tmp_path, capsys):
    out, said = en_de
    text = out / "text"
    assert "prepare.sh: needs 10 GB of disk in" in said.splitlines()[0]
    for language in ("en", "de"):
        raw = sentences(150, language, 1) + crawl(language) + sentences(30, language, 5)
        raw = raw.decode("utf-8", "replace").replace("\r", "").replace("\u2028", " ").replace("\x0c", " ")
        assert (text / f"raw.train.{language}").read_text(encoding="utf-8") == raw
        assert lines(text / f"raw.valid.{language}") == segments(5, language, 2013)
        assert lines(text / f"raw.test.{language}") == segments(6, language, 2014)
        for split in ("valid", "test"):
            assert lines(text / f"tok.{split}.{language}") == moses(language, lines(text / f"raw.{split}.{language}"))
            assert (out / f"{split}.en-de.{language}.idx").stat().st_size > 0

        # None of the odd lines but those to be kept, and those at their place.
        side = 0 if language == "en" else 1
        kept = b"".join(pair[side] + b"\n" for pair in KEPT).decode()
        kept = sentences(150, language, 1) + sentences(60, language, 2) + kept.encode() + sentences(60, language, 3)
        kept = (kept + sentences(30, language, 5)).decode().replace("\u2028", " ").replace("\x0c", " ").split("\n")[:-1]
        assert lines(text / f"tok.train.{language}") == moses(language, kept)
    report = "pairs kept: 303 of 311; dropped: empty 2, too long 3, lengths too different 2, not UTF-8 1"
    assert report in said and (text / "cleaned").read_text() == report + "\n"
    assert f"not the original: {text}/raw.train.en has 311 lines, not 4548885" in said

    counts = [int(line.split()[1]) for line in lines(out / "dict.de.txt")]
    subwords = [
        word for language in ("en", "de") for line in lines(text / f"bpe.train.{language}") for word in line.split()
    ]
    assert counts == sorted(counts, reverse=True) and sum(counts) == len(subwords)
    assert (out / "dict.de.txt").read_bytes() == (out / "dict.en.txt").read_bytes()
    assert not [name for name in files(out) if ".part" in name or "binarizing" in name]
    assert_leads_to_the_table("wmt14_en_de", out, ["softmax", "mixtape"], tmp_path, capsys)


@pytest.mark.slow
def test_merges_are_subword_nmts(en_de):
    """Learned from words and counts as from the texts, and applied as its own program does."""
    text = en_de[0] / "text"
    both = io.StringIO((text / "tok.train.en").read_text("utf-8") + (text / "tok.train.de").read_text("utf-8"))
    codes = io.StringIO()
    learn_bpe.learn_bpe(both, codes, 60)
    assert (text / "codes").read_text("utf-8") == codes.getvalue()
    bpe = apply_bpe.BPE(codes)
    for name in ("train.en", "train.de", "test.de"):
        tokens = (text / f"tok.{name}").read_text("utf-8").splitlines(keepends=True)
        assert (text / f"bpe.{name}").read_text("utf-8") == "".join(map(bpe.process_line, tokens))


# Each stage and the file that it is killed over.
STAGES = ["raw.train.de", "tok.train.de", "tok.test.en", "words", "codes", "bpe.train.en", "bpe.test.de"]


@pytest.mark.slow
def test_killed_at_each_stage_with_two_processes_gives_the_same_bytes(en_de, archives, tmp_path):
    out = tmp_path / "en_de"
    args = ["wmt14_en_de", "prepare.sh", "--from", archives, "--out", out, "--merges", 60, "--workers", 2]
    (out / "text").mkdir(parents=True)
    for stage in STAGES:
        part = out / "text" / f"{stage}.part"
        os.mkfifo(part)  # who opens it to write waits for a reader, that is, for ever
        process = start(*args, PYTHONHASHSEED=len(stage))
        wait_for_stage(process, stage)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (out / "text" / stage).exists()
        part.unlink()
        part.write_bytes(b"half a li")
    (out / "binarizing").mkdir()  # as if killed while binarizing
    (out / "binarizing" / "dict.en.txt").write_text("half\n")
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert files(out) == files(en_de[0])


def wait_for_stage(process, stage):
    """Until prepare.sh says that it has come to the stage, and a little longer."""
    for line in process.stderr:
        if line.startswith("prepare.sh: ") and line.rstrip().split("/")[-1] in (stage, stage.rsplit(".", 1)[0]):
            time.sleep(0.5)
            assert process.poll() is None
            return
    raise AssertionError(f"prepare.sh ended before {stage}")


@pytest.mark.slow
def test_full_disk(en_de, archives, tmp_path):
    """ENOSPC while a file is written, at one stage after the other: said, nothing lost, and the next run goes on."""
    out = shutil.copytree(en_de[0], tmp_path / "en_de")
    text, args = out / "text", ["wmt14_en_de", "prepare.sh", "--from", archives, "--out", out, "--merges", 60]
    before = files(out)
    for path in [*out.glob("*.*"), *text.glob("*")]:
        if path.name.split(".")[0] not in ("raw", "settings", "checksums"):
            path.unlink()
    for stage, said in (
        ("tok.train.de", f"prepare_parallel.py: [Errno 28] No space left on device: '{text}'"),
        ("words", f"prepare_parallel.py: [Errno 28] No space left on device: '{text}'"),
        ("codes", f"prepare.sh: subword-nmt could not make {text}/codes, see above; running it again goes on"),
    ):
        there = files(out)
        (text / f"{stage}.part").symlink_to("/dev/full")
        done = run(*args, "--workers", 2)
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == said
        assert "No space left on device" in done.stderr and not (text / stage).exists()
        assert {path: there[path] for path in there if not path.endswith(".part")}.items() <= files(out).items()
        (text / f"{stage}.part").unlink(missing_ok=True)

    tool = Path(sys.executable).parent / "fairseq-preprocess"
    full = 'for folder; do :; done; mkdir "$folder"; ln -s /dev/full "$folder/train.en-de.de.bin"'
    venv = stub(tmp_path / "venv", fairseq_preprocess=f'{full}; exec {tool} "$@"')
    message = "prepare.sh: fairseq-preprocess failed (1): OSError: [Errno 28] No space left on device; "
    assert mistake(*args, MIXTAPE_VENV=venv) == message + f"running it again goes on from {text}"
    assert not list(out.glob("dict.*"))

    output(*args)
    assert files(out) == before


@needs_curl
def test_full_disk_while_downloading(archives, tmp_path):
    """And then the download goes on with what it has, until the next archive, which is not there."""
    server, text = tmp_path / "server", tmp_path / "out" / "text"
    whole = (archives / EUROPARL).read_bytes()
    (server / EUROPARL).parent.mkdir(parents=True)
    (server / EUROPARL).write_bytes(whole)
    text.mkdir(parents=True)
    part = text / f"{Path(EUROPARL).name}.part"
    part.symlink_to("/dev/full")
    args = ["wmt14_en_de", "prepare.sh", "--out", tmp_path / "out"]
    message = f"prepare.sh: {part} cannot be written, the disk is full perhaps; what is there is kept, and running it "
    assert mistake(*args, WMT_URL=server.as_uri()) == message + "again goes on"
    part.unlink()
    part.write_bytes(whole[:500])
    message = f"prepare.sh: {(server / COMMON_CRAWL).as_uri()} could not be downloaded whole; "
    assert mistake(*args, WMT_URL=server.as_uri()).startswith(message)
    assert part.with_suffix("").read_bytes() == whole

    (text / "settings").unlink()  # which tell how the text was begun, and must not be there by half
    (text / "settings.part").symlink_to("/dev/full")
    done = run(*args, WMT_URL=server.as_uri())
    assert done.returncode == 1 and not (text / "settings").exists()
    assert "No space left on device" in done.stderr.splitlines()[-1]


@needs_curl
@pytest.mark.slow
def test_english_french_downloaded(archives, tmp_path, capsys):
    """From folders in place of servers: one is not there, one has a damaged copy; half of an archive is here."""
    damaged, text = tmp_path / "damaged", tmp_path / "en_fr" / "text"
    content = (archives / EUROPARL).read_bytes()
    (damaged / "wmt13").mkdir(parents=True)
    (damaged / EUROPARL).write_bytes(content[:-20] + bytes(20))
    text.mkdir(parents=True)
    (text / "training-parallel-commoncrawl.tgz.part").write_bytes((archives / COMMON_CRAWL).read_bytes()[:500])
    environment = {
        "WMT_URL": f"{(tmp_path / 'nowhere').as_uri()} {damaged.as_uri()} {archives.as_uri()}",
        "WMT14_TEST_MD5": hashlib.md5((archives / "wmt14" / "test-full.tgz").read_bytes()).hexdigest(),
    }
    args = ["wmt14_en_fr", "prepare.sh", "--out", tmp_path / "en_fr"]
    args += "--merges 90 --bpe sentencepiece --workers 2".split()
    done = run(*args, **environment)
    assert done.returncode == 0, done.stderr
    assert f"{damaged}/{EUROPARL}" in done.stderr
    for path in archives.rglob("*.t*"):
        copy = text / path.name
        if path.parent.name != "translation-task":
            assert copy.read_bytes() == path.read_bytes()
            assert f"{hashlib.sha256(copy.read_bytes()).hexdigest()}  {copy.name}" in lines(text / "checksums")
    for language in ("en", "fr"):
        texts = [
            sentences(150, language, 1),
            crawl(language),
            *(sentences(n, language, s) for n, s in ((20, 4), (30, 6), (40, 7))),
        ]
        assert len(lines(text / f"raw.train.{language}")) == sum(text.count(b"\n") for text in texts)
        assert lines(text / f"raw.train.{language}")[-1] == sentences(40, language, 7).decode().split("\n")[-2]
        valid = segments(5, language, 2012) + segments(5, language, 2013)
        assert lines(text / f"raw.valid.{language}") == valid
        assert lines(text / f"raw.test.{language}") == segments(6, language, 2014)
        for split in ("train", "test"):  # sentencepiece gives back the tokens as they were
            subwords = lines(text / f"bpe.{split}.{language}")
            joined = [line.replace(" ", "").replace("\u2581", " ").strip() for line in subwords]
            assert joined == lines(text / f"tok.{split}.{language}")
        assert (tmp_path / "en_fr" / f"train.en-fr.{language}.bin").stat().st_size > 0
    # The archives are no longer needed, and what is there is not made again.
    before = files(tmp_path / "en_fr")
    assert run(*args, **{**environment, "WMT_URL": "file:///nowhere"}).returncode == 1  # other settings
    assert run(*args, **environment).returncode == 0
    assert files(tmp_path / "en_fr") == before
    assert_leads_to_the_table("wmt14_en_fr", tmp_path / "en_fr", ["moc", "mos"], tmp_path, capsys)


@needs_curl
def test_a_wrong_download_is_never_used(archives, tmp_path):
    """What unpacks well and yet has not the known checksum."""
    text = tmp_path / "out" / "text"
    text.mkdir(parents=True)
    for language in ("en", "de"):
        for split in ("train", "valid"):
            (text / f"raw.{split}.{language}").write_text("a\n")
    url = archives.as_uri()
    message = mistake("wmt14_en_de", "prepare.sh", "--out", tmp_path / "out", WMT_URL=url)
    said = f"prepare.sh: {url}/wmt14/test-full.tgz could not be downloaded whole; run it again, or give a local copy as"
    assert message == said + " --from"
    assert not list(text.glob("test-full*")) and not list(text.glob("raw.test*"))


def damage(folder, how):
    """Makes the first archive wrong in a way; what prepare.sh says of it."""
    path = folder / EUROPARL
    content = path.read_bytes()
    english, german = "training/europarl-v7.de-en.en", "training/europarl-v7.de-en.de"
    if how == "missing":
        path.unlink()
        return f"--from {folder} has no {path.name}; it is at https://www.statmt.org/{EUROPARL} or "
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
        return f"{path} is damaged or incomplete: "
    if how == "corrupt":  # its checksum, which comes after all of the text
        path.write_bytes(content[:-8] + bytes(4) + content[-4:])
        return f"{path} is damaged or incomplete: CRC check failed"
    if how == "no archive":
        path.write_text("<html>404</html>")
        return f"{path} is damaged or incomplete: "
    if how == "lines":
        write_archive(path, {english: b"a\nb\n", german: b"a\n"})
        return f"{path}: europarl-v7.de-en.en has 2 lines and europarl-v7.de-en.de 1; they must be translations line by"
    if how == "empty":
        write_archive(path, {english: b"", german: b""})
        return f"europarl-v7.de-en.en of {path} is empty"
    if how == "file missing":
        write_archive(path, {english: b"a\n"})
        return f"{path} has no file europarl-v7.de-en.de"
    write_archive(path, {english: b"a\n", german: b"a\n", "../../outside": b"x\n"})
    return f"{path} is refused: its member '../../outside' lies outside its folder"


DAMAGES = ["missing", "truncated", "corrupt", "no archive", "lines", "empty", "file missing", "path"]


@pytest.mark.parametrize("how", DAMAGES)
def test_wrong_archives(how, archives, tmp_path):
    folder = shutil.copytree(archives, tmp_path / "archives")
    message = damage(folder, how)
    said = mistake("wmt14_en_de", "prepare.sh", "--from", folder, "--out", tmp_path / "out")
    assert said.split(".py: " if ".py: " in said else ".sh: ", 1)[1].startswith(message)
    assert not list(tmp_path.rglob("raw.*")) and not list(tmp_path.rglob("outside"))


def test_an_archive_that_has_changed(archives, tmp_path):
    folder, out = shutil.copytree(archives, tmp_path / "archives"), tmp_path / "out"
    args = ["wmt14_en_de", "prepare.sh", "--from", folder, "--out", out]
    (folder / COMMON_CRAWL).unlink()
    assert "has no training-parallel-commoncrawl.tgz" in mistake(*args)
    shutil.copy(archives / COMMON_CRAWL, folder / COMMON_CRAWL)
    write_archive(folder / EUROPARL, {f"europarl-v7.de-en.{language}": b"a\n" for language in ("en", "de")})
    said = f"prepare.sh: {folder / EUROPARL} is not the file that {out} was begun with; remove {out} to begin again"
    assert mistake(*args) == said


def test_text_to_evaluate_on_must_be_whole(tmp_path):
    """Nothing is dropped from it, so what is not UTF-8 is an error."""
    archive = write_archive(tmp_path / "dev.tgz", {"a.en": b"a\n\n", "a.de": b"caf\xe9\n\n"})
    with pytest.raises(ValueError, match="a.de of .*dev.tgz, line 1 is not UTF-8 text"):
        prepare_parallel.extract(tmp_path / "raw", ["en", "de"], [f"{archive}:a.en:a.de"], strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dev.tgz"]
    prepare_parallel.extract(tmp_path / "raw", ["en", "de"], [f"{archive}:a.en:a.de"], strict=False)
    prepare_parallel.tokenize_files(tmp_path / "raw", tmp_path / "tok", ["en", "de"], clean=False, workers=1)
    assert (tmp_path / "tok.de").read_text(encoding="utf-8") == "caf \ufffd\n\n"


def test_options():
    for example in ("wmt14_en_de", "wmt14_en_fr", "multi30k"):
        for option, value, said in (
            ("--bpe", "x", "--bpe is 'x', allowed are subword-nmt and sentencepiece"),
            ("--workers", 0, "--workers is '0', allowed is a positive whole number"),
            ("--merges", "1k", "--merges is '1k', allowed is a positive whole number"),
            ("--from", "nowhere", "--from nowhere is no folder that can be read"),
            ("--shards", 1, "unknown option --shards; see prepare.sh --help"),
        ):
            assert mistake(example, "prepare.sh", option, value) == f"prepare.sh: {said}"
        assert output(example, "prepare.sh", "--help").startswith("usage: prepare.sh [--from DIR]")


# ------------------------------------------------------------------------------------------ the same as the slow tools

ODD = [
    *"\"'`´‘’‚„“”«»…–—.,:;!?()[]%&|<>@#$-_/*+=~^{}\\",
    *"\u00a0\u2009\u3000\t\x01\u00ad\ufeff",
    *"'' .. ... .\" .' a Z ß É 9 10 3,5 nº ºC cm U.S. z.B. Dr. No. Nr. M. d' DOTMULTI".split(),
    *"中 。 я ٣ e\u0301 😀 € isn't http://a.b/c?d=e&f x@y.org".split(),
    *(" ", "  ", ". ", ", ", " .", " ,", "word ", "Wort "),
]


@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_tokens_are_sacremoses(language):
    rng = random.Random(language)
    texts = ["".join(rng.choices(ODD, k=rng.randint(0, 25))) for _ in range(3000)]
    if has_real_data("multi30k"):
        texts += real_lines(f"multi30k/train.{language}", 3000)
    prepare_parallel.prepare_tokens([language], False)
    assert [prepare_parallel.tokenize(text, 0) for text in texts] == moses(language, texts)


def test_subwords_are_subword_nmts(tmp_path, monkeypatch):
    """Also where the words remembered are more than allowed, and are forgotten."""
    monkeypatch.setattr(prepare_parallel, "MAX_CACHED_WORDS", 5)
    rng = random.Random(1)
    words = ["".join(rng.choices("abcé", k=rng.randint(1, 9))) for _ in range(300)]
    text = [" ".join(rng.choices(words, k=rng.randint(0, 9))) + "\n" for _ in range(500)]
    text += ["\n", " \n", "  \n", " abc\n", "abc \n", "  a  bc   é  \n"]
    with open(tmp_path / "codes", "w", encoding="utf-8") as file:
        learn_bpe.learn_bpe(io.StringIO("".join(text)), file, 50)
    with open(tmp_path / "codes", encoding="utf-8") as file:
        bpe = apply_bpe.BPE(file)
    subwords = prepare_parallel.Subwords(tmp_path / "codes")
    assert [subwords.line(line[:-1]) + "\n" for line in text] == list(map(bpe.process_line, text))
    assert len(subwords) <= 5


@pytest.mark.parametrize("text", [b"a b\nc", b"a b\nc\n", b"c"])
def test_a_last_line_without_an_end_gets_its_subwords(text, tmp_path):
    (tmp_path / "codes").write_text("#version: 0.2\nx y\n")
    (tmp_path / "text").write_bytes(text)
    prepare_parallel.apply_subwords(str(tmp_path / "codes"), str(tmp_path / "text"), str(tmp_path / "bpe"), 1)
    assert (tmp_path / "bpe").read_bytes() == text.rstrip(b"\n") + b"\n"


def test_words_are_counted_in_bounded_memory(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("b a\nb c\nb a é\n" * 1500, encoding="utf-8")
    (tmp_path / "more").write_text("once upon b\n", encoding="utf-8")
    prepare_parallel.count_words([tmp_path / "text", tmp_path / "more"], tmp_path / "words", workers=2)
    expected = "b 4501\na 3000\nc 1500\né 1500\nonce 1\nupon 1\n"
    assert (tmp_path / "words").read_text(encoding="utf-8") == expected
    monkeypatch.setattr(prepare_parallel, "MAX_COUNTED_WORDS", 5)
    monkeypatch.setattr(prepare_parallel, "MAX_LEARNED_WORDS", 3)
    prepare_parallel.count_words([tmp_path / "text", tmp_path / "more"], tmp_path / "words", workers=1)
    assert (tmp_path / "words").read_text(encoding="utf-8") == "b 4501\na 3000\nc 1500\n"


def test_a_process_that_is_killed_is_noticed(tmp_path):
    (tmp_path / "text").write_text("a\n" * 5)
    with pytest.raises(ValueError, match="one of the processes was killed"):
        list(
            prepare_parallel.in_order(
                kill_oneself, prepare_parallel.chunks_of(tmp_path / "text"), 2, prepare_parallel.nothing
            )
        )


def kill_oneself(chunk):
    os.kill(os.getpid(), signal.SIGKILL)


def test_words_seen_once_are_forgotten_first(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_parallel, "MAX_COUNTED_WORDS", 3)
    (tmp_path / "text").write_text("a a b c d\n", encoding="utf-8")
    prepare_parallel.count_words([tmp_path / "text"], tmp_path / "words", workers=1)
    assert (tmp_path / "words").read_text(encoding="utf-8") == "a 2\n"


def test_a_line_of_10000_characters_is_kept():
    prepare_parallel.prepare_tokens(["en", "de"], clean=True)
    for length, fate in (10_000, "kept"), (10_001, "too long"):
        line = (("a" * 99 + " ") * 101)[:length].encode()
        assert prepare_parallel.tokenize_pairs(([line], [line]))[1] == {fate: 1}


@pytest.mark.parametrize("number", [3, 4, 6])
def test_texts_of_other_lengths_are_no_pair(number, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_parallel, "CHUNK", 2)
    paths = tmp_path / "first", tmp_path / "second"
    for path, count in zip(paths, (2, number)):
        path.write_text("a\n" * count, encoding="utf-8")
    with pytest.raises(ValueError, match="differ in their number of lines"):
        list(prepare_parallel.paired_chunks(*paths))
