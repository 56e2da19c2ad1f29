"""The pictures of scripts/collect_results.py: what is drawn, where, and under which name."""

import pytest
from recipes import load_script
from training_logs import epoch, row, start, table_of

from mixtape_plugin.analysis.groups import groups
from mixtape_plugin.analysis.result_pictures import draw_curves
from mixtape_plugin.errors import UserError

collect_results = load_script("collect_results")


@pytest.fixture
def drawn(monkeypatch):
    """The panels of each picture drawn."""
    import matplotlib.pyplot as plt

    pictures = []
    monkeypatch.setattr(plt, "close", lambda figure: pictures.append(figure.axes))
    return pictures


def test_plot(folder, drawn, tmp_path):
    one = folder("one", train_log=start() + epoch(1, 274, 200.5) + epoch(2, 548, 63.25))
    two = folder("two", train_log=start("softmax", 1) + epoch(1, 300, 150))
    three = folder("three", train_log=start("softmax", 3) + epoch(1, 300, 140))
    again = folder("again", train_log=start() + epoch(1, 274, 200.5))
    none = folder("none", train_log=start("softmax", 2))
    collect_results.main([*map(str, (one, two, three, again, none)), "--plot", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    axes = drawn[0][0]
    lines = axes.lines
    mixtape, softmax = [[[274, 200.5], [548, 63.25]], [[274, 200.5]]], [[[300, 145]]]  # two seeds: their mean
    assert [line.get_xydata().tolist() for line in lines] == mixtape + softmax
    colors = [line.get_color() for line in lines]
    assert colors[0] == colors[1] != colors[2]
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().intervaly.tolist() == [140, 150]
    assert [text.get_text() for text in axes.get_legend().texts] == ["mixtape-4, 2 trainings", "softmax, 2 seeds"]
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) > 3
    assert not list(tmp_path.glob(".*"))


def test_seeds_are_drawn_at_their_median_hours(drawn, tmp_path):
    times = {"curve": {9: 5.0}, "epochs": 1, "tokens/s": 1}
    rows = [row("t.sh softmax", n, **times, **{"s an epoch": s}) for n, s in enumerate((3600, 7200, 36000))]
    draw_curves(tmp_path / "a.png", groups(rows))
    assert drawn[0][1].lines[0].get_xdata().tolist() == [2.0]


def test_long_names_are_wrapped(folder, drawn, tmp_path):
    """The legend lies within its panel."""
    flags = " --hidden-sizes 416,140 --dropout 0.3 --input-dropout 0.3 --hidden-dropout 0.3 --embedding-dropout 0.1"
    few = folder("few", train_log=start() + epoch(1, 274, 200.5))
    more = folder(
        "more", train_log=start().replace("train.sh mixtape", f"train.sh mixtape{flags}") + epoch(1, 274, 200)
    )
    collect_results.main([str(few), str(more), "--plot", str(tmp_path / "curves.png")])
    axes = drawn[0][0]
    legend, panel = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert panel.x0 < legend.x0 and legend.x1 < panel.x1
    assert " ".join(axes.get_legend().texts[1].get_text().split()) == f"mixtape-4:{flags}"


def test_many_names_are_beside_the_curves(folder, drawn, tmp_path):
    logs = {f"n{n}": start().replace("train.sh mixtape", f"train.sh mixtape --gate-dim {n}") for n in range(1, 10)}
    folders = [folder(name, train_log=log + epoch(1, 274, 200.5) + epoch(2, 548, 90)) for name, log in logs.items()]
    collect_results.main([*map(str, folders), "--plot", str(tmp_path / "curves.png")])
    axes = drawn[0][0]
    (legend,) = axes.figure.legends
    assert axes.get_legend() is None and len(legend.texts) == 9
    assert legend.get_window_extent().x0 > max(a.get_window_extent().x1 for a in axes.figure.axes)
    assert legend.get_window_extent().x1 <= axes.figure.bbox.x1


def test_groups_by_other_names(folder, drawn, tmp_path, capsys):
    """The same names in the table, the tests' line and both pictures."""
    folders = []
    for flags, seed, perplexity in (("", 1, 140), ("", 2, 150), (" --small", 1, 130), (" --small", 2, 133)):
        log = start("softmax", seed).replace("train.sh softmax", f"train.sh softmax{flags}") + epoch(1, 9, perplexity)
        folders.append(str(folder(f"{seed}{flags.strip()}", train_log=log)))
    pictures = [str(tmp_path / "curves.png"), str(tmp_path / "differences.png")]
    names = ["--name", "softmax: no further flags", "large", "--name", "softmax: --small", "small one"]
    columns = ["--columns", "valid ppl", "--baseline", "large"]
    collect_results.main([*folders, *names, *columns, "--plot", pictures[0], "--differences", pictures[1]])
    printed = capsys.readouterr().out
    rows, _ = table_of(printed)
    assert [row["group"] for row in rows] == ["large", "small one"]
    assert "difference: from large" in printed and "further flags" not in printed
    assert [text.get_text() for text in drawn[0][0].get_legend().texts] == ["large, 2 seeds", "small one, 2 seeds"]
    assert [text.get_text() for text in drawn[1][0].get_yticklabels()] == ["small one (2)"]


def test_a_plot_shows_where_trainings_end(folder, drawn, tmp_path):
    whole = folder("whole", train_log=start() + epoch(1, 100, 400.5) + epoch(2, 200, 6.25) + epoch(3, 300, 6))
    stopped = folder("stopped", train_log=start("softmax", 1) + epoch(1, 100, 300) + epoch(2, 200, 30))
    for folders, highest in (([whole], 15), ([whole, stopped], 30)):  # 2.5 × 6; the other's end
        collect_results.main([*map(str, folders), "--plot", str(tmp_path / "curves.png")])
        low, high = drawn[-1][0].get_ylim()
        assert 5.5 < low < 6 and highest < high < 1.1 * highest


def test_a_plot_of_a_long_training_leaves_out_its_first_quarter(folder, drawn, tmp_path):
    curve = {1: 11, 2: 9, 3: 8, 4: 7, 5: 6.5, 8: 6}  # 2.5 × 6 would show all
    log = start() + "".join(epoch(n, 100 * n, perplexity) for n, perplexity in curve.items())
    collect_results.main([str(folder("long", train_log=log)), "--plot", str(tmp_path / "curves.png")])
    low, high = drawn[-1][0].get_ylim()
    assert 5.5 < low < 6 and 9 < high < 10


def test_a_plot_has_hours_where_speeds_are_known(folder, drawn, tmp_path):
    # seconds an epoch: 360, the median; the third, of 100 updates, has a standstill
    log = epoch(1, 300, 200, train_wall=300) + epoch(2, 600, 150, train_wall=360) + epoch(3, 700, 140, train_wall=720)
    known = folder("known", train_log=start() + log)
    twice = folder("twice", train_log=start("softmax", 1) + epoch(1, 100, 300) + epoch(1, 200, 30))
    collect_results.main([str(known), str(twice), "--plot", str(tmp_path / "curves.png")])
    by_updates, by_hours = drawn[0]
    assert [len(panel.lines) for panel in (by_updates, by_hours)] == [2, 1]
    assert by_hours.get_xlabel() == "hours of training"
    assert by_hours.lines[0].get_xydata().tolist() == [
        [pytest.approx(hours), perplexity] for hours, perplexity in ((0.1, 200), (0.2, 150), (700 / 3000, 140))
    ]
    collect_results.main([str(twice), "--plot", str(tmp_path / "curves.png")])
    assert len(drawn[1]) == 1


def test_hours_at_speeds_measured_in_turns(folder, drawn, tmp_path):
    """Of the networks that were measured, by layer and parameters, whatever --where leaves out."""

    def long(layer, wps, train_wall, ppl, **parameters):
        begin = start(layer, **parameters).replace(f"train.sh {layer}", f"train.sh {layer} --long")
        return begin + epoch(1, 300, ppl, wps=wps, train_wall=train_wall)

    def turn(layer, wps):
        begin = start(layer).replace(f"train.sh {layer}", f"train.sh {layer} --turns")
        return begin + epoch(1, 300, 99, wps=wps).splitlines()[0] + "\n"  # neither validated nor at an epoch's end

    logs = {
        "softmax": long("softmax", 1000, 360, 200),
        "mixtape": long("mixtape", 100, 3600, 150),
        "wide": long("softmax", 700, 360, 120, parameters="9,000,000"),
        "turn1": turn("softmax", 1000),
        "turn2": turn("softmax", 2000),
        "turn3": turn("mixtape", 500),
    }
    folders = [str(folder(name, train_log=text)) for name, text in logs.items()]
    plot = ["--where=--long", "--plot", str(tmp_path / "curves.png")]
    collect_results.main([*folders, *plot, "--speeds=--turns"])
    by_updates, by_hours = drawn[0]
    assert by_hours.get_xlabel() == "hours of training, at speeds measured in turns"
    assert [len(panel.lines) for panel in (by_updates, by_hours)] == [3, 2]
    # 360 s at 1,000 tokens a second are 240 s at 1,500, 3,600 s at 100 are 720 at 500
    assert sorted(line.get_xydata().tolist() for line in by_hours.lines) == [
        [[pytest.approx(240 / 3600), 200]],
        [[pytest.approx(720 / 3600), 150]],
    ]
    with pytest.raises(UserError, match="--speeds --nowhere is in no command of a training whose speed is known"):
        collect_results.main([*folders, *plot, "--speeds=--nowhere"])
    with pytest.raises(UserError, match="--speeds --turns needs --plot"):
        collect_results.main([*folders, "--speeds=--turns"])


def test_a_line_for_each_layer_over_a_flag(folder, drawn, tmp_path, capsys):
    runs = [("softmax", 1, 32, 150), ("softmax", 2, 32, 160), ("softmax", 1, 64, 120), ("mixtape", 1, 32, 140)]
    folders = [
        folder(
            f"{n}", train_log=start(layer, seed).replace("\n", f" --width 8 --width={e} --dry\n", 1) + epoch(1, 9, ppl)
        )
        for n, (layer, seed, e, ppl) in enumerate(runs)
    ]
    folders.append(folder("none", train_log=start() + epoch(1, 9, 99)))
    options = ["--columns", "seed,width,dry,valid ppl", "--draw", "width", "valid ppl", str(tmp_path / "width.png")]
    collect_results.main([*map(str, folders), *options])
    rows, _ = table_of(capsys.readouterr().out)
    assert [(row["width"], row["dry"]) for row in rows] == [*[(str(run[2]), "yes") for run in runs], ("–", "–")]
    assert (tmp_path / "width.png").read_bytes().startswith(b"\x89PNG")
    lines = {bars.get_label(): bars for bars in drawn[0][0].containers}
    points = {name: bars.lines[0].get_xydata().tolist() for name, bars in lines.items()}
    assert points == {"softmax": [[32, 155], [64, 120]], "mixtape-4": [[32, 140]]}
    ((first, _), *_) = lines["softmax"].lines[2][0].get_segments()
    assert first[1] == pytest.approx(155 - 50**0.5)  # the standard deviation of 150 and 160


def test_a_panel_for_each_column_that_is_drawn_over(folder, drawn, tmp_path):
    runs = [("softmax", 32, "500,000", 150), ("mixtape", 32, "900,000", 140), ("softmax", 64, "1,000,000", 120)]
    folders = [
        folder(size, train_log=start(layer, parameters=size).replace("\n", f" --width={e}\n", 1) + epoch(1, 9, ppl))
        for layer, e, size, ppl in runs
    ]
    folders.append(folder("none", train_log=start("plif", parameters="7") + epoch(1, 9, 99)))
    picture = str(tmp_path / "a.png")
    collect_results.main([*map(str, folders), "--draw", "width,parameters", "valid ppl", picture])
    panels = [{bars.get_label(): bars.lines[0] for bars in axes.containers} for axes in drawn[0]]
    width, parameters = [{name: line.get_xydata().tolist() for name, line in panel.items()} for panel in panels]
    assert width == {"softmax": [[32, 150], [64, 120]], "mixtape-4": [[32, 140]]}
    assert parameters.pop("softmax") == [[500_000, 150], [1_000_000, 120]]
    assert parameters.pop("mixtape-4") == [[900_000, 140]] and list(parameters.values()) == [[[7, 99]]]
    assert all(panels[0][name].get_color() == panels[1][name].get_color() for name in width)
    with pytest.raises(UserError, match="--draw nothing valid ppl has nothing to draw"):
        collect_results.main([*map(str, folders), "--draw", "width,nothing", "valid ppl", picture])


def test_places_have_names_where_there_is_room(folder, drawn, tmp_path):
    for number in 3, 7:
        sizes = [f"{700_000 + n * n:,}" for n in range(number)]
        logs = [start(parameters=size) + epoch(1, 9, 99) for size in sizes]
        folders = [folder(f"{number}.{n}", train_log=log) for n, log in enumerate(logs)]
        picture = str(tmp_path / "sizes.png")
        collect_results.main([*map(str, folders), "--draw", "parameters", "valid ppl", picture])
    few, many = [[label.get_text() for label in axes.get_xticklabels()] for (axes,) in drawn]
    assert few == ["700000", "700001", "700004"] and "700,010" in many and "700,001" not in many


@pytest.fixture
def drawn_over_parameters(folder, drawn, tmp_path):
    """Draws a training of each size over the parameters; returns the axes and the labels in view."""

    def draw(sizes):
        folders = [folder(f"{size}", train_log=start(parameters=f"{size:,}") + epoch(1, 9, 99)) for size in sizes]
        collect_results.main([*map(str, folders), "--draw", "parameters", "valid ppl", str(tmp_path / "sizes.png")])
        (axes,) = drawn[-1]
        axes.figure.canvas.draw()
        low, high = axes.get_xlim()
        labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
        return axes, [label for label in labels if label.get_text() and low <= label.get_position()[0] <= high]

    return draw


def test_large_numbers_do_not_run_into_each_other(drawn_over_parameters):
    _, labels = drawn_over_parameters([round(550_000 + 1_450_000 * n / 6) for n in range(7)])
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) > 2
    assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:]))


def test_places_on_a_logarithmic_axis_are_written_alike(drawn_over_parameters):
    axes, labels = drawn_over_parameters([round(550_000 * 6.4 ** (n / 6)) for n in range(7)])
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in labels] == ["1,000,000", "2,000,000"]


def test_differences(folder, drawn, tmp_path, capsys):
    """Each group's interval is that of the table, in its order; a group without the score has none."""
    found = []
    for layer, perplexities in {"softmax": (100, 102), "mixtape": (90, 91), "plif": (99,), "plif-frozen": ()}.items():
        for seed, perplexity in enumerate(perplexities or (None,)):
            log = start(layer, seed) + (epoch(1, 100, perplexity) if perplexity else "")
            found.append(str(folder(f"{layer}.{seed}", train_log=log)))
    argv = [*found, "--baseline", "softmax", "--columns", "valid ppl", "--differences", str(tmp_path / "apart.png")]
    collect_results.main(argv)
    (axes,) = drawn[0]
    rows = [row for row in table_of(capsys.readouterr().out)[0] if row["valid ppl, difference"]]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"{row['group']} ({row['n']})" for row in rows]
    ends = [line.get_paths()[0].get_extents() for line in axes.collections]
    assert [f"[{box.x0:+.1f}, {box.x1:+.1f}]" for box in ends] == [
        row["valid ppl, difference"].split(" ", 1)[1] for row in rows
    ]
    assert [box.y0 for box in ends] == [0, 1] and axes.yaxis_inverted()
    assert axes.get_xlabel() == "valid ppl, %" and axes.figure.get_suptitle() == "difference from softmax"


def test_differences_that_cannot_be_drawn(folder, tmp_path):
    one = str(folder("one", train_log=start() + epoch(1, 100, 400.5)))
    two = str(folder("two", train_log=start("softmax", 1) + epoch(1, 100, 300)))
    picture = tmp_path / "apart.png"
    for argv, message in (
        (["--differences", str(picture)], "needs --baseline"),
        (["--differences", str(picture), "--baseline", "softmax"], "several seeds"),
        (["--differences", "apart.txt", "--baseline", "softmax"], "--differences apart.txt is not allowed"),
    ):
        with pytest.raises(UserError, match=message):
            collect_results.main([one, two, *argv])
    assert not picture.exists()
