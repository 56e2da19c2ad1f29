"""examples/{ptb,wikitext2} on small texts made here; and what the scripts of all language models do with options."""

import gzip
import os
import random
import re
import shutil
import subprocess
import zipfile

import pytest
import torch
from conftest import USER_DIR
from fairseq import options
from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line
from real_data import real_path
from recipes import (
    HEADER,
    PRINT,
    ROOT,
    TINY_LSTM,
    binarized_files,
    decoded,
    load_script,
    machine,
    mistake,
    output,
    run,
    stub,
)

SPLITS = ("train", "valid", "test")


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
    assert not [name for name in binarized_files(ptb) if name.endswith(".part") or "binarizing" in name]


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
    dictionary = tmp_path / "dict.txt"
    shutil.copy(ptb / "dict.txt", dictionary)
    done = run(*args, "--dict", dictionary)
    assert done.returncode == 0 and "valid 5, test 4" in done.stdout, done.stderr
    assert "not the papers' text" not in done.stderr
    assert "prepare.sh: 40.0% of the tokens of valid are not in the dictionary, and <unk> in the data\n" in done.stderr
    assert "of the tokens of test" not in done.stderr
    assert decoded(out, "valid") == [["</s>"], ["<unk>", "the", "<unk>", "</s>"]]
    assert decoded(out, "test") == [["the", "w1", "</s>"], ["</s>"]]

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run(*args, "--dict", dictionary).returncode == 0
    dictionary.write_text("w1 2\nthe 1\n")  # of another model
    assert mistake(*args, "--dict", dictionary) == (
        f"prepare.sh: {out} was prepared with another {dictionary}; choose another --out or remove it"
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
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
        assert mistake(example, "prepare.sh", "--out", "") == "prepare.sh: --out is empty; see prepare.sh --help"
    assert mistake("ptb", "prepare.sh", "--dict", "nowhere") == "prepare.sh: --dict nowhere is no file"


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_a_local_copy_after_a_failed_download(ptb_text, tmp_path):
    """What the message of the failed download advises; the same folder is refused once a file of it is there."""
    out = tmp_path / "out"
    failed = run("ptb", "prepare.sh", "--out", out, PTB_URL=(tmp_path / "nowhere").as_uri())
    assert failed.returncode == 1 and "or give a local copy as --from" in failed.stderr
    (out / "text" / "train.part").write_text("what came before the connection broke")
    output("ptb", "prepare.sh", "--from", ptb_text, "--out", out)
    assert decoded(out, "train")[-1] == expected_lines(sentences(300, seed=1))[-1]
    assert "was prepared with other settings" in mistake("ptb", "prepare.sh", "--out", out, PTB_URL=tmp_path.as_uri())


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_downloads_are_checked(ptb_text, tmp_path):
    """From a folder in place of the server: what is not the original is not used."""
    (tmp_path / "ptb.train.txt").write_text("not the Penn Treebank\n")
    url = tmp_path.as_uri()
    message = (
        f"prepare.sh: {url}/ptb.train.txt could not be downloaded whole; run it again, or give a local copy as --from"
    )
    assert mistake("ptb", "prepare.sh", "--out", tmp_path / "ptb", PTB_URL=url) == message
    assert sorted(binarized_files(tmp_path / "ptb")) == []
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
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_penn_treebank_itself(tmp_path):
    """As if downloaded, the first half by an earlier run."""
    for split in SPLITS:
        with gzip.open(real_path(f"ptb/ptb.{split}.txt.gz")) as file:
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


def flags_of(example, data, tmp_path, *args):
    """What train.sh would hand to fairseq-train, as fairseq reads it."""
    folder = tmp_path / "-".join(map(str, (example, *args))).replace("/", ".")
    machine(folder, fairseq_train=PRINT)
    header, *lines = output(
        example, "train.sh", *args, "--data", data, "--save", folder / "save", MIXTAPE_VENV=folder
    ).splitlines()
    assert re.match(rf"{HEADER}.*examples/{example}/train\.sh {args[0]} ", header)
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


@pytest.mark.slow
def test_train_and_finetune_on_words(ptb, tmp_path):
    save = tmp_path / "save"
    flags = ["--data", ptb, "--save", save, *TINY_LSTM, "--batch-size", 4, "--max-epoch", 1]
    log = output("ptb", "train.sh", "mixtape", *flags)
    assert (save / "train.log").read_text() == log and "epoch 001" in log
    assert "Saved checkpoint" in log  # what a rerun looks for
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
    assert all(f" {flags} --cpu --path {tmp_path}/checkpoint_best.pt --gen-subset " in call for call in calls)
    assert " --batch-size 10 " in calls[0] and " --batch-size 1 " in calls[1]
    assert [call.rpartition(" ")[2] for call in calls] == ["valid", "test"], "last, which counts"

    broken = stub(tmp_path / "broken", fairseq_eval_lm="echo no memory; exit 1")
    message = mistake(example, "evaluate.sh", tmp_path, "--data", tmp_path, MIXTAPE_VENV=broken)
    assert message == "evaluate.sh: fairseq-eval-lm failed: no memory"
    assert (tmp_path / "valid.txt").exists() and (tmp_path / "test.txt").exists()
    (tmp_path / "cache_pointer.txt").write_text("of the checkpoint before")
    os.utime(tmp_path / "cache_pointer.txt", (1, 1))
    (tmp_path / "dynamic_evaluation.txt").write_text("of this one")
    broken = stub(tmp_path / "half", fairseq_eval_lm=f'case $* in *"subset test"*) exit 1 ;; esac; {said}')
    mistake(example, "evaluate.sh", tmp_path, "--data", tmp_path, MIXTAPE_VENV=broken)
    assert not (tmp_path / "test.txt").exists(), "a score of the checkpoint before"
    assert not (tmp_path / "cache_pointer.txt").exists() and (tmp_path / "dynamic_evaluation.txt").exists()
    for option, other in (("--gen-subset", "text"), ("--sub", "text"), ("--path", "model")):
        message = mistake(example, "evaluate.sh", tmp_path, "--data", tmp_path, option, "valid", MIXTAPE_VENV=venv)
        assert message.startswith(f"evaluate.sh: another {other} is not allowed: ")


@pytest.mark.parametrize("script", ["prepare.sh", "train.sh", "evaluate.sh"])
def test_the_shells_search_path_for_folders_does_not_matter(script, tmp_path):
    command = ["bash", f"examples/ptb/{script}", "--help"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CDPATH": "/tmp:."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


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
    message = mistake(example, "evaluate.sh", tmp_path, *flags, "--decay", "0.05", MIXTAPE_VENV=venv)
    assert message.startswith("evaluate.sh: --dynamic and --cache at once take no further flags but --cpu, ")
    broken = stub(tmp_path / "broken", python="echo half a line; echo no memory >&2; exit 1")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert mistake(example, "evaluate.sh", tmp_path, *flags, MIXTAPE_VENV=broken) == "no memory"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before

    for name in ("valid.txt", "test.txt", "dynamic_evaluation.txt", "rank.json"):
        (tmp_path / name).write_text("of the checkpoint before")
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "predictions.json").write_text("of this one")
    output(example, "evaluate.sh", tmp_path, "--data", tmp_path, "--cache", MIXTAPE_VENV=venv)
    kept = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert kept == {"dict.txt", "checkpoint_best.pt", "cache_pointer.txt", "predictions.json"}


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
