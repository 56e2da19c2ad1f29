"""Comparisons of groups, t-tests against figures that papers print and against scipy on the values, correlations."""

import csv
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from recipes import load_script
from scipy import stats
from training_logs import DONE, epoch, row, start, table_of

from mixtape_plugin.analysis.groups import Sample, add_mean, groups
from mixtape_plugin.analysis.statistics import (
    chance_of_seeds,
    compare,
    correlate,
    difference_text,
    differences,
    groups_markdown,
    p_values,
)
from mixtape_plugin.errors import UserError

collect_results = load_script("collect_results")


# ----------------------------------------------------------------------------------------------------------- tests

# Parthiban et al. 2021, supplement, table 1: test perplexity of 10 seeds, mean ± standard deviation, and p.
PTB, WIKITEXT2 = (57.08, 0.10), (64.63, 0.09)
PRINTED = [
    (PTB, (57.03, 0.15), 0.392), (PTB, (57.02, 0.13), 0.262), (PTB, (56.81, 0.11), 1.91e-5),
    (PTB, (54.88, 0.26), 2.02e-15), (WIKITEXT2, (64.35, 0.18), 3.46e-4), (WIKITEXT2, (64.51, 0.13), 2.74e-2),
    (WIKITEXT2, (64.15, 0.17), 2.98e-7), (WIKITEXT2, (61.97, 0.43), 2.04e-13),
    ((56.81, 0.11), (56.82, 0.09), 0.826), ((64.15, 0.17), (64.30, 0.17), 0.0641),
]  # fmt: skip


@pytest.mark.parametrize("first, second, printed", PRINTED)
def test_students_test_is_what_the_paper_prints(first, second, printed):
    """To three digits, from means and deviations of two decimals."""
    student, welch = p_values(Sample(*first, 10), Sample(*second, 10))
    assert f"{student:.2e}" == f"{printed:.2e}"
    assert welch >= student


def test_an_end_of_an_interval_says_on_which_side_of_0_it_is():
    assert difference_text("valid ppl", -1.17, -2.33, -0.012) == "-1.2% [-2.3, -0.0]"
    assert difference_text("valid ppl", -0.01, -2.33, 0.012) == "+0.0% [-2.3, +0.0]"
    assert difference_text("BLEU 13a", 0.123, None, None) == "+0.12"


def test_welchs_test_is_another():
    student, welch = p_values(Sample(*PTB, 10), Sample(54.88, 0.26, 10))
    assert (f"{student:.1e}", f"{welch:.1e}") == ("2.0e-15", "1.9e-11")


@pytest.mark.parametrize(
    "first, second",
    [(None, Sample(1, 1, 3)), (Sample(1, None, 1), Sample(1, 1, 3)), (Sample(1, 0.0, 2), Sample(2, 0.0, 3))],
)
def test_no_test_without_variance(first, second):
    assert p_values(first, second) == (None, None)


def test_one_variance_is_enough():
    """Pooled as 1/2, so that t = 1 / √(1/2 · 2/3), with 4 degrees of freedom."""
    student, _ = p_values(Sample(1, 0.0, 3), Sample(2, 1.0, 3))
    assert student == pytest.approx(2 * stats.t.sf(1 / math.sqrt(0.5 * 2 / 3), 4))


# ------------------------------------------------------------------------------------------------------ comparisons


def test_comparisons_of_all_columns_shown_are_counted():
    values = {"softmax": [57.2, 57.0], "mos": [55.1, 54.8], "moc": [56.1, 56.3]}
    found = groups(
        [
            row(f"train.sh {layer}", seed, layer, layer, **{"valid ppl": ppl + 1, "test ppl": ppl})
            for layer, of_seeds in values.items()
            for seed, ppl in enumerate(of_seeds)
        ]
    )
    text = groups_markdown(found, compare(found, found[0]), found[0], ["test ppl", "valid ppl", "p Student"])
    assert "; 4 comparisons," in text


def test_compare():
    values = {"softmax": [57.2, 57.0, 57.05], "mos": [55.1, 54.8], "moc": [57.5]}
    rows = [
        row(
            f"train.sh {layer}",
            n,
            f"{layer}{n}",
            layer,
            **{"test ppl": value, "rank": 400 + n, "valid ppl": "unreadable"},
        )
        for layer, of_layer in values.items()
        for n, value in enumerate(of_layer)
    ]
    for r in rows:
        r["analyses"] = {"rank": r["rank"]}
    found = groups(rows)
    lines = softmax, mos, moc = compare(found, found[0])
    assert (mos["n"], mos["test ppl"], mos["rank"]) == (2, pytest.approx(54.95), 400.5)
    assert mos["test ppl sd"] == pytest.approx(np.std(values["mos"], ddof=1))
    assert mos["p Student, test ppl"] == pytest.approx(stats.ttest_ind(values["mos"], values["softmax"]).pvalue)
    welch = stats.ttest_ind(values["mos"], values["softmax"], equal_var=False).pvalue
    assert mos["p Welch, test ppl"] == pytest.approx(welch)
    assert moc["test ppl sd"] is None and moc["p Student, test ppl"] is None and moc["valid ppl"] is None
    assert "p Student, test ppl" not in softmax and "p Student, rank" not in mos
    text = groups_markdown(found, lines, found[0], ["test ppl", "p Welch"])
    assert "; 1 comparison," in text and "| p Welch, test ppl |" in text and "| p Student" not in text
    for columns in (["test ppl"], ["rank", "p Welch"]):
        assert "t-test" not in groups_markdown(found, lines, found[0], columns)  # none is shown


@pytest.mark.parametrize("column", ["BLEU-1 precision", "BLEU lower-cased tokens"])
def test_whatever_has_a_signature_is_compared(column):
    found = trainings_of(column, softmax=[0.20, 0.22], mos=[0.25, 0.26])
    assert f"{column}, difference" not in compare(found, found[0])[1], "not known as a score"
    for group in found:
        for r in group.rows:
            r.update({f"{column} signature": "one", "BLEU 13a": 30.0})
    mos = compare(found, found[0])[1]
    assert mos[f"{column}, difference"] == pytest.approx(0.045)
    text = groups_markdown(found, compare(found, found[0]), found[0], [column])
    assert text.endswith(f"\n- {column}: `one`\n")


def test_a_mean_may_be_called_as_a_p_value_is():
    found = trainings_of("valid ppl", softmax=[57.2, 57.0], mos=[55.1, 54.8])
    for group in found:
        add_mean(group.rows, "p mean", ["valid ppl", "valid ppl"], [])
    lines = compare(found, found[0], ["p mean"])
    (softmax, _), text = table_of(groups_markdown(found, lines, found[0], ["p mean"]))
    assert softmax["p mean"] == "57.10 ± 0.14" and "t-test" not in text


def test_scores_of_several_signatures_are_told_with_their_folders():
    found = trainings_of("BLEU 13a", softmax=[38.0, 39.0])
    for number, r in enumerate(found[0].rows):
        r.update({"BLEU 13a signature": f"version:{number}", "folder": f"checkpoints/{number}"})
    text = groups_markdown(found, compare(found), columns=["BLEU 13a"])
    assert text.endswith("\n- BLEU 13a (checkpoints/0): `version:0`\n- BLEU 13a (checkpoints/1): `version:1`\n")


@pytest.mark.parametrize("column", ["cache pointer", "dynamic evaluation", "test ppl"])
def test_perplexities_differ_in_percent(column):
    found = trainings_of(column, softmax=[100.0, 102.0], mos=[90.0, 91.8])
    assert compare(found, found[0])[1][f"{column}, difference"] == pytest.approx(-10)


def trainings_of(column, **layers):
    return groups(
        [
            row(f"train.sh {layer}", seed, layer, layer, **{column: value})
            for layer, values in layers.items()
            for seed, value in enumerate(values)
        ]
    )


def test_only_trainings_of_different_seeds_differ_in_their_seed_alone():
    text = {}
    for seeds in (1, 2), (1, 1):
        trainings = [row("train.sh a", seed, f"a{n}", "a", parameters=1) for n, seed in enumerate(seeds)]
        text[seeds] = groups_markdown(found := groups([*trainings, row("train.sh b", 1, "b", "b")]), compare(found))
    assert "n trainings that differ in their seed alone." in text[1, 2]
    assert "n trainings." in text[1, 1]


def test_whole_numbers():
    """What is counted has no decimals; a perplexity of 81.00 keeps them."""
    found = groups([row("train.sh a", 1, "a", "a", **{"parameters": 1234, "test ppl": 81.0})])
    lines = compare(found)
    (line,), _ = table_of(groups_markdown(found, lines))
    assert (line["parameters"], line["test ppl"]) == ("1,234", "81.00")


def test_an_interval_ends_where_students_test_has_five_percent():
    softmax, mos = [57.2, 57.0, 57.05, 57.4], [55.1, 54.8]
    for column in ("test ppl", "BLEU 13a"):
        map_, back = (np.log, lambda end: math.log(1 + end / 100)) if column == "test ppl" else (np.array, float)
        found = trainings_of(column, softmax=softmax, mos=mos)
        middle, *ends = map(back, differences(found, found[0], column)["mos"])
        assert middle == pytest.approx(np.mean(map_(mos)) - np.mean(map_(softmax)))
        assert ends[0] < middle < ends[1]
        for end in ends:
            assert stats.ttest_ind(map_(mos), map_(softmax) + end).pvalue == pytest.approx(0.05)


def test_intervals_of_several_groups_are_those_of_a_regression():
    """On a dummy for each layer, with Bonferroni's quantile; also for the layer of one seed."""
    layers = {"softmax": [38.6, 38.5, 38.0], "moc": [39.1, 39.3], "mixtape": [37.6]}
    found = trainings_of("BLEU 13a", **layers)
    y = np.concatenate(list(layers.values()))
    design = np.array([[1, 0, 0]] * 3 + [[1, 1, 0]] * 2 + [[1, 0, 1]])
    effects, squares, *_ = np.linalg.lstsq(design, y, rcond=None)
    covariance = np.linalg.inv(design.T @ design) * squares[0] / 3
    for place, layer in ((1, "moc"), (2, "mixtape")):
        half = stats.t.ppf(1 - 0.05 / 4, 3) * covariance[place, place] ** 0.5
        expected = [effects[place], effects[place] - half, effects[place] + half]
        assert list(differences(found, found[0], "BLEU 13a")[layer]) == pytest.approx(expected)
    apart = stats.t.ppf(0.975, 3) * (2 * squares[0] / 3) ** 0.5
    assert f"less than {apart:.2f} in BLEU 13a (3 degrees of freedom) apart" in chance_of_seeds(found, ["BLEU 13a"])


def test_seeds_of_perplexity_are_a_ratio_apart():
    """Their logarithms are normal, here with scatter enough to tell a ratio from its logarithm."""
    perplexities = {"softmax": [57.0, 71.0, 60.0], "moc": [61.0, 52.0]}
    found = trainings_of("test ppl", **perplexities)
    squares = sum(np.var(np.log(values)) * len(values) for values in perplexities.values())
    apart = 100 * math.expm1(stats.t.ppf(0.975, 3) * (2 * squares / 3) ** 0.5)
    assert f"less than {apart:.1f}% in test ppl (3 degrees of freedom) apart" in chance_of_seeds(found, ["test ppl"])


@pytest.mark.parametrize(
    "layers", [{"softmax": [57.0], "mos": [55.0]}, {"softmax": [57.0, 57.0], "mos": [55.0]}, {"mos": [5, 6]}]
)
def test_no_interval_without_scatter_or_baseline(layers):
    found = trainings_of("test ppl", **{"softmax": [], **layers})
    origin = found[0] if "softmax" in layers else groups([row("train.sh softmax", 1)])[0]
    assert differences(found, origin, "test ppl") == {}


# --------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def trainings(folder):
    """Three softmax and two mixtape trainings that differ in their seed, the first of which was analyzed."""
    made = []
    for layer, ppl in (("softmax", (100, 104, 102)), ("mixtape", (90, 93))):
        for seed, value in enumerate(ppl, 1):
            log = start(layer, seed) + epoch(1, 274, 2 * value) + epoch(2, 548, value).replace("6.17", f"{value / 2}")
            made.append(
                folder(f"{layer}{seed}", train_log=log + DONE, test__perplexity_txt=f"test nll_loss 1 | ppl {value}\n")
            )
    for seed, path in enumerate(made):
        (path / "rank.json").write_text(f'{{"columns": {{"rank": {400 + seed**2}, "KLD": 4.8765}}}}')
    return made


def test_groups_on_the_command_line(trainings, capsys, tmp_path):
    collect_results.main([*map(str, trainings), "--baseline", "softmax", "--groups-csv", str(tmp_path / "groups.csv")])
    first, second = capsys.readouterr().out.split("\n\n", 1)
    rows, _ = table_of(first)
    assert (rows[0]["train ppl"], rows[0]["rank"], rows[0]["KLD"], rows[4]["rank"]) == ("50.00", "400", "4.877", "416")
    (softmax, mixtape), notes = table_of(second)
    assert softmax["group"] == "softmax" and softmax["n"] == "3" and softmax["test ppl"] == "102.00 ± 2.00"
    assert (
        mixtape["test ppl"] == "91.50 ± 2.12"
        and mixtape["parameters"] == "5,472,793"
        and mixtape["s an epoch"] == "440"
    )
    student = stats.ttest_ind([100, 104, 102], [90, 93]).pvalue
    assert mixtape["test ppl, difference"] == "-10.3% [-15.6, -4.7]"  # e^(−.1086 ± 3.182 · .0209 · √(1/2 + 1/3)) − 1
    assert softmax["test ppl, difference"] == "" and notes[-2].startswith(
        "difference: from softmax, with 95% intervals"
    )
    assert mixtape["p Student, test ppl"] == f"{student:.3g}" and softmax["p Student, test ppl"] == ""
    assert (
        notes[-1].startswith("p: unpaired two-sided t-test against softmax")
        and "; 2 comparisons, not corrected" in notes[-1]
    )
    with open(tmp_path / "groups.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert float(lines[1]["p Student, test ppl"]) == pytest.approx(student) and lines[0]["p Student, test ppl"] == ""
    assert lines[1]["command"] == "examples/multi30k/train.sh mixtape" and float(lines[1]["rank sd"]) > 0

    collect_results.main([*map(str, trainings), "--baseline", "softmax", "--columns", "test ppl,p Student"])
    (_, shown), _ = table_of(capsys.readouterr().out)
    assert shown == {
        name: mixtape[name] for name in ("group", "n", "test ppl", "test ppl, difference", "p Student, test ppl")
    }


def test_a_mean_of_columns_is_tested_like_a_score(trainings, capsys, tmp_path):
    (trainings[1] / "rank.json").unlink()  # one of three softmaxes has no mean
    mean = ["--mean", "both, halved", "train ppl", "rank"]
    collect_results.main(
        [*map(str, trainings), *mean, "--baseline", "softmax", "--groups-csv", str(tmp_path / "m.csv")]
    )
    first, second = capsys.readouterr().out.split("\n\n", 1)
    rows, _ = table_of(first)
    assert [row["both, halved"] for row in rows] == ["225.00", "not run", "227.50", "227.00", "231.25"]
    (softmax, mixtape), _ = table_of(second)
    assert softmax["both, halved"] == "226.25 ± 1.77 (n = 2)" and mixtape["both, halved"] == "229.12 ± 3.01"
    pooled = ((1.25**2 * 2 + 2.125**2 * 2) / 2) ** 0.5  # of two pairs, each 1 degree of freedom
    half = stats.t.ppf(0.975, 2) * pooled
    assert mixtape["both, halved, difference"] == f"+2.88 [{2.875 - half:+.2f}, {2.875 + half:+.2f}]"
    with open(tmp_path / "m.csv", newline="") as file:
        p = float(list(csv.DictReader(file))[1]["p Student, both, halved"])
    assert p == pytest.approx(stats.ttest_ind([225, 227.5], [227, 231.25]).pvalue)

    collect_results.main([*map(str, trainings), *mean, "--columns", "both, halved,seed"])
    assert table_of(capsys.readouterr().out)[0][0] == {"both, halved": "225.00", "seed": "1"}


def test_correlation_on_the_command_line(trainings, capsys, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plt, "close", lambda figure: drawn.append(figure.axes[0]))
    monkeypatch.chdir(tmp_path)
    collect_results.main([*map(str, trainings), "--correlate", "rank", "test ppl", "--range", "90", "103"])
    expected = stats.pearsonr([400, 404, 409, 416], [100, 102, 90, 93])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == (
        f"test ppl over rank: Pearson r = {expected[0]:.3f}, p = {expected[1]:.3g}, n = 4 (correlation.png)"
    )
    assert (tmp_path / "correlation.png").read_bytes().startswith(b"\x89PNG")
    points = {c.get_label(): c.get_offsets().tolist() for c in drawn[0].collections}
    assert points == {"softmax": [[400, 100], [404, 102]], "mixtape-4": [[409, 90], [416, 93]]}


@pytest.mark.parametrize(
    "args, sentence",
    [
        (
            ["--correlate", "rank", "BLEU"],
            "--correlate BLEU is no column with numbers: these trainings have .*, rank, ",
        ),
        (["--correlate", "rank", "KLD"], "--correlate rank KLD has nothing to show: all trainings have the same value"),
        (
            ["--correlate", "rank", "test ppl", "--range", "90", "94"],
            "at least 3 trainings that have both, there are 2",
        ),
        (["--columns", "test ppl,p Welch"], "--columns p Welch is none of"),  # without a baseline
        (["--mean", "both", "rank"], "--mean both rank is not allowed: a name, and two columns or more"),
        (["--mean", "rank", "KLD", "test ppl"], "--mean 'rank' is a column already"),
        (["--mean", *(both := ["both", "rank", "KLD"]), "--mean", *both], "--mean 'both' is a column already"),
        (["--mean", "curve", "rank", "KLD"], "--mean 'curve' is a column already"),
        (["--mean", "both", "rank", "layer"], "--mean 'both' cannot be of 'layer': no training has a number there"),
        (["--range", "1", "2"], "--range .* needs --correlate: name two columns"),
        (["--correlate", "rank", "test ppl", "--scatter", "a.txt"], "--scatter a.txt is not allowed"),
        (
            ["--correlate", "rank", "test ppl", "--plot", "correlation.png"],
            "--scatter correlation.png is not allowed, as --plot names it",
        ),
    ],
)
def test_mistakes(args, sentence, trainings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        collect_results.main([*map(str, trainings), *args])
    assert not list(tmp_path.glob("*.png"))


def test_correlation_leaves_out_what_is_no_number():
    rows = [{"a": float(n), "b": n * n} for n in range(4)]
    rows += [{"a": math.inf, "b": 1}, {"a": "unreadable", "b": 2}, {"b": 3}, {"a": None, "b": 3}]
    found = correlate(rows, "a", "b")
    assert found.r == pytest.approx(np.corrcoef(range(4), [0, 1, 4, 9])[0, 1]) and len(found.rows) == 4


def test_the_range_of_a_correlation_has_both_its_ends():
    rows = [{"a": float(n), "b": float(n * n)} for n in range(6)]
    found = correlate(rows, "a", "b", (1.0, 16.0))
    assert [row["b"] for row in found.rows] == [1, 4, 9, 16]
    assert found.r == pytest.approx(np.corrcoef([1, 2, 3, 4], [1, 4, 9, 16])[0, 1])
