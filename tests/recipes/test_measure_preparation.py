"""examples/lib/measure_preparation.py: its texts, and what it sees of a program in stages."""

import subprocess
import sys
import tarfile
from collections import Counter

import pytest
from recipes import lines, load_script

measuring = load_script("measure_preparation")
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
# Two stages; in the second one, a child holds 200 MB for a second.
PROGRAM = """
echo "prepare.sh: needs a word or two" >&2
echo "prepare.sh: out/text/first" >&2; sleep 1
echo "prepare.sh: out/text/second" >&2
python3 -c 'import time; held = bytearray(b"x") * 200_000_000; time.sleep(1)'
"""


def test_texts_are_parallel_and_grow_as_real_ones_do(tmp_path):
    types = {}
    for pairs in 500, 2000:
        for language in "en", "fr":
            path = tmp_path / f"{pairs}.{language}"
            measuring.write_text(path, language, pairs)
            words = Counter(word for line in lines(path) for word in line.split())
            assert len(lines(path)) == pairs
            types[language, pairs] = len(words)
    measuring.write_text(tmp_path / "again", "en", 500)
    assert lines(tmp_path / "again") == lines(tmp_path / "500.en")
    for language in "en", "fr":  # four times the text: more words, and fewer than four times as many
        assert 1.2 < types[language, 2000] / types[language, 500] < 4


def test_archives_are_those_of_the_recipe(tmp_path):
    measuring.write_archives(tmp_path, 120)
    with tarfile.open(tmp_path / "wmt13" / "training-parallel-europarl-v7.tgz") as archive:
        text = archive.extractfile("europarl-v7.fr-en.fr").read().decode("utf-8")
    assert text.count("\n") == 120
    recipe = (measuring.ROOT / "examples" / "wmt14_en_fr" / "prepare.sh").read_text()
    for path in tmp_path.rglob("*.t*"):
        assert str(path.relative_to(tmp_path)) in recipe


@linux
def test_memory_of_each_stage_with_its_children():
    stages = measuring.measure(["bash", "-c", PROGRAM])
    assert list(stages)[-2:] == ["first", "second"]
    assert stages["first"][1] < 100e6 < 200e6 < stages["second"][1] < 400e6


@linux
def test_a_program_that_fails_says_why():
    with pytest.raises(SystemExit, match="bash ended with 3: no such thing"):
        measuring.measure(["bash", "-c", "echo no such thing >&2; exit 3"])


def test_a_folder_that_is_there_is_refused(tmp_path):
    command = [sys.executable, measuring.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"measure_preparation.py: {tmp_path} exists already")
    assert list(tmp_path.iterdir()) == []
