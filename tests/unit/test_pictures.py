"""What scripts/analyze.py draws is what its tables have."""

import pytest

from mixtape_plugin.analysis import pictures
from mixtape_plugin.analysis.word_similarity import Similarity


@pytest.fixture
def drawn(monkeypatch):
    """The panels of each picture."""
    found = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: found.append(figure.axes))
    return found


def test_singular_values_and_the_rank_among_them(drawn):
    pictures.draw_singular_values("a.png", {"m": [8.0, 4.0, 2.0, 0.0]}, {"m": (2, 0.4)})
    ((share, decay, first),) = drawn
    assert share.lines[0].get_xydata().tolist() == [[0.25, 0.5], [0.5, 0.75], [1, 1]]
    assert decay.lines[0].get_xydata().tolist() == [[1, 1], [2, 0.5], [3, 0.25]]
    assert decay.lines[1].get_xydata().tolist() == [[2, 0.5]]
    assert first.lines[0].get_ydata().tolist() == [1, 0.5, 0.25, 0]


def test_similarity_with_its_interval(drawn):
    pictures.draw_similarity("a.png", {"m": {"x": Similarity(0.5, (0.2, 0.6), 9, 0)}})
    bar = drawn[0][0].containers[0]
    assert bar.lines[0].get_ydata().tolist() == [0.5]
    assert bar.lines[2][0].get_segments()[0][:, 1].tolist() == pytest.approx([0.2, 0.6])


def test_frequency(drawn):
    row = {"rank": "1–10", "perplexity": 7.0, "nats": 2.0, "difference": -0.5, "interval": 0.1}
    pictures.draw_frequency("a.png", [{"training": model, **row} for model in "ab"])
    ((left, right),) = drawn
    assert [line.get_ydata().tolist() for line in left.lines] == [[7.0], [7.0]]
    (bar,) = right.containers
    assert bar.lines[0].get_ydata().tolist() == [-0.5]
    assert bar.lines[2][0].get_segments()[0][:, 1].tolist() == pytest.approx([-0.6, -0.4])


def test_mixing_has_a_panel_for_each_measure(drawn):
    measures = {"cosine": "how alike", "entropy": "how even"}
    pictures.draw_mixing("a.png", [{"training": "m", "K": 3, "rank": "1–10", "cosine": 0.5, "entropy": 0.9}], measures)
    assert [panel.lines[0].get_ydata().tolist() for panel in drawn[0][:2]] == [[0.5], [0.9]]
    assert [panel.get_ylabel() for panel in drawn[0][:2]] == list(measures)
