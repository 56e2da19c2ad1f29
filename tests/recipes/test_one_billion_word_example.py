"""examples/one_billion_word on a small archive laid out as the original: prepare.sh and train.sh."""

import hashlib
import random
import shutil
import subprocess
import sys
import tarfile

import pytest
from recipes import ROOT, TINY_LSTM, binarized_files, decoded, mistake, output, tools, write_archive

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
    assert not [name for name in binarized_files(data) if name.endswith(".part")]


@pytest.mark.slow
def test_train_on_one_billion_word(one_billion, tmp_path):
    data, _ = one_billion
    flags = [*TINY_LSTM, "--batch-size", 4, "--frequent-ratio", 0.5, "--lr", 1, "--max-epoch", 2]
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
    assert binarized_files(tmp_path / "deep" / "text") == {}


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
    assert sorted(binarized_files(text)) == sorted(
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
        assert binarized_files(tmp_path / "other") == {}
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


def test_a_relative_folder_is_the_same_from_elsewhere(tmp_path):
    (tmp_path / "one" / "inner").mkdir(parents=True)
    script = ROOT / "examples" / "one_billion_word" / "prepare.sh"
    for folder, given in ((tmp_path, "one"), (tmp_path / "one" / "inner", "..")):
        command = ["bash", script, "--from", given, "--out", tmp_path / "out"]
        done = subprocess.run(command, cwd=folder, env=tools(), capture_output=True, text=True)
        assert done.returncode == 1 and "other settings" not in done.stderr  # it holds no text
    assert (tmp_path / "out" / "text" / "settings").read_text().startswith(f"from {tmp_path}/one, ")
