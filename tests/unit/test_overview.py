"""collect_results.py --overview: one table and one picture of several comparisons."""

import csv
import json
import math
import shutil

import pytest
from recipes import ROOT, load_script
from scipy import stats
from training_logs import SCORES, epoch, start, table_of

from mixtape_plugin.analysis.results import value_of
from mixtape_plugin.errors import UserError
from mixtape_plugin.files import read_csv

collect_results = load_script("collect_results")


@pytest.fixture
def overview(folder, tmp_path, monkeypatch, capsys):
    """A comparison with seeds and one of single trainings, and the file that names them."""
    monkeypatch.chdir(tmp_path)
    several = {"softmax": (100, 104, 102), "mixtape": (90, 93), "plif": (99,)}
    single = {"softmax": (50,), "mixtape": (51,)}
    for name, layers, options in (("several", several, ["--baseline", "softmax"]), ("single", single, [])):
        folders = []
        for layer, perplexities in layers.items():
            for seed, perplexity in enumerate(perplexities):
                files = {"test__perplexity_txt": f"test nll_loss 1 | ppl {perplexity}\n"}
                if (name, seed) != ("several", 2):  # one was not translated
                    files["score_json"] = json.dumps([{**SCORES[0], "score": perplexity / 3}])
                log = start(layer, seed) + epoch(1, 100, 2 * perplexity)
                folders.append(str(folder(f"{name}.{layer}.{seed}", train_log=log, **files)))
        collect_results.main([*folders, *options, "--groups-csv", f"{name}.csv"])
    lines = (
        "trainings,groups,plain,Mixtape,PLIF,MoS",
        '"long, wide",several.csv,softmax,mixtape-4,plif,–',
        "short,single.csv,softmax,mixtape-4,,–",
    )
    (tmp_path / "overview.csv").write_text("".join(f"{line}\n" for line in lines))
    capsys.readouterr()
    return tmp_path / "overview.csv"


def interval(perplexities, others, comparisons, groups):
    """The difference in percent of geometric means and its 95% interval, by the definition."""
    logs = [[math.log(value) for value in values] for values in groups]
    df = sum(len(values) - 1 for values in logs)
    variance = sum(sum((y - sum(ys) / len(ys)) ** 2 for y in ys) for ys in logs) / df
    first, second = ([math.log(value) for value in values] for values in (perplexities, others))
    middle = sum(first) / len(first) - sum(second) / len(second)
    half = stats.t.ppf(1 - 0.05 / 2 / comparisons, df) * math.sqrt(variance * (1 / len(first) + 1 / len(second)))
    return [100 * (math.exp(end) - 1) for end in (middle, middle - half, middle + half)]


def test_overview(overview, monkeypatch, capsys):
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_hex

    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    collect_results.main(["--overview", "overview.csv", "--differences", "overview.png"])
    (long, short), notes = table_of(capsys.readouterr().out)
    softmax, mixtape, plif = (100, 104, 102), (90, 93), (99,)
    of_mixtape, of_plif = (interval(group, softmax, 2, (softmax, mixtape)) for group in (mixtape, plif))
    assert long == {
        "test ppl": "long, wide",
        "plain": "102.00 ± 2.00 (3)",
        "Mixtape": "{:+.1f}% [{:+.1f}, {:+.1f}] (2)".format(*of_mixtape),
        "PLIF": "{:+.1f}% [{:+.1f}, {:+.1f}] (1)".format(*of_plif),
        "MoS": "–",
    }
    assert short == {"test ppl": "short", "plain": "50.00 (1)", "Mixtape": "+2.0% (1)", "PLIF": "not run", "MoS": "–"}
    assert notes[-1].startswith("plain: mean ± sample standard deviation.")

    (figure,) = drawn
    (axes,) = figure.axes
    assert (overview.parent / "overview.png").read_bytes().startswith(b"\x89PNG")
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in points] == pytest.approx([of_mixtape[0], of_plif[0], 2])
    rows = [min(range(2), key=lambda row: abs(row - line.get_ydata()[0])) for line in points]
    assert rows == [0, 0, 1] and all(abs(line.get_ydata()[0] - row) < 0.5 for line, row in zip(points, rows))
    colors = [line.get_color() for line in points]
    assert colors[0] == colors[2] != colors[1]  # a colour for each layer
    assert [line.get_markerfacecolor() == line.get_color() for line in points] == [True, True, False]
    ends = [line.get_paths()[0].get_extents() for line in axes.collections]
    assert [(box.x0, box.x1) for box in ends] == [pytest.approx(tuple(of[1:])) for of in (of_mixtape, of_plif)]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["long, wide\nplain 102.00 ± 2.00 (3)", "short\nplain 50.00 (1)"] and axes.yaxis_inverted()
    assert [text.get_text() for text in figure.legends[0].texts] == ["Mixtape", "PLIF"]  # MoS has nothing to show
    handles = figure.legends[0].legend_handles
    assert [to_hex(handle.get_color()[0]) for handle in handles] == [to_hex(color) for color in colors[:2]]
    assert axes.get_xlabel().startswith("test ppl, difference from plain, %")
    assert [0, 0] in [list(line.get_xdata()) for line in axes.lines]


def test_of_another_score(overview, capsys):
    collect_results.main(["--overview", "overview.csv", "--columns", " valid ppl"])
    (_, short), _ = table_of(capsys.readouterr().out)
    assert (short["valid ppl"], short["plain"], short["Mixtape"]) == ("short", "100.00 (1)", "+2.0% (1)")


@pytest.mark.parametrize(
    "argv", [["--where", "short"], ["--without", "wide"], ["--without", "lon", "--without", "wide"]]
)
def test_of_some_lines(argv, overview, capsys):
    collect_results.main(["--overview", "overview.csv", *argv])
    (line,), _ = table_of(capsys.readouterr().out)
    assert (line["test ppl"], line["plain"], line["Mixtape"]) == ("short", "50.00 (1)", "+2.0% (1)")


def test_of_lines_whose_table_has_the_score(overview, capsys):
    """Another line's table need not have it."""
    several = overview.parent / "several.csv"
    several.write_text(several.read_text().replace("BLEU 13a", "BLEU intl"))
    with pytest.raises(UserError, match="several.csv is no table of --groups-csv that has BLEU 13a"):
        collect_results.main(["--overview", "overview.csv", "--columns", "BLEU 13a"])
    collect_results.main(["--overview", "overview.csv", "--columns", "BLEU 13a", "--without", "long"])
    (line,), _ = table_of(capsys.readouterr().out)
    assert (line["BLEU 13a"], line["Mixtape"]) == ("short", "+0.33 (1)")


def test_of_bleu(overview, capsys):
    """In its own unit; of three trainings two were translated."""
    collect_results.main(["--overview", "overview.csv", "--columns", "BLEU 13a"])
    (long, short), _ = table_of(capsys.readouterr().out)
    assert long["plain"] == f"{102 / 3:.2f} ± {math.sqrt(8) / 3:.2f} (2)" and long["Mixtape"].startswith("-3.50 [")
    assert long["Mixtape"].endswith("] (2)") and (short["plain"], short["Mixtape"]) == ("16.67 (1)", "+0.33 (1)")


def test_a_table_as_a_spreadsheet_writes_it(overview, capsys):
    argv = ["--overview", "overview.csv"]
    collect_results.main(argv)
    before = capsys.readouterr().out
    for path in overview.parent.glob("*.csv"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    collect_results.main(argv)
    assert capsys.readouterr().out == before


def test_labels_have_room(overview, monkeypatch):
    """Of long names, beside a single layer."""
    import matplotlib.pyplot as plt

    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    name = "trainings with many words in their name, so that it wants several lines"
    lines = "".join(f'"{name} {n}",single.csv,softmax,mixtape-4\n' for n in range(6))
    overview.write_text(f"trainings,groups,softmax,Mixtape\n{lines}")
    collect_results.main(["--overview", "overview.csv", "--differences", "overview.png"])
    boxes = [label.get_window_extent() for label in figures[0].axes[0].get_yticklabels()]
    assert all(lower.y1 < upper.y0 for upper, lower in zip(boxes, boxes[1:]))


@pytest.mark.parametrize(
    "text, args, sentence",
    [
        ("trainings,layer\nx,y\n", [], "overview.csv is no overview: it must have the columns trainings, groups, and"),
        (
            "trainings,groups,softmax\nx,single.csv,softmax\n",
            [],
            "must have a column for the baseline and one for each",
        ),
        ("trainings,groups,a,b\nx,single.csv,softmax\n", [], "overview.csv, row 1 is damaged"),
        ("trainings,groups,a,b\nx,none.csv,softmax,plif\n", [], "none.csv cannot be read: No such file"),
        (
            "trainings,groups,a,b\nx,overview.csv,softmax,plif\n",
            [],
            "overview.csv is no table of --groups-csv that has test ppl",
        ),
        (
            "trainings,groups,a,b\nx,single.csv,softmax,plif\n",
            [],
            "b of 'x' is 'plif': it must be a group of single.csv, one of softmax, mixtape-4, or nothing or – where",
        ),
        ("trainings,groups,a,b\nx,single.csv,,mixtape-4\n", [], "a of 'x' is '': it must be a group of single.csv"),
        ("trainings,groups,a,b\nx,,softmax,mixtape-4\n", [], "'x' has no file under groups"),
        ("trainings,groups,a,a\nx,single.csv,softmax,mixtape-4\n", [], "overview.csv has two columns called 'a'"),
        ("trainings,groups,a,b\nx,twice.csv,softmax,mixtape-4\n", [], "twice.csv has two groups called 'softmax'"),
        (
            None,
            ["--columns", "train ppl"],
            "several.csv does not compare train ppl of 'mixtape-4' with 'softmax': write it with --baseline 'softmax'",
        ),
        (None, ["--columns", "n"], "several.csv is no table of --groups-csv that has n: a score such as test ppl is"),
        (
            "trainings,groups,a,b\nx,single.csv,softmax,–\n",
            ["--differences", "a.png"],
            "--differences a.png has nothing to draw: no layer has a difference from a",
        ),
        (None, ["--markdown", "single.csv"], "--markdown single.csv is not allowed, as single.csv is read, too"),
        (
            "trainings,groups,a,b\nx,several.csv,mixtape-4,softmax\n",
            [],
            "several.csv does not compare test ppl of 'softmax' with 'mixtape-4'",
        ),
        (
            "trainings,groups,a,b\nx,several.csv,mixtape-4,plif\n",
            [],
            "several.csv does not compare test ppl of 'plif' with 'mixtape-4'",
        ),
        (None, ["--columns", "BLEU"], "several.csv is no table of --groups-csv that has BLEU"),
        (
            None,
            ["--groups"],
            "--overview overview.csv goes with no option but --columns, --where, --without, --markdown, --differences: "
            "leave out groups",
        ),
        (None, ["--where", "long", "--where", "short"], "--where and --without leave no line of overview.csv"),
        (None, ["--differences", "a.txt"], "--differences a.txt is not allowed: a name that ends in .png"),
        (None, ["--markdown", "overview.csv"], "--markdown overview.csv is not allowed, as overview.csv is read, too"),
    ],
)
def test_mistakes(text, args, sentence, overview):
    if text:
        overview.write_text(text)
    single = (overview.parent / "single.csv").read_text()
    (overview.parent / "twice.csv").write_text(single + single.splitlines(keepends=True)[1])
    with pytest.raises(UserError, match=sentence):
        collect_results.main(["--overview", "overview.csv", *args])
    assert not list(overview.parent.glob("a.*")) and (overview.parent / "single.csv").read_text() == single


def test_an_overview_is_of_what_other_pages_make(overview, folder, capsys):
    """It is of the trainings as they are now, not as they were when the pages were last made, in whichever order."""
    log = start("softmax", 1) + epoch(1, 100, 80)
    slower = folder("slower", train_log=log, test__perplexity_txt="test nll_loss 1 | ppl 40\n")
    first, second = overview.parent / "first.md", overview.parent / "second.md"
    first.write_text("<!-- collect_results.py --overview overview.csv -->\n<!-- end -->\n")
    block = "<!-- collect_results.py {} single.mixtape.0 --columns layer --groups-csv single.csv -->\n<!-- end -->\n"
    second.write_text(block.format("nowhere"))
    with pytest.raises(UserError, match="nowhere is no folder"):
        collect_results.main(["--page", str(first), str(second)])
    assert "| short |" not in first.read_text()  # no page is made where one cannot be
    second.write_text(block.format(slower))
    collect_results.main(["--page", str(first), str(second)])
    assert "| short | 40.00 (1) | +27.5% (1) |" in first.read_text()
    assert "| layer |\n| --- |\n| softmax |\n" in second.read_text()


def cells_of(path):
    """Of a CSV file, what is no number, and the numbers, each by row and column."""
    with open(path, newline="") as file:
        cells = {(n, name): value_of(cell) for n, row in enumerate(csv.DictReader(file)) for name, cell in row.items()}
    numbers = {place: value for place, value in cells.items() if isinstance(value, (int, float))}
    return {place: value for place, value in cells.items() if place not in numbers}, numbers


def test_the_pages_are_what_their_files_give(tmp_path, monkeypatch):
    """Made anew from the rows of trainings in the repository, the tables are those that stand there."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    for results in ROOT.glob("examples/*/results"):
        shutil.copytree(results, tmp_path / results.relative_to(ROOT))
    monkeypatch.chdir(tmp_path)
    for line in read_csv("docs/overview.csv", ["groups"], "is the overview"):  # which the pages make
        (tmp_path / line["groups"]).unlink(missing_ok=True)  # of two lines
    pages = ["README.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/results*.md")))]
    assert len(pages) > 2
    collect_results.main(["--page", *pages])
    for page in pages:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), page
    for table in ROOT.glob("examples/*/results/*.csv"):
        (words, numbers), (kept_words, kept_numbers) = cells_of(tmp_path / table.relative_to(ROOT)), cells_of(table)
        assert words == kept_words and numbers == pytest.approx(kept_numbers)  # other processors round otherwise
