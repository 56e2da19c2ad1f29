"""examples/{ptb,wikitext2,one_billion_word,text8} on small texts made here: prepare.sh, train.sh and evaluate.sh."""

import gzip
import hashlib
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import recipes
import torch
from conftest import USER_DIR
from fairseq import options
from fairseq.data import Dictionary, data_utils
from fairseq.tokenizer import tokenize_line
from recipes import PRINT, ROOT, load_script, machine, mistake, output, run, stub, write_archive

SPLITS = ("train", "valid", "test")


def files(folder):
    """Name -> content of all that is in a folder, but for the log, which holds the folder's name."""
    return {
        name: content
        for name, content in recipes.files(folder).items()
        if Path(name).name not in ("preprocess.log", "settings")
    }


def decoded(folder, split):
    """The lines of a binarized split, as lists of symbols with </s>."""
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(folder / split), dictionary)
    return [[dictionary[token] for token in lines[i]] for i in range(len(lines))]


# ---------------------------------------------------------------------------------- Penn Treebank and WikiText-2


def sentences(count, seed):
    rng = random.Random(seed)
    words = ["the", "<unk>", "N", "$", "naïve", "u.s.", "'s", *(f"w{n}" for n in range(20))]
    return "".join(
        " " + " ".join(rng.choices(words, [1 / (n + 1) for n in range(27)], k=rng.randrange(9))) + " \n"
        for _ in range(count)
    )


@pytest.fixture(scope="module")
def ptb_text(tmp_path_factory):
    """ptb.*.txt: plain and compressed; blank lines; a word that test alone has; a last line that does not end."""
    folder = tmp_path_factory.mktemp("ptb_text")
    with gzip.open(folder / "ptb.train.txt.gz", "wt", encoding="utf-8") as file:
        file.write(sentences(300, seed=1))
    (folder / "ptb.valid.txt").write_text(sentences(30, seed=2), encoding="utf-8")
    (folder / "ptb.test.txt").write_text(sentences(30, seed=3) + " only-here the", encoding="utf-8")
    return folder


def expected_lines(text):
    return [[*line.split(), "</s>"] for line in text.rstrip("\n").split("\n")]


@pytest.fixture(scope="module")
def ptb(ptb_text, tmp_path_factory):
    out, flags = tmp_path_factory.mktemp("ptb") / "data", ["--from", ptb_text]
    # At first fairseq-preprocess dies with half of its files written.
    half = (
        'while [ "$1" != --destdir ]; do shift; done; mkdir "$2"; echo x >"$2/dict.txt"; echo x >"$2/old.bin"; exit 1'
    )
    broken = stub(out.parent / "broken", fairseq_preprocess=half)
    assert run("ptb", "prepare.sh", *flags, "--out", out, MIXTAPE_VENV=broken).returncode == 1
    assert {path.name for path in out.iterdir()} == {"text", "binarizing"}
    (out / "text" / "valid").unlink()
    (out / "text" / "valid.part").write_text("ha")  # as if killed earlier

    done = run("ptb", "prepare.sh", *flags, "--out", out)
    assert done.returncode == 0, done.stderr
    counts = [sum(map(len, decoded(out, split))) for split in SPLITS]
    types = len({word for split in SPLITS for line in decoded(out, split) for word in line})
    assert done.stdout.endswith(
        f"dictionary of {types + 2} entries, of which <s> and <pad> do not count; tokens with </s>: "
        f"{types} types, train {counts[0]}, valid {counts[1]}, test {counts[2]}\n"
    )
    assert "prepare.sh: not the papers' text, which has (tokens with </s>) 10000 types, train 929589, " in done.stderr
    return out


@pytest.mark.slow
def test_words(ptb, ptb_text, tmp_path):
    texts = {split: (ptb_text / f"ptb.{split}.txt").read_text("utf-8") for split in ("valid", "test")}
    texts["train"] = gzip.decompress((ptb_text / "ptb.train.txt.gz").read_bytes()).decode()
    for split in SPLITS:
        assert decoded(ptb, split) == expected_lines(texts[split])
    dictionary = Dictionary()  # as fairseq makes it
    for split in SPLITS:
        Dictionary.add_file_to_dictionary(str(ptb / "text" / split), dictionary, tokenize_line, 1)
    dictionary.finalize(padding_factor=1)
    dictionary.save(str(tmp_path / "dict.txt"))
    assert (ptb / "dict.txt").read_bytes() == (tmp_path / "dict.txt").read_bytes()
    assert not [name for name in files(ptb) if name.endswith(".part") or "binarizing" in name]


@pytest.mark.slow
def test_words_prepared_again_stay_as_they_are(ptb, ptb_text):
    times = {path: path.stat().st_mtime_ns for path in ptb.rglob("*")}
    output("ptb", "prepare.sh", "--from", ptb_text, "--out", ptb)
    assert {path: path.stat().st_mtime_ns for path in ptb.rglob("*")} == times


@pytest.mark.slow
def test_words_to_evaluate_a_model_on(ptb, tmp_path):
    """WikiText-2 without train, with the dictionary of a model: a word that it lacks is <unk>."""
    folder, out = tmp_path / "text", tmp_path / "data"
    folder.mkdir()
    (folder / "wiki.valid.txt").write_text(" \n = the = \n", encoding="utf-8")
    with gzip.open(folder / "wiki.test.tokens.gz", "wt", encoding="utf-8") as file:
        file.write("the w1\r\n\n")
    args = ["wikitext2", "prepare.sh", "--from", folder, "--out", out]
    assert mistake(*args) == (
        f"prepare.sh: --from {folder} has no wiki.train.tokens or wiki.train.txt, plain or .gz; "
        "to evaluate without it, give the --dict of the model's data"
    )
    shutil.rmtree(out)
    done = run(*args, "--dict", ptb / "dict.txt")
    assert done.returncode == 0 and "valid 5, test 4" in done.stdout, done.stderr
    assert "not the papers' text" not in done.stderr
    assert "prepare.sh: 40.0% of the tokens of valid are not in the dictionary, and <unk> in the data\n" in done.stderr
    assert "of the tokens of test" not in done.stderr
    assert decoded(out, "valid") == [["</s>"], ["<unk>", "the", "<unk>", "</s>"]]
    assert decoded(out, "test") == [["the", "w1", "</s>"], ["</s>"]]
    assert (out / "dict.txt").read_bytes() == (ptb / "dict.txt").read_bytes()
    assert not (out / "train.bin").exists()


def test_prepare_refuses_mistakes(ptb_text, tmp_path):
    folder = shutil.copytree(ptb_text, tmp_path / "text")
    flags = ["--from", folder, "--out", tmp_path / "out"]
    (folder / "ptb.valid.txt").unlink()
    message = f"prepare.sh: --from {folder} has neither ptb.valid.txt nor ptb.valid.txt.gz"
    assert mistake("ptb", "prepare.sh", *flags) == message
    (folder / "ptb.valid.txt").write_text("")
    assert mistake("ptb", "prepare.sh", *flags) == f"prepare.sh: {folder}/ptb.valid.txt is empty"
    (folder / "ptb.valid.txt").write_bytes(b"caf\xe9\n")
    assert mistake("ptb", "prepare.sh", *flags) == f"prepare.sh: {folder}/ptb.valid.txt cannot be read as UTF-8 text"
    assert not (tmp_path / "out" / "text" / "valid").exists()
    assert "was prepared with other settings" in mistake("ptb", "prepare.sh", *flags[2:], "--from", tmp_path)
    for example in ("ptb", "wikitext2", "text8"):
        message = "prepare.sh: --from nowhere is no folder that can be read"
        assert mistake(example, "prepare.sh", "--from", "nowhere") == message
        assert "--help" in mistake(example, "prepare.sh", "--form", "x")
        message = "prepare.sh: --workers is '0', allowed is a positive whole number"
        assert mistake(example, "prepare.sh", "--workers", 0) == message
    assert mistake("ptb", "prepare.sh", "--dict", "nowhere") == "prepare.sh: --dict nowhere is no file"


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_downloads_are_checked(ptb_text, tmp_path):
    """From a folder in place of the server: what is not the original is not used."""
    (tmp_path / "ptb.train.txt").write_text("not the Penn Treebank\n")
    url = tmp_path.as_uri()
    message = (
        f"prepare.sh: {url}/ptb.train.txt could not be downloaded whole; run it again, or give a local copy as --from"
    )
    assert mistake("ptb", "prepare.sh", "--out", tmp_path / "ptb", PTB_URL=url) == message
    assert sorted(files(tmp_path / "ptb")) == []
    with zipfile.ZipFile(tmp_path / "wiki.zip", "w") as archive:
        archive.writestr("wikitext-2/wiki.train.tokens", " = a = \n")
    whole = (tmp_path / "wiki.zip").read_bytes()
    for damaged in (b"PK no archive", whole.replace(b" = a = ", b" = b = "), whole[:-10]):
        (tmp_path / "wiki.zip").write_bytes(damaged)
        done = mistake("wikitext2", "prepare.sh", "--out", tmp_path / "wt2", WIKITEXT2_URL=url + "/wiki.zip")
        assert "wiki.zip could not be downloaded whole" in done
    (tmp_path / "wiki.zip").write_bytes(whole)
    done = mistake("wikitext2", "prepare.sh", "--out", tmp_path / "wt2", WIKITEXT2_URL=url + "/wiki.zip")
    assert done.endswith("holds no wiki.valid.tokens")
    assert (tmp_path / "wt2" / "text" / "train").read_text() == " = a = \n"


@pytest.mark.slow
@pytest.mark.skipif("MIXTAPE_DATA" not in os.environ, reason="MIXTAPE_DATA does not name the folder of real data")
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_penn_treebank_itself(tmp_path):
    """As if downloaded, the first half by an earlier run."""
    for split in SPLITS:
        with gzip.open(Path(os.environ["MIXTAPE_DATA"]) / "ptb" / f"ptb.{split}.txt.gz") as file:
            (tmp_path / f"ptb.{split}.txt").write_bytes(file.read())
    text = tmp_path / "out" / "text"
    text.mkdir(parents=True)
    (text / "train.part").write_bytes((tmp_path / "ptb.train.txt").read_bytes()[:2_500_000])
    done = run("ptb", "prepare.sh", "--out", tmp_path / "out", PTB_URL=tmp_path.as_uri())
    assert done.stdout.endswith(
        "is ready: dictionary of 10002 entries, of which <s> and <pad> do not count; "
        "tokens with </s>: 10000 types, train 929589, valid 73760, test 82430\n"
    ), done.stderr
    assert "not the papers' text" not in done.stderr
    assert len(Dictionary.load(str(tmp_path / "out" / "dict.txt"))) == 10_002


# ------------------------------------------------------------------------------------------------------ training

TINY = "--embed-dim 8 --hidden-sizes 12,8 --gate-dim 4 --num-components 3 --log-interval 1 --num-workers 0 --cpu"
TINY = TINY.split()


def flags_of(example, data, tmp_path, *args):
    """What train.sh would hand to fairseq-train, as fairseq reads it."""
    folder = tmp_path / "-".join(map(str, (example, *args))).replace("/", ".")
    machine(folder, fairseq_train=PRINT)
    header, *lines = output(
        example, "train.sh", *args, "--data", data, "--save", folder / "save", MIXTAPE_VENV=folder
    ).splitlines()
    assert header.startswith("train.sh: commit ") and f"examples/{example}/train.sh {args[0]} " in header
    assert (folder / "save" / "train.log").read_text().splitlines() == [header, *lines]
    assert lines[lines.index("--user-dir") + 1] == USER_DIR
    return options.parse_args_and_arch(options.get_training_parser(), input_args=lines)


@pytest.mark.parametrize("layer", ["softmax", "mos", "moc", "mixtape"])
@pytest.mark.parametrize("example", ["ptb", "wikitext2"])
def test_flags_on_words(example, layer, tmp_path):
    """Section 1 of the papers' settings."""
    (tmp_path / "dict.txt").write_text("the 1\n")
    args = flags_of(example, tmp_path, tmp_path, layer)
    values = {
        ("ptb", True): (30, 20, None, 141, 500, None),
        ("ptb", False): (20, 12, None, 28, 1000, 110),
        ("wikitext2", True): (30, 80, None, 1882, 750, None),
        ("wikitext2", False): (15, 15, 5, 1882, 1000, 90),
    }[example, layer == "softmax"]
    assert ([values[0]], *values[1:]) == (
        args.lr, args.batch_size, args.small_batch_size, args.seed, args.max_epoch, args.max_segment_length,
    )  # fmt: skip
    assert args.output_layer == layer and args.arch == f"awd_lstm_lm_{example}" + (
        "" if layer == "softmax" else f"_{layer}"
    )
    assert (args.weight_decay, args.clip_norm, args.ar_alpha, args.tar_beta) == (1.2e-6, 0.25, 2, 1)
    assert (args.tokens_per_sample, args.segment_length_std, args.short_segment_probability) == (70, 5, 0.05)
    assert (args.optimizer, args.nonmono, args.averaging_epoch) == ("nt_asgd", 5, None)
    assert int(args.batch_size_valid) == 10


@pytest.mark.parametrize("example, rates", [("ptb", (30, 25)), ("wikitext2", (30, 20))])
def test_flags_of_finetuning(example, rates, tmp_path):
    (tmp_path / "dict.txt").write_text("the 1\n")
    for layer, rate in zip(("softmax", "mos"), rates):
        folder = tmp_path / f"{example}-{layer}---finetune"
        assert mistake(example, "train.sh", layer, "--finetune", "--data", tmp_path, "--save", folder / "save") == (
            f"train.sh: {folder}/save holds no checkpoint_best.pt; run train.sh {layer} without --finetune first"
        )
        best = folder / "first" / "checkpoint_best.pt"
        best.parent.mkdir(parents=True)
        best.write_bytes(b"")
        venv = machine(folder, fairseq_train=PRINT)
        flags = ["--finetune", "--data", tmp_path, "--save", best.parent]
        _, *lines = output(example, "train.sh", layer, *flags, MIXTAPE_VENV=venv).splitlines()
        args = options.parse_args_and_arch(options.get_training_parser(), input_args=lines)
        assert args.lr == [rate] and args.averaging_epoch == 0 and args.stop_when_nonmonotone
        assert args.finetune_from_model == str(best) and args.save_dir == str(best.parent / "finetuned")


@pytest.mark.parametrize("layer", ["softmax", "mos", "mixtape"])
def test_flags_on_one_billion_word(layer, tmp_path):
    for shard in ("shard00", "shard01", "shard02"):
        (tmp_path / shard).mkdir()
        (tmp_path / shard / "dict.txt").write_text("the 1\n")
    args = flags_of("one_billion_word", tmp_path, tmp_path, layer)
    assert args.data == f"{tmp_path}/shard00:{tmp_path}/shard01:{tmp_path}/shard02"
    assert args.arch == "awd_lstm_lm_one_billion" + ("" if layer == "softmax" else f"_{layer}")
    assert (args.lr, args.batch_size, args.tokens_per_sample) == ([20], 60, 35)
    assert (args.segment_length_std, args.short_segment_probability) == (0, 0)
    assert (args.dropout, args.input_dropout, args.hidden_dropout, args.weight_dropout) == (0, 0, 0, 0)
    assert (args.ar_alpha, args.tar_beta, args.nonmono, args.max_epoch) == (0, 0, 3, 15)


@pytest.mark.parametrize("layer, sizes", [("softmax", (1024, "1024")), ("mos7", (510, "910")), ("mos10", (452, "860"))])
def test_flags_on_text8(layer, sizes, tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    args = flags_of("text8", tmp_path, tmp_path, layer, "--lr", "1e-3")
    assert (args.embed_dim, args.hidden_sizes) == sizes
    assert args.remove_eos and args.report_bpc and args.dropout == 0
    assert args.lr == [1e-3]  # a later flag wins


def check_score(path, unit, tokens):
    count, bits, perplexity = re.fullmatch(
        rf"\w+: ([\d,]+) {unit}s, ([\d.]+) bits a {unit}, perplexity ([\d.]+)\n", path.read_text()
    ).groups()
    assert int(count.replace(",", "")) == tokens
    assert float(perplexity) == pytest.approx(2 ** float(bits), rel=1e-3)
    return float(bits)


@pytest.mark.slow
def test_train_and_finetune_on_words(ptb, tmp_path):
    save = tmp_path / "save"
    flags = ["--data", ptb, "--save", save, *TINY, "--batch-size", 4, "--max-epoch", 1]
    log = output("ptb", "train.sh", "mixtape", *flags)
    assert (save / "train.log").read_text() == log and "epoch 001" in log
    before = (save / "checkpoint_best.pt").read_bytes()
    log = output("ptb", "train.sh", "mixtape", "--finetune", *flags, "--max-update", 3)
    assert f"loading pretrained model from {save}/checkpoint_best.pt" in log and "averaged SGD from here on" in log
    assert (save / "checkpoint_best.pt").read_bytes() == before
    model = torch.load(save / "finetuned" / "checkpoint_best.pt", weights_only=True)["model"]
    assert model["decoder.layers.0.weight_hh"].shape == (48, 12)


@pytest.mark.parametrize(
    "example, flags",
    [
        ("ptb", "--tokens-per-sample 70"),
        ("wikitext2", "--tokens-per-sample 70"),
        ("one_billion_word", "--tokens-per-sample 35"),
        ("text8", "--remove-eos --tokens-per-sample 1000"),
    ],
)
def test_flags_of_evaluation(example, flags, tmp_path):
    data = tmp_path / "shard00" if example == "one_billion_word" else tmp_path  # which has the valid and test texts
    data.mkdir(exist_ok=True)
    (data / "dict.txt").write_text("the 1\n")
    (tmp_path / "checkpoint_best.pt").write_bytes(b"")
    said = 'echo "Evaluated 1,234 tokens in"; echo "Loss (base 2): 2.0000, Perplexity: 4.00"'
    venv = stub(tmp_path / "stub", fairseq_eval_lm=f'echo "$@" >>{tmp_path}/called; {said}')
    printed = output(example, "evaluate.sh", tmp_path, "--data", tmp_path, "--cpu", MIXTAPE_VENV=venv)
    unit = "character" if example == "text8" else "token"
    assert printed == "".join(
        f"{split}: 1,234 {unit}s, 2.0000 bits a {unit}, perplexity 4.00\n" for split in ("valid", "test")
    )
    calls = (tmp_path / "called").read_text().splitlines()
    assert all(call.startswith(f"{data} --user-dir {USER_DIR} --task bptt_language_modeling ") for call in calls)
    assert all(call.endswith(f" {flags} --cpu") for call in calls)
    assert "--gen-subset valid --batch-size 10 " in calls[0] and "--gen-subset test --batch-size 1 " in calls[1]

    broken = stub(tmp_path / "broken", fairseq_eval_lm="echo no memory; exit 1")
    message = mistake(example, "evaluate.sh", tmp_path, "--data", tmp_path, MIXTAPE_VENV=broken)
    assert message == "evaluate.sh: fairseq-eval-lm failed: no memory"


@pytest.mark.parametrize("example", ["ptb", "wikitext2"])
def test_dynamic_evaluation_and_cache(example, tmp_path):
    """The scripts get the example's data, checkpoint and hyper-parameters."""
    (tmp_path / "dict.txt").write_text("the 1\n")
    (tmp_path / "checkpoint_best.pt").write_bytes(b"")
    venv = stub(tmp_path / "stub", python='echo "$@"')
    flags = ["--data", tmp_path, "--dynamic", "--cache", "--cpu"]
    printed = output(example, "evaluate.sh", tmp_path, *flags, MIXTAPE_VENV=venv).splitlines()
    for line, script in zip(printed, ("dynamic_evaluation", "cache_pointer")):
        path, *args = line.split()
        assert path == str(ROOT / "scripts" / f"{script}.py")
        assert (tmp_path / f"{script}.txt").read_text() == line + "\n"
        args = load_script(script).parse_args(args)
        assert (args.data, args.path) == (str(tmp_path), f"{tmp_path}/checkpoint_best.pt")
        assert (args.dataset, args.subset, args.cpu) == (example, "test", True)
    assert len(printed) == 2


def test_train_and_evaluate_refuse_mistakes(tmp_path):
    for example in ("ptb", "wikitext2", "one_billion_word", "text8"):
        assert mistake(example, "train.sh", "maxout").startswith(
            "train.sh: the output layer is 'maxout', allowed are softmax, mos"
        )
        message = f"train.sh: --data {tmp_path} holds no binarized data; run prepare.sh first"
        assert mistake(example, "train.sh", "softmax", "--data", tmp_path, "--save", tmp_path / "save") == message
        assert not (tmp_path / "save").exists()
        message = f"evaluate.sh: {tmp_path} holds no checkpoint_best.pt"
        assert mistake(example, "evaluate.sh", tmp_path, "--data", tmp_path) == message
        assert "--help" in mistake(example, "evaluate.sh")
        for script in ("prepare.sh", "train.sh", "evaluate.sh"):
            assert output(example, script, "--help").startswith(f"usage: {script} ")


# ------------------------------------------------------------------------------------------------ One Billion Word

ONE_BILLION = "1-billion-word-language-modeling-benchmark-r13output"


def one_billion_text():
    """Name -> content of three training shards and the held-out parts, among other files of the archive."""
    rng = random.Random(5)
    words = ["The", "the", "ÄRGER", "Straße", ",", *(f"W{n}" for n in range(30))]

    def text(count):
        lines = [" ".join(rng.choices(words, [1 / (n + 1) for n in range(35)], k=6)) for _ in range(count)]
        return "".join(line + "\n" for line in lines).encode()

    files = {"README": b"read me\n"}
    for n in (3, 1, 2):
        files[f"training-monolingual.tokenized.shuffled/news.en-{n:05d}-of-00100"] = text(60)
    for n in (40, 30, 20, 10, 5, 0):
        files[f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{n:05d}-of-00050"] = text(10)
    return {f"{ONE_BILLION}/{name}": content for name, content in files.items()}


def shard_text(content, *numbers, heldout=False):
    pattern = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05d}-of-00050"
    pattern = pattern if heldout else "training-monolingual.tokenized.shuffled/news.en-{:05d}-of-00100"
    return "".join(content[f"{ONE_BILLION}/{pattern.format(n)}"].decode() for n in numbers)


@pytest.fixture(scope="module")
def one_billion(tmp_path_factory):
    content, folder = one_billion_text(), tmp_path_factory.mktemp("one_billion")
    write_archive(folder / f"{ONE_BILLION}.tar.gz", content)
    flags = ["--from", folder, "--out", folder / "data", "--shards", 2, "--types", 20]
    printed = output("one_billion_word", "prepare.sh", *flags)
    assert printed.endswith("data is ready: 2 shards, 20 types; tokens with </s>: train 840, valid 140, test 210\n")
    return folder / "data", content


@pytest.mark.slow
def test_one_billion_word(one_billion):
    data, content = one_billion
    train = [shard_text(content, n).lower() for n in (1, 2)]
    counts = {}
    for word in "".join(train).split():
        counts[word] = counts.get(word, 0) + 1
    kept = [line.split() for line in (data / "shard00" / "dict.txt").read_text("utf-8").splitlines()]
    # <unk> and </s> are the other two of 20 types; equally frequent words in alphabetical order
    assert kept == [[word, str(n)] for word, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:18]]
    assert "the" in counts and "The" not in counts and "ärger" in counts
    known = {word for word, _ in kept}
    expected = {
        ("shard00", "train"): train[0],
        ("shard01", "train"): train[1],
        ("shard00", "valid"): shard_text(content, 0, 10, heldout=True).lower(),
        ("shard00", "test"): shard_text(content, 20, 30, 40, heldout=True).lower(),
    }
    for (shard, split), text in expected.items():
        lines = [[word if word in known else "<unk>" for word in line.split()] + ["</s>"] for line in text.splitlines()]
        assert decoded(data / shard, split) == lines
    assert (data / "shard01" / "dict.txt").read_bytes() == (data / "shard00" / "dict.txt").read_bytes()
    assert not (data / "shard01" / "valid.bin").exists() and not (data / "shard02").exists()
    assert not [name for name in files(data) if name.endswith(".part")]


@pytest.mark.slow
def test_train_on_one_billion_word(one_billion, tmp_path):
    data, _ = one_billion
    flags = [*TINY, "--batch-size", 4, "--frequent-ratio", 0.5, "--lr", 1, "--max-epoch", 2]
    log = output("one_billion_word", "train.sh", "mixtape", "--data", data, "--save", tmp_path, *flags)
    assert f"{data}/shard00/train: 420 tokens" in log and f"{data}/shard01/train: 420 tokens" in log


def run_text(source, text, *args):
    """The script that reads the archive, alone."""
    script = ROOT / "examples" / "lib" / "prepare_one_billion_word.py"
    done = subprocess.run(
        [sys.executable, str(script), *map(str, (source, text, *args))], stderr=subprocess.PIPE, encoding="utf-8"
    )
    return done.returncode, done.stderr.splitlines()[-1] if done.stderr else ""


def link(name, target, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "member, reason",
    [
        (tarfile.TarInfo("../evil"), "lies outside its folder"),
        (tarfile.TarInfo(f"{ONE_BILLION}/../../evil"), "lies outside its folder"),
        (tarfile.TarInfo("/tmp/evil-of-the-archive"), "lies outside its folder"),
        (link(f"{ONE_BILLION}/link", "/etc/passwd", tarfile.SYMTYPE), "is neither a file nor a folder"),
        (link(f"{ONE_BILLION}/link", f"{ONE_BILLION}/README", tarfile.LNKTYPE), "is neither a file nor a folder"),
        (link(f"{ONE_BILLION}/pipe", "", tarfile.FIFOTYPE), "is neither a file nor a folder"),
    ],
)
def test_an_archive_that_is_not_safe_is_refused(member, reason, tmp_path):
    archive = tmp_path / "archive.tar.gz"
    write_archive(archive, one_billion_text(), member)
    message = f"prepare_one_billion_word.py: {archive} is refused: its member {member.name!r} {reason}"
    assert run_text(archive, tmp_path / "deep" / "text", "--shards", 2) == (1, message)
    assert not (tmp_path / "evil").exists() and not (tmp_path / "deep" / "evil").exists()
    assert files(tmp_path / "deep" / "text") == {}


def test_one_billion_word_refuses_what_is_not_whole(tmp_path):
    content, text = one_billion_text(), tmp_path / "text"
    first = f"{ONE_BILLION}/training-monolingual.tokenized.shuffled/news.en-00002-of-00100"
    content[first] += b"caf\xe9\n"
    folder = tmp_path / ONE_BILLION
    for name, data in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    code, message = run_text(folder, text, "--shards", 3)
    assert code == 1 and message.startswith(f"prepare_one_billion_word.py: {first} in {folder} is not UTF-8 text: ")
    assert sorted(files(text)) == sorted(
        [*(f"heldout.{n:02d}" for n in (0, 10, 20, 30, 40)), "train.00", "train.01.part"]
    )

    # goes on where it stopped
    (tmp_path / first).write_bytes(b"Two\r Words")
    times = {path: path.stat().st_mtime_ns for path in text.iterdir() if not path.name.endswith(".part")}
    code, message = run_text(folder, text, "--shards", 5)
    assert code == 1 and message == (
        f"prepare_one_billion_word.py: {folder} lacks 2 of the files that are needed, "
        "the first of them news.en-00004-of-00100"
    )
    assert (text / "train.01").read_text() == "two  words\n" and (text / "train.02").exists()
    assert {path: path.stat().st_mtime_ns for path in times} == times

    archive = tmp_path / "archive.tar.gz"
    write_archive(archive, one_billion_text())
    whole = archive.read_bytes()
    for damaged in (whole[:-500], whole[:-8] + bytes(4) + whole[-4:]):  # cut off; another checksum
        archive.write_bytes(damaged)
        code, message = run_text(archive, tmp_path / "other", "--shards", 3)
        assert code == 1 and message.startswith(f"prepare_one_billion_word.py: {archive} is damaged or incomplete: ")
        assert files(tmp_path / "other") == {}
    code, message = run_text(tmp_path / "nowhere", tmp_path / "other")
    assert code == 1 and "No such file" in message


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_one_billion_word_download(tmp_path):
    """From a folder in place of the server: goes on with a part; another checksum is refused."""
    write_archive(tmp_path / f"{ONE_BILLION}.tar.gz", one_billion_text())
    whole = (tmp_path / f"{ONE_BILLION}.tar.gz").read_bytes()
    part = tmp_path / "out" / "text" / f"{ONE_BILLION}.tar.gz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(whole[:100])
    flags = ["one_billion_word", "prepare.sh", "--out", tmp_path / "out"]
    address = tmp_path.as_uri()
    message = f"prepare.sh: {address}/{ONE_BILLION}.tar.gz could not be downloaded whole; "
    assert mistake(*flags, ONE_BILLION_URL=address) == message + "run it again, or give a local copy as --from"
    assert not part.exists() and not part.with_suffix("").exists()
    part.write_bytes(whole[:100])
    digest = hashlib.sha256(whole).hexdigest()
    message = mistake(*flags, ONE_BILLION_URL=address, ONE_BILLION_SHA256=digest)
    assert message.endswith("lacks 96 of the files that are needed, the first of them news.en-00004-of-00100")
    assert part.with_suffix("").read_bytes() == whole and not part.exists()
    message = "prepare.sh: --shards is 100, allowed is 1 to 99"
    assert mistake("one_billion_word", "prepare.sh", "--shards", 100) == message


# ----------------------------------------------------------------------------------------------------------- text8


@pytest.fixture(scope="module")
def text8(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("text8"), random.Random(8)
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", range(40, 13, -1), k=25_000))
    with zipfile.ZipFile(folder / "text8.zip", "w") as archive:
        archive.writestr("text8", text)
    flags = ["--from", folder, "--out", folder / "data", "--characters", "20001,1000,600"]
    printed = output("text8", "prepare.sh", *flags)
    assert printed.endswith("data is ready: 27 symbols, 20001 training, 1000 validation and 600 test characters\n")
    return folder / "data", text


@pytest.mark.slow
def test_text8(text8):
    data, text = text8
    parts = {"train": text[:20_001], "valid": text[20_001:21_001], "test": text[21_001:21_601]}
    for split, part in parts.items():
        lines = decoded(data, split)
        assert all(line[-1] == "</s>" for line in lines)
        assert "".join(symbol for line in lines for symbol in line[:-1]).replace("_", " ") == part
    assert [len(line) for line in decoded(data, "train")] == [10_001, 10_001, 2]
    assert len(Dictionary.load(str(data / "dict.txt"))) == 27 + 4


@pytest.mark.slow
def test_train_and_evaluate_on_text8(text8, tmp_path):
    data, text = text8
    flags = [*TINY, "--hidden-sizes", 12, "--batch-size", 8, "--max-update", 3, "--max-epoch", 1]
    log = output("text8", "train.sh", "mos7", "--data", data, "--save", tmp_path, *flags)
    assert "bpc" in log
    output("text8", "evaluate.sh", tmp_path, "--data", data, "--cpu")
    check_score(tmp_path / "valid.txt", "character", 1000)
    # hardly trained: not far from knowing nothing, and no mass is on </s> and <unk>
    assert check_score(tmp_path / "test.txt", "character", 600) == pytest.approx(math.log2(27), abs=0.3)


def test_text8_refuses_mistakes(tmp_path):
    flags = ["text8", "prepare.sh", "--from", tmp_path, "--out", tmp_path / "out"]
    assert mistake(*flags) == f"prepare.sh: --from has none of {tmp_path}/text8, text8.gz and text8.zip"
    (tmp_path / "text8").write_text("abc d")
    message = f"prepare.sh: {tmp_path}/out/text/text8 has 5 characters, "
    assert mistake(*flags) == message + "--characters 90000000,5000000,5000000 asks for 100000000"
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "text8").write_text("abc D1")
    message = f"prepare.sh: {tmp_path}/out/text/text8 is not text8: 2 of its bytes are neither a to z nor the space"
    assert mistake(*flags) == message
    assert "--characters is '1,2', allowed are three" in mistake(*flags, "--characters", "1,2")
