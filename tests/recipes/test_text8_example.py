"""examples/text8 on a small text made here: prepare.sh, train.sh and evaluate.sh."""

import math
import random
import re
import shutil
import zipfile

import pytest
from fairseq.data import Dictionary
from recipes import TINY_LSTM, decoded, mistake, output, run


def check_score(path, unit, tokens):
    count, bits, perplexity = re.fullmatch(
        rf"\w+: ([\d,]+) {unit}s, ([\d.]+) bits a {unit}, perplexity ([\d.]+)\n", path.read_text()
    ).groups()
    assert int(count.replace(",", "")) == tokens
    assert float(perplexity) == pytest.approx(2 ** float(bits), rel=1e-3)
    return float(bits)


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


def test_another_text_is_not_taken_for_the_one_before(tmp_path):
    flags = ["text8", "prepare.sh", "--from", tmp_path, "--out", tmp_path / "out", "--characters", "9,2,2"]
    for text in "a b c d e f g", "h i j k l m n":
        (tmp_path / "text8").write_text(text)
        done = run(*flags)
    assert f"{tmp_path}/out was prepared with another {tmp_path}/text8; choose" in done.stderr


@pytest.mark.slow
def test_train_and_evaluate_on_text8(text8, tmp_path):
    data, text = text8
    flags = [*TINY_LSTM, "--hidden-sizes", 12, "--batch-size", 8, "--max-update", 3, "--max-epoch", 1]
    log = output("text8", "train.sh", "mos7", "--data", data, "--save", tmp_path, *flags)
    assert "bpc" in log
    output("text8", "evaluate.sh", tmp_path, "--data", data, "--cpu")
    check_score(tmp_path / "valid.txt", "character", 1000)
    # hardly trained: not far from knowing nothing
    assert check_score(tmp_path / "test.txt", "character", 600) == pytest.approx(math.log2(27), abs=0.3)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_another_text_is_no_download_of_text8(tmp_path):
    flags = ["text8", "prepare.sh", "--out", tmp_path / "out", "--characters", "9,2,2"]
    url = (tmp_path / "text8.zip").as_uri()
    message = f"prepare.sh: {url} could not be downloaded whole; run it again, or give a local copy as --from"
    assert mistake(*flags, TEXT8_URL=url) == message
    with zipfile.ZipFile(tmp_path / "text8.zip", "w") as archive:
        archive.writestr("text8", "abcdefghijklm")
    message = f"{tmp_path}/out/text/text8 is not the text8 of the papers; remove {tmp_path}/out and run it again"
    assert mistake(*flags, TEXT8_URL=url).endswith(message)
    assert (tmp_path / "out" / "text" / "text8").read_text() == "abcdefghijklm"


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
    for characters in "1,2", "9223372036854775807,1,1":
        message = f"--characters is '{characters}', allowed are three"
        assert message in mistake(*flags, "--characters", characters)
