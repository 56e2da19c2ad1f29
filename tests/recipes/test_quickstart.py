"""The quickstart: its run from text to table, and what it says of a user's own data."""

import csv
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from recipes import load_script, stub, tools

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def quickstart(*options, cwd=None, path=None):
    """With the commands of the folder ``path`` instead of the real ones."""
    command = [SCRIPTS / "quickstart.sh", "--no-setup", *map(str, options)]
    environment = tools()
    if path:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, encoding="utf-8")


def write_parallel(folder, **changed):
    """20 pairs for each split in two languages; ``train_yy="..."`` replaces a file, None leaves it out."""
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for lang in ("xx", "yy"):
            text = "".join(f"{lang}a {lang}b {lang}{i % 5}\n" for i in range(20))
            text = changed.get(f"{split}_{lang}", text)
            if text is not None:
                (folder / f"{split}.{lang}").write_text(text, "utf-8", "surrogateescape")
    return folder


@pytest.mark.slow
def test_from_nothing_to_a_table_and_again(tmp_path):
    out = tmp_path / "out"
    # after 20 updates translating takes three times as long
    run = quickstart("--out", out, "--updates", "60")
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [row["output layer"] for row in rows] == ["softmax", "mixtape", "the truth"]
    truth = json.loads((out / "text" / "truth.json").read_text())
    assert float(rows[2]["test perplexity"]) == pytest.approx(truth["perplexity"], abs=0.01)
    for row in rows[:2]:  # nobody beats the truth in 60 updates, nor is worse than uniform by much
        assert truth["perplexity"] < float(row["test perplexity"]) < 1000
    assert int(rows[0]["rank of log P"]) <= 8 + 2 < int(rows[1]["rank of log P"])
    assert (out / "table.md").read_text().strip() in run.stdout

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "table" not in path.name}
    table = (out / "table.csv").read_bytes()
    again = quickstart("--out", out, "--updates", "60")
    assert again.returncode == 0, again.stderr
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "table" not in path.name}
    assert before == after
    assert (out / "table.csv").read_bytes() == table
    other = quickstart("--out", out, "--updates", "70")
    assert other.returncode == 1 and "other settings" in other.stderr


def test_the_readme_shows_the_tables_columns():
    lines = (ROOT / "README.md").read_text().splitlines()
    ends_with = next(at for at, line in enumerate(lines) if line.endswith("The quickstart ends with"))
    table = [line for line in lines[ends_with:] if line.startswith("|")][:5]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert header == list(load_script("quickstart_report").COLUMNS)
    assert [row[0] for row in rows] == ["softmax", "mixtape", "the truth"]
    assert {len(row) for row in rows} == {len(header)}


@pytest.mark.slow
def test_users_own_text(tmp_path):
    data = write_parallel(tmp_path / "data")
    with (data / "test.xx").open("r+") as file:  # a last line without its newline counts as one
        file.truncate(len(file.read()) - 1)
    write_settings(tmp_path / "quickstart-output", "data generated, updates 1000")  # the plain quickstart came first
    out, rows = tmp_path / "quickstart-output.data", {}
    for layers in ("gss", "gss,plif"):
        run = quickstart(*["--data", data, "--source-lang", "yy", "--updates", "2", "--layers", layers], cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        rows[layers] = list(csv.DictReader((out / "table.csv").open()))
        assert [row["output layer"] for row in rows[layers]] == layers.split(",")
    assert rows["gss"] == rows["gss,plif"][:1], "what was trained before stays"
    assert run.stdout.count("translating the test set with") == 1
    assert (out / "data-bin" / "test.yy-xx.xx.bin").exists()


def write_settings(folder, settings):
    folder.mkdir()
    (folder / "settings").write_text(settings + "\n")


def checksum(folder):
    text = b"".join(
        path.read_bytes() for split in ("train", "valid", "test") for path in sorted(folder.glob(f"{split}.*"))
    )
    return subprocess.run("cksum", input=text, stdout=subprocess.PIPE).stdout.decode().strip()


def test_a_folder_for_each_run(tmp_path):
    """Without --out; the runs end at a file that is missing, when their folder is chosen."""
    data = write_parallel(tmp_path / "text", test_yy=None)

    def chosen(*options):
        before = set(tmp_path.iterdir())
        run = quickstart("--data", data, *options, cwd=tmp_path)
        assert run.returncode == 1 and "test.yy is missing or empty" in run.stderr
        return [path.name for path in set(tmp_path.iterdir()) - before]

    write_settings(tmp_path / "quickstart-output", "data generated, updates 1000")
    assert chosen() == ["quickstart-output.text"]
    (tmp_path / "quickstart-output.text" / "settings").write_text(
        f"data {data}, updates 1000, checksum {checksum(data)}\n"
    )
    assert chosen() == [], "the same run goes on where it was"
    assert chosen("--source-lang", "yy") == ["quickstart-output.text.2"]
    (tmp_path / "quickstart-output.text.2" / "settings").write_text("data /another/text, updates 1000\n")
    assert chosen("--updates", "7") == ["quickstart-output.text.3"]
    shutil.rmtree(tmp_path / "quickstart-output.text.2")
    shutil.rmtree(tmp_path / "quickstart-output.text.3")
    (data / "train.xx").write_text((data / "train.xx").read_text().replace("xxa", "xxc", 1))
    assert chosen() == ["quickstart-output.text.2"], "nothing of a text that was changed is reused"


def test_carriage_returns_end_no_line(tmp_path):
    """Some tools take them for the end of a line, others do not: sentences would lose their translations."""
    lines = [f"yya yyb yy{i % 5}\n" for i in range(20)]
    data = write_parallel(tmp_path / "data", train_yy="".join([*lines[:3], "yya\ryyb\r\n", *lines[4:]]))
    broken = stub(tmp_path / "broken", fairseq_preprocess="exit 7") / "bin"
    run = quickstart("--data", data, "--out", tmp_path / "out", path=broken)
    assert run.returncode == 1 and "fairseq-preprocess failed" in run.stderr
    assert (tmp_path / "out" / "text" / "raw.train.yy").read_bytes() == "".join(
        [*lines[:3], "yyayyb\n", *lines[4:]]
    ).encode()


@pytest.mark.parametrize("script", ["quickstart.sh", "setup.sh", "test.sh"])
def test_the_shells_search_path_for_folders_does_not_matter(script, tmp_path):
    """Started as the README has it, with a folder of that name where cd looks first; each ends at the first tool."""
    (tmp_path / "scripts").mkdir()
    environment = {
        **tools(),
        "CDPATH": str(tmp_path),
        "PYTHON": "/nowhere/python",
        "MIXTAPE_VENV": str(tmp_path / "venv"),
    }
    out = ["--out", tmp_path / "out"] if script == "quickstart.sh" else []
    done = subprocess.run([f"scripts/{script}", *out], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr == "setup.sh: PYTHON=/nowhere/python does not run: name a Python of 3.8 or later\n"
        and not done.stdout
    )


@pytest.mark.parametrize("script", ["setup.sh", "test.sh"])
def test_help_sets_nothing_up(script, tmp_path):
    environment = {**tools(), "MIXTAPE_VENV": str(tmp_path / "venv")}
    done = subprocess.run([SCRIPTS / script, "--help"], env=environment, capture_output=True, text=True, timeout=20)
    first = (SCRIPTS / script).read_text().splitlines()[1].removeprefix("# ")
    assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, first, "")
    assert not list(tmp_path.iterdir())


def test_setup_takes_no_argument(tmp_path):
    environment = {**tools(), "MIXTAPE_VENV": str(tmp_path / "venv")}
    done = subprocess.run([SCRIPTS / "setup.sh", "--cuda"], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr == "setup.sh: unknown option --cuda; see setup.sh --help\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("machine, chosen", [("Linux x86_64", "3.12"), ("Linux aarch64", "3.11")])
def test_setup_takes_the_python_that_has_a_compiled_fairseq(machine, chosen, tmp_path):
    pythons = {  # without a venv module, so that nothing is made
        f"python{version}": f'case "$2" in *venv*) exit 1 ;; *print*) echo {version} ;; esac'
        for version in ("3.11", "3.12")
    }
    stub(tmp_path, uname=f"echo {machine}", **pythons)
    environment = {**tools(), "MIXTAPE_VENV": str(tmp_path / "venv"), "PYTHON": ""}
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    done = subprocess.run([SCRIPTS / "setup.sh"], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr.startswith(
        f"setup.sh: Python {chosen} (python{chosen}) has no venv module"
    )


def test_setup_takes_a_python_from_where_it_is_typed(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho 2.7 is too old; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    environment = {**tools(), "PYTHON": "./python", "MIXTAPE_VENV": str(tmp_path / "venv")}
    done = subprocess.run([SCRIPTS / "setup.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"setup.sh: PYTHON={tmp_path}/./python does not run: ")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"train_yy": None}, "two languages"),
        ({"valid_xx": None}, "valid.xx is missing or empty"),
        ({"test_yy": ""}, "test.yy is missing or empty"),
        ({"valid_yy": "caf\udce9\n"}, "valid.yy is not UTF-8 text"),
        ({"test_yy": "one line\n"}, "differ in their number of lines"),
    ],
)
def test_users_mistakes(tmp_path, changed, message):
    data = write_parallel(tmp_path / "data", **changed)
    run = quickstart("--data", data, "--out", tmp_path / "out")
    assert run.returncode == 1 and message in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "text").exists()


def test_bad_options(tmp_path):
    for options, message in [
        (["--data", tmp_path / "nowhere"], "is no folder"),
        (["--updates", "0"], "positive whole number"),
        (["--source-lang", "xx"], "goes with --data only"),
        (["--layers", "softmax,hmm"], "--layers names 'hmm', allowed are softmax, mos,"),
        (["--layers", ""], "--layers is empty"),
        (["--layers", "gss,gss"], "names one twice"),
        (["--layers", "--updates", "9"], "--layers needs a value"),
        (["--speed", "9"], "unknown option --speed"),
        (
            ["--out", tmp_path / "a,b"],
            "has a comma or a colon, at which fairseq takes a name apart: choose another one",
        ),
    ]:
        run = quickstart(*options, *(["--out", tmp_path / "out"] if options[0] not in ("--speed", "--out") else []))
        assert run.returncode == 1 and message in run.stderr
