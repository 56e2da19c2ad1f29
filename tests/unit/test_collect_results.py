"""scripts/collect_results.py: its tables, CSV files and pages, of logs and score files made here."""

import csv
import json
import os
import re
import shutil
import subprocess

import pytest
from recipes import load_script
from training_logs import DONE, SCORES, epoch, start, table_of

from mixtape_plugin.analysis.results import collect, read_rows
from mixtape_plugin.errors import UserError

collect_results = load_script("collect_results")


def test_translation(folder, capsys, tmp_path):
    log = start() + epoch(1, 274, 200.5, wps=800, wall=70) + epoch(2, 548, 63.25, wps=1300, wall=7000) + DONE
    whole = folder(
        "whole", train_log=log, score_json=json.dumps(SCORES), test__perplexity_txt="test nll_loss 2.6 | ppl 6.22\n"
    )
    begun = folder("begun", train_log=start("softmax", 8, parameters="5,021,962") + epoch(1, 274, 190))
    collect_results.main(
        [str(whole), str(begun), "--csv", str(tmp_path / "r.csv"), "--markdown", str(tmp_path / "r.md")]
    )
    printed = capsys.readouterr()
    assert printed.err == "" and (tmp_path / "r.md").read_text() == printed.out
    rows, notes = table_of(printed.out)
    assert rows[0] == {
        "training": "whole", "layer": "mixtape-4", "seed": "7", "updates": "548", "epochs": "2", "ended": "yes",
        "parameters": "5,472,793", "train ppl": "6.17", "valid ppl": "63.25", "test ppl": "6.22", "BLEU 13a": "34.98",
        "BLEU intl": "33.50",
        "BLEU 13a lower-cased": "not run", "BLEU tokenized": "not run", "BLEU tokenized, compounds split": "35.25",
        "chrF": "57.96", "tokens/s": "1,050", "s an epoch": "440", "wall time": "1 h 57 min",
        "precision": "bfloat16", "hardware": "EPYC (threads: 1)", "commit": "3be862a",
    }  # fmt: skip
    collect_results.main([str(whole), str(begun), "--ended", "--columns", "layer,ended"])
    assert table_of(capsys.readouterr().out)[0] == [{"layer": "mixtape-4", "ended": "yes"}]
    names = ("layer", "seed", "epochs", "ended", "valid ppl", "test ppl", "chrF", "wall time")
    values = ["softmax", "8", "1", "no", "190.00", "not run", "not run", "1 min"]
    assert [rows[1][name] for name in names] == values
    assert notes == [
        "",
        "- BLEU 13a: `nrefs:1|tok:13a`",
        "- BLEU intl: `nrefs:1|tok:intl`",
        "- BLEU tokenized, compounds split: `tok:none; after Moses`",
        "- chrF: `nc:6`",
    ]
    with open(tmp_path / "r.csv", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["folder"], first["command"]) == (str(whole), "examples/multi30k/train.sh mixtape --seed 7")
    assert (first["BLEU 13a"], first["BLEU 13a signature"], first["wall s"]) == ("34.9812", "nrefs:1|tok:13a", "7000.0")
    assert (second["parameters"], second["BLEU 13a"], second["test ppl"]) == ("5021962", "not run", "not run")


def test_scores_of_the_validation_text(folder, capsys, tmp_path):
    scores = {"score_json": json.dumps(SCORES[:1]), "valid-score_json": json.dumps([{**SCORES[0], "score": 40.5}])}
    path = folder(train_log=start() + epoch(1, 9, 30), **scores)
    collect_results.main([str(path), "--csv", str(tmp_path / "r.csv")])
    for arguments in ([], [str(tmp_path / "r.csv")]):
        if arguments:
            collect_results.main(arguments)
        (row,), notes = table_of(capsys.readouterr().out)
        assert (row["BLEU 13a"], row["valid BLEU 13a"]) == ("34.98", "40.50")
        assert notes[1:] == ["- BLEU 13a, valid BLEU 13a: `nrefs:1|tok:13a`"]
    (path / "valid-score.json").write_text("{")
    collect_results.main([str(path)])
    printed = capsys.readouterr()
    (row,), _ = table_of(printed.out)
    assert (row["BLEU 13a"], row["valid BLEU 13a"], row["valid chrF"]) == ("34.98", "unreadable", "unreadable")
    assert f"{path}/valid-score.json is no list of scores" in printed.err


def test_a_column_that_somebody_added_stays(folder, tmp_path, capsys):
    """Where the table grows, and where a row is read from its folder once more."""
    paths = [folder(name, train_log=start() + epoch(1, 9, ppl)) for name, ppl in (("a", 30), ("b", 40))]
    table = tmp_path / "r.csv"
    collect_results.main([str(paths[0]), "--csv", str(table)])
    header, line = table.read_text().splitlines()
    table.write_text(f"{header},note\n{line},with new data\n")
    for given in paths[1:], paths[:1]:
        capsys.readouterr()
        collect_results.main([str(table), *map(str, given), "--csv", str(table)])
        for rows in list(csv.DictReader(table.open())), table_of(capsys.readouterr().out)[0]:
            assert [row["note"] for row in rows] == ["with new data", "not run"]


def test_a_training_that_diverged_at_once_has_no_curve(folder, tmp_path):
    path = folder(train_log=start() + epoch(1, 9, "inf") + epoch(2, 18, "inf"))
    with pytest.raises(UserError, match="has nothing to show: none of the logs has a validation that gave a number"):
        collect_results.main([str(path), "--plot", str(tmp_path / "a.png")])


def test_signatures_that_differ_are_told_apart(folder, capsys):
    other = [{**SCORES[0], "signature": "nrefs:1|tok:13a|version:1"}]
    one = folder("one", train_log=start(), score_json=json.dumps(SCORES[:1]))
    two = folder("two", train_log=start(), score_json=json.dumps(other))
    collect_results.main([str(one), str(two)])
    _, notes = table_of(capsys.readouterr().out)
    assert notes[1:] == [f"- BLEU 13a ({one}): `nrefs:1|tok:13a`", f"- BLEU 13a ({two}): `nrefs:1|tok:13a|version:1`"]


def test_dialog(folder, capsys):
    scores = [
        {"metric": f"BLEU-{n} {kind}", "score": 0.1234 + n, "signature": "refs:1", "preprocessing": None}
        for n in (1, 2)
        for kind in ("precision", "recall")
    ]
    path = folder(
        train_log=start() + epoch(1, 9, 30), score_json=json.dumps(scores), test__perplexity_txt="ppl 35.40\n"
    )
    collect_results.main([str(path)])
    (row,), notes = table_of(capsys.readouterr().out)
    assert (row["test ppl"], row["BLEU-1 precision"], row["BLEU-2 recall"]) == ("35.40", "1.123", "2.123")
    assert notes[1:] == ["- BLEU-1 precision, BLEU-1 recall, BLEU-2 precision, BLEU-2 recall: `refs:1`"]
    assert not {"BLEU 13a", "chrF", "cache pointer"} & set(row)

    log = start().replace("task='translation'", "task='translation', arch='dialog_seq2seq'")
    damaged, begun = folder("damaged", train_log=log, score_json="["), folder("begun", train_log=log)
    collect_results.main([str(damaged), str(begun)])
    rows, _ = table_of(capsys.readouterr().out)
    assert [row["BLEU-1 precision"] for row in rows] == ["unreadable", "not run"]
    assert not {"BLEU 13a", "chrF", "cache pointer"} & set(rows[0])


def test_language_models(folder, capsys):
    """Files as examples/*/evaluate.sh, dynamic_evaluation.py and cache_pointer.py write them."""
    static = "test: 82,430 tokens, static perplexity 521.078\n"
    words = folder(
        "words",
        train_log=start(task="bptt_language_modeling") + epoch(1, 682, 600),
        valid_txt="valid: 73,760 tokens, 9.1041 bits a token, perplexity 550.31\n",
        test_txt="test: 82,430 tokens, 9.0254 bits a token, perplexity 521.08\n",
        cache_pointer_txt=static
        + "test: 82,430 tokens, perplexity with cache 436.146 (lambda 0.1, theta 1, window 500)\n",
        dynamic_evaluation_txt=static + "test: 82,430 tokens, dynamic perplexity 300.628 (learning rate 0.002)\n",
    )
    characters = folder(
        "characters",
        train_log=start("softmax", task="bptt_language_modeling"),
        test_txt="test: 5,000,000 characters, 1.4427 bits a character, perplexity 2.72\n",
    )
    collect_results.main([str(words)])
    (row,), notes = table_of(capsys.readouterr().out)
    assert (row["valid ppl"], row["test ppl"]) == ("550.31", "521.08")  # that of valid.txt, not the log's
    assert (row["cache pointer"], row["dynamic evaluation"]) == ("436.15", "300.63")
    assert notes == [] and not [name for name in row if "BLEU" in name or "bits" in name]
    collect_results.main([str(words), str(characters)])
    (_, row), _ = table_of(capsys.readouterr().out)
    assert (row["test bits/character"], row["valid bits/character"], row["test ppl"]) == ("1.4427", "not run", "2.72")
    assert (row["updates"], row["tokens/s"], row["wall time"]) == ("not run", "not run", "not run")


def test_damaged_files(folder, capsys):
    binary = bytes(range(256)) * 9
    path = folder(
        train_log=binary + b"\n" + (start() + epoch(1, 274, 200.5)).encode() + binary,
        score_json='[{"metric": "BLEU 13a", "sc',
        test__perplexity_txt="",
        valid_txt="no",
    )
    collect_results.main([str(path)])
    printed = capsys.readouterr()
    (row,), notes = table_of(printed.out)
    assert (row["layer"], row["updates"]) == ("mixtape-4", "274")
    assert [row[name] for name in ("valid ppl", "test ppl", "BLEU 13a", "chrF")] == ["unreadable"] * 4
    assert sorted(printed.err.splitlines()) == [
        f"collect_results.py: {path}/score.json is no list of scores",
        f"collect_results.py: {path}/test-perplexity.txt holds no perplexity",
        f"collect_results.py: {path}/valid.txt holds no perplexity",
    ]


def test_empty_log_and_no_log(folder, capsys):
    empty = folder("empty", train_log="")
    scored = folder("scored", score_json=json.dumps(SCORES))
    collect_results.main([str(empty), str(scored)])
    printed = capsys.readouterr()
    rows, _ = table_of(printed.out)
    assert {value for name, value in rows[0].items() if name not in ("training", "commit", "hardware")} == {"not run"}
    assert (
        rows[0]["commit"] == rows[0]["hardware"] == "unknown"
        and rows[1]["BLEU 13a"] == "34.98"
        and rows[1]["ended"] == "not run"
    )
    assert printed.err.splitlines() == [
        f"collect_results.py: {empty}/train.log does not tell the model",
        f"collect_results.py: {scored}/train.log is missing",
    ]


def test_a_csv_file_stands_for_its_trainings(folder, capsys, tmp_path):
    """The same table, groups and curves as from the folders themselves."""
    trainings = [
        folder("one", train_log=start() + epoch(1, 274, 200.5) + epoch(2, 548, 63.25), score_json=json.dumps(SCORES)),
        folder("two", train_log=start(seed=0) + epoch(1, 274, 190.25) + DONE, test__perplexity_txt="ppl 6.22\n"),
        folder("old", train_log=start().replace("train.sh: commit", "x")),
    ]
    (trainings[0] / "rank.json").write_text(json.dumps({"columns": {"rank": 402, "KLD": 4.5}}))
    file = tmp_path / "r.csv"
    collect_results.main([*map(str, trainings), "--groups", "--csv", str(file)])
    printed = capsys.readouterr().out
    collect_results.main([str(file), "--groups", "--csv", str(tmp_path / "again.csv")])
    assert capsys.readouterr().out == printed
    assert (tmp_path / "again.csv").read_text() == file.read_text()
    assert [row["seed"] for row in read_rows(file)] == [collect(training)[0]["seed"] for training in trainings]
    assert read_rows(file)[0]["curve"] == {274: 200.5, 548: 63.25} and read_rows(file)[2]["curve"] == {}
    (tmp_path / "edited.csv").write_text(file.read_text().replace("274:200.5", "a:b"))
    with pytest.raises(UserError, match="'validation by updates' of .*one is no list of UPDATES:PERPLEXITY"):
        read_rows(tmp_path / "edited.csv")

    earlier = tmp_path / "earlier.csv"  # without precision and hardware
    rows = list(csv.reader(file.read_text().splitlines()))
    at = rows[0].index("precision")
    with open(earlier, "w", newline="") as kept:
        csv.writer(kept).writerows(row[:at] + row[at + 2 :] for row in rows)
    collect_results.main([str(earlier), "--columns", "training,wall time"])  # as the table calls it
    assert "| wall time |" in capsys.readouterr().out
    collect_results.main([str(earlier), "--columns", "training,hardware,commit"])
    assert [row["hardware"] for row in table_of(capsys.readouterr().out)[0]] == ["not run"] * 3

    cut = file.read_text()[:-30]  # in the last cells of the last row
    (tmp_path / "cut.csv").write_text(cut[: cut.rindex(",")])
    with pytest.raises(UserError, match="cut.csv, row 3 is damaged: it has other cells than the first line has names"):
        read_rows(tmp_path / "cut.csv")
    (tmp_path / "less.csv").write_text(file.read_text().replace("commit", "x", 1))
    with pytest.raises(UserError, match="less.csv is no table of trainings"):
        read_rows(tmp_path / "less.csv")

    collect_results.main([str(file), "--columns", "seed,valid ppl", "--where=multi30k", "--where=--seed"])
    rows, _ = table_of(capsys.readouterr().out)
    assert rows == [{"seed": "7", "valid ppl": "63.25"}, {"seed": "0", "valid ppl": "190.25"}]
    collect_results.main([str(file), "--columns", "seed", "--where=--seed", "--without=--seed 7"])
    rows, _ = table_of(capsys.readouterr().out)
    assert rows == [{"seed": "0"}]
    collect_results.main([str(file), "--groups", "--columns", "valid ppl", "--where=--seed"])
    (row,), _ = table_of(capsys.readouterr().out)
    assert row == {"group": "mixtape-4", "n": "2", "valid ppl": "126.75 ± 89.80"}
    options = ["--groups", "--where=--seed", "--columns", "test ppl, BLEU tokenized, compounds split"]
    collect_results.main([str(file), *options, "--groups-csv", str(tmp_path / "groups.csv")])
    (row,), _ = table_of(capsys.readouterr().out)
    scores = {"test ppl": "6.22 (n = 1)", "BLEU tokenized, compounds split": "35.25 (n = 1)"}
    assert row == {"group": "mixtape-4", "n": "2", **scores}
    with open(tmp_path / "groups.csv", encoding="utf-8") as groups_file:
        (line,) = csv.DictReader(groups_file)
    assert (line["n"], line["valid ppl n"], line["test ppl n"]) == ("2", "2", "1")


def test_a_csv_file_keeps_a_curves_digits(folder, tmp_path):
    collect_results.main([str(folder(train_log=start() + epoch(1, 274, 1.0625))), "--csv", str(tmp_path / "r.csv")])
    assert read_rows(tmp_path / "r.csv")[0]["curve"] == {274: 1.0625}


def test_a_csv_file_of_several_kinds_keeps_all_of_them(folder, capsys, tmp_path):
    folder("translation", train_log=start() + epoch(1, 274, 200.5), score_json=json.dumps(SCORES))
    model = folder("model", train_log=start(task="language_modeling") + epoch(1, 9, 80))
    (model / "cache_pointer.txt").write_text("test: 10 tokens, perplexity 90, perplexity with cache 75.50\n")
    files = [tmp_path / "once.csv", tmp_path / "twice.csv"]
    collect_results.main([str(tmp_path / "translation"), str(model), "--csv", str(files[0])])
    collect_results.main([str(files[0]), "--csv", str(files[1])])
    assert files[0].read_text() == files[1].read_text() and "75.5" in files[1].read_text()


def test_a_training_counts_once(folder, capsys, tmp_path, monkeypatch):
    """A folder, and the CSV file that has an earlier row of it: no two seeds."""
    monkeypatch.chdir(tmp_path)
    folder("run", train_log=start() + epoch(1, 274, 200.5))
    folder("other", train_log=start(seed=8) + epoch(1, 274, 100))
    collect_results.main(["run", "other", "--csv", "rows.csv"])
    with open("run/train.log", "a", encoding="utf-8") as log:
        log.write(epoch(2, 548, 150))
    capsys.readouterr()
    collect_results.main(["rows.csv", str(tmp_path / "run"), "--columns", "seed,valid ppl"])
    printed = capsys.readouterr()
    assert printed.err == f"collect_results.py: {tmp_path}/run is given twice; the last one counts\n"
    assert table_of(printed.out)[0] == [{"seed": "7", "valid ppl": "150.00"}, {"seed": "8", "valid ppl": "100.00"}]


def test_a_copy_is_no_further_seed(folder, capsys, tmp_path, monkeypatch):
    """A backup of a folder, or the CSV file of its row, read from elsewhere; a training of the same command is one."""
    runs = [folder(f"run{seed}", train_log=start(seed=seed) + epoch(1, 274, 200.5 + seed)) for seed in (1, 2)]
    monkeypatch.chdir(tmp_path)
    collect_results.main(["run1", "run2", "--csv", "rows.csv"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copy = shutil.copytree(runs[0], tmp_path / "backup")
    for copies in ([tmp_path / "rows.csv"], [copy], [copy, tmp_path / "rows.csv"]):
        capsys.readouterr()
        collect_results.main(["--groups", "--columns", "valid ppl", *map(str, [*runs, *copies])])
        printed = capsys.readouterr()
        assert [row["n"] for row in table_of(printed.out)[0]] == ["2"] and "is given twice" in printed.err
        assert "n trainings that differ in their seed alone." in printed.out
    again = folder("again", train_log=start(seed=1) + epoch(1, 274, 201.25))
    collect_results.main(["--groups", "--columns", "valid ppl", *map(str, [*runs, again])])
    printed = capsys.readouterr()
    assert [row["n"] for row in table_of(printed.out)[0]] == ["2"]
    assert printed.err == f"collect_results.py: {again} has the seed of {runs[0]}, which counts instead\n"


def test_a_page_gets_its_tables(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder("one", train_log=start() + epoch(1, 274, 200.5))
    page, block = tmp_path / "page.md", "<!-- collect_results.py one --columns 'seed,valid ppl' -->\n{}<!-- end -->"
    page.write_text(f"# `<!-- collect_results.py …`\n{block.format('old')}\ntext\n{block.format('')}\n")
    collect_results.main(["--page", "page.md"])
    filled = block.format("\n| seed | valid ppl |\n| --- | --- |\n| 7 | 200.50 |\n")
    assert page.read_text() == f"# `<!-- collect_results.py …`\n{filled}\ntext\n{filled}\n"
    pages = [tmp_path / name for name in ("first.md", "second.md")]
    for each in pages:
        each.write_text(block.format(""))
    collect_results.main(["--page", "first.md", "--page", "second.md"])
    assert [each.read_text() for each in pages] == [filled, filled]
    before = page.read_text().replace("one --", "two --")
    page.write_text(before)
    with pytest.raises(UserError, match="two is no folder"):
        collect_results.main(["--page", "page.md"])
    assert page.read_text() == before


@pytest.mark.parametrize(
    "text, problem",
    [
        (b"{block}<!-- ende -->\nmine\n{block}<!-- end -->\n", "has 2 times '<!-- collect_results.py ' and 1 whole"),
        (b"<!-- collect_results.py one -->\nmine\n", "has 1 times '<!-- collect_results.py ' and 0 whole"),
        (b"<!-- collect_results.py 'one -->\n<!-- end -->\n", '"\'one" is no list of arguments: No closing quotation'),
        (b"<!-- collect_results.py one --wear x -->\n<!-- end -->\n", "'one --wear x' is not allowed: unrecog"),
        (b"<!-- collect_results.py one --help -->\n<!-- end -->\n", "'one --help' is not allowed: --help"),
        (b"caf\xe9\n{block}<!-- end -->\n", ", line 1 is not UTF-8 text"),
    ],
)
def test_a_damaged_page_stays_as_it_is(text, problem, folder, tmp_path, monkeypatch):
    folder("one", train_log=start() + epoch(1, 1, 2))
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_bytes(text.replace(b"{block}", b"<!-- collect_results.py one -->\n"))
    before = page.read_bytes()
    with pytest.raises(UserError, match=re.escape(problem)):
        collect_results.main(["--page", "page.md"])
    assert page.read_bytes() == before


def test_folders_called_by_numbers(folder, tmp_path, capsys, monkeypatch):
    """In a CSV file they look like figures."""
    monkeypatch.chdir(tmp_path)
    for name, tokenizer in (("7", "13a"), ("1e5", "intl")):
        scores = [{"metric": "BLEU 13a", "score": 3.5, "signature": f"tok:{tokenizer}", "preprocessing": None}]
        folder(name, train_log=start() + epoch(1, 1, 2), score_json=json.dumps(scores))
    collect_results.main(["7", "1e5", "--csv", "all.csv"])
    printed = capsys.readouterr().out
    collect_results.main(["all.csv"])
    assert capsys.readouterr().out == printed and "7" in printed
    collect_results.main(["all.csv", "--groups"])


def test_a_link_stays_one_and_a_pipe_is_written_to(folder, tmp_path):
    run = str(folder("run", train_log=start() + epoch(1, 1, 2)))
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("real.csv")
    collect_results.main([run, "--csv", str(tmp_path / "link.csv")])
    assert (tmp_path / "link.csv").is_symlink() and read_rows(tmp_path / "real.csv")[0]["training"] == "run"
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    collect_results.main([run, "--csv", str(tmp_path / "pipe")])
    assert reader.communicate(timeout=60)[0] == (tmp_path / "real.csv").read_bytes()
    (tmp_path / "plot.png").symlink_to("picture")
    collect_results.main([run, "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG") and (tmp_path / "plot.png").is_symlink()
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        collect_results.main([run, "--csv", str(tmp_path / ("a" * 250))])
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "args, sentence",
    [
        (
            ["run", "--draw", "seed", "BLEU", "a.png"],
            "--draw seed BLEU has nothing to draw: no training has numbers for both",
        ),
        (
            ["run", "--draw", "seed", "BLEU", "a.txt"],
            "--draw a.txt is not allowed: a name that ends in .png, .pdf or .svg",
        ),
        (["nowhere"], "nowhere is no folder: give those that train.sh wrote"),
        (["."], ". holds neither train.log nor scores: give the folders that train.sh wrote"),
        (
            ["run", "--plot", "a.png"],
            "--plot a.png has nothing to show: none of the logs has a validation that gave a number",
        ),
        (["run", "--csv=a.csv", "--plot=a.txt"], "--plot a.txt is not allowed: a name that ends in .png, .pdf or .svg"),
        (["damaged.csv"], "damaged.csv is no table of trainings: give one that collect_results.py --csv wrote"),
        ([], "no training is given: name folders that train.sh wrote, or CSV files of --csv"),
        (["run", "--where", "moon"], "--where moon is in no training's command"),
        (
            ["run", "--without", "moon", "--without=train.sh"],
            "--without moon train.sh leaves no training: each command has one of these",
        ),
        (["run", "--ended"], "--ended leaves no training: none came to its end"),
        (
            ["--page", "page.md"],
            "--page page.md has 0 times '<!-- collect_results.py ' and 0 whole blocks, "
            "<!-- collect_results.py ARGUMENTS --> … <!-- end -->",
        ),
        (
            ["run", "--name", "mixtape-4", "a b"],
            "--name mixtape-4 'a b' needs --groups, --baseline, --groups-csv or --plot",
        ),
        (
            ["run", "--groups", "--name", "moon", "sun"],
            "--name 'moon' is no group of trainings: it must be one of mixtape-4",
        ),
        (
            ["run", "other", "--groups", "--name", "mixtape-4", "softmax"],
            "--name 'mixtape-4' 'softmax' is not allowed: another group of trainings has this name",
        ),
        (
            ["run", "--groups", "--columns", "valid ppl,seed"],
            "--columns seed is of single trainings, and --groups puts several into one line",
        ),
        (
            ["seen", "--columns", "n"],
            "--columns n is none of training, layer, seed, updates, epochs, ended, parameters, train ppl, valid ppl, "
            "test ppl, BLEU 13a, BLEU intl, BLEU 13a lower-cased, BLEU tokenized, chrF, tokens/s, s an epoch, wall s, "
            "precision, hardware, commit",
        ),
        (["nowhere.csv"], "nowhere.csv does not exist: give a folder that train.sh wrote, or a table of --csv"),
        (
            ["run", "--csv=a.csv", "--markdown=a.csv"],
            "--csv a.csv is not allowed, as --markdown names it: choose another name",
        ),
        (["--page", "page.md", "--csv", "a.csv"], "--page page.md stands alone: leave out csv"),
        (["--page", "nowhere.md"], "nowhere.md cannot be read: No such file or directory"),
        (["run", "--csv", "nowhere/a.csv"], "--csv nowhere/a.csv cannot be written: No such file or directory"),
        (["run", "--markdown", "run/x/a.md"], "--markdown run/x/a.md cannot be written: No such file or directory"),
    ],
)
def test_mistakes(args, sentence, folder, tmp_path, monkeypatch):
    folder("run", train_log=start())
    folder("seen", train_log=start() + epoch(1, 1, 2))
    folder("other", train_log=start("softmax"))
    (tmp_path / "damaged.csv").write_text("folder,layer\nx,y\n")
    (tmp_path / "page.md").write_text("no table\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        collect_results.main(args)
    assert str(error.value) == sentence
    assert not list(tmp_path.glob("a.*"))


def test_columns_of_several_analyses(folder, capsys):
    """What scripts/analyze.py leaves beside a training."""
    analyses = {"rank_json": {"rank": 402}, "predictions_json": {"top-1 %": 31.5}}
    files = {name: json.dumps({"columns": columns}) for name, columns in analyses.items()}
    collect_results.main([str(folder("run", train_log=start() + epoch(1, 274, 200.5), **files))])
    (row,), _ = table_of(capsys.readouterr().out)
    assert (row["rank"], row["top-1 %"]) == ("402", "31.50")


def test_a_table_grows_but_loses_no_row(folder, tmp_path, monkeypatch):
    """Rows are added to a file by naming it twice; --where would leave the others out of it."""
    folder("run", train_log=start())
    folder("other", train_log=start("softmax"))
    monkeypatch.chdir(tmp_path)
    collect_results.main(["run", "--csv", "rows.csv"])
    collect_results.main([f"{tmp_path}/rows.csv", "other", "--csv", "rows.csv"])
    before = (tmp_path / "rows.csv").read_bytes()
    assert len(read_rows("rows.csv")) == 2
    with pytest.raises(UserError, match="--csv rows.csv is read, too, and would lose rows by --where, --without"):
        collect_results.main(["rows.csv", "--where", "softmax", "--csv", "rows.csv"])
    with pytest.raises(UserError, match="--csv rows.csv is read, too, and would lose rows by --where, --without"):
        collect_results.main(["rows.csv", "--without", "softmax", "--csv", "rows.csv"])
    with pytest.raises(UserError, match="--csv rows.csv is read, too, and would lose rows by --where, --without"):
        collect_results.main(["rows.csv", "--ended", "--csv", "rows.csv"])
    with pytest.raises(UserError, match="--markdown rows.csv is not allowed, as rows.csv is read, too"):
        collect_results.main(["rows.csv", "--markdown", "rows.csv"])
    assert (tmp_path / "rows.csv").read_bytes() == before


def test_no_page_is_written_where_a_table_of_another_cannot_be(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder("one", train_log=start() + epoch(1, 274, 200.5))
    for page, training in ("a.md", "one"), ("b.md", "two"):
        text = f"<!-- collect_results.py {training} --columns seed -->\nold\n<!-- end -->\n"
        (tmp_path / page).write_text(text)
    with pytest.raises(UserError, match="two is no folder"):
        collect_results.main(["--page", "a.md", "b.md"])
    assert "\nold\n" in (tmp_path / "a.md").read_text()
