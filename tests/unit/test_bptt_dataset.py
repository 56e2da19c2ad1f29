"""One stream in columns and segments: each target once and in order, and the law of the segments' lengths.

n tokens, B columns, T steps of a segment, R processes.
"""

import collections
import logging
import math
import random

import numpy as np
import pytest
import reference_lm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_data import real_lines

from mixtape_plugin.data.bptt_dataset import BpttDataset, TokenStream, draw_segment_lengths
from mixtape_plugin.errors import UserError

PAD, EOS, FIRST = 1, 2, 4


def build_stream(n, split="valid"):
    """Tokens FIRST, FIRST + 1, ..., all different, so that each tells its position."""
    return TokenStream(torch.arange(FIRST, FIRST + n), eos=EOS, pad=PAD, split=split)


def batches_of(dataset):
    return [dataset.collater([dataset[i]]) for i in range(len(dataset))]


def joined(batches):
    """Inputs and targets of all segments, [B, all steps]."""
    inputs = torch.cat([batch["net_input"]["src_tokens"] for batch in batches], dim=1)
    return inputs, torch.cat([batch["target"] for batch in batches], dim=1)


def assert_columns(inputs, targets, cuts):
    """The rows hold exactly what the reference's cuts say: (input, target) positions, pads behind."""
    assert len(targets) == len(cuts)
    for row_in, row_out, cut in zip(inputs.tolist(), targets.tolist(), cuts):
        found = [(x, y) for x, y in zip(row_in, row_out) if y != PAD]
        assert found == [(EOS if i < 0 else FIRST + i, FIRST + t) for i, t in cut]
        assert row_out[len(cut) :] == [PAD] * (len(row_out) - len(cut))


@st.composite
def walks(draw):
    """n tokens, B columns, and the segments' length or lengths, which cover the columns."""
    n, columns = draw(st.integers(1, 120)), draw(st.integers(1, 9))
    n = max(n, columns)
    if draw(st.booleans()):
        return n, columns, draw(st.integers(1, 20))
    lengths = []
    while sum(lengths) < -(-n // columns):
        lengths.append(draw(st.integers(1, 20)))
    return n, columns, lengths


@settings(max_examples=80, deadline=None, derandomize=True)
@given(walks(), st.booleans())
def test_every_target_once_and_in_order(walk, training):
    n, columns, lengths = walk
    dataset = BpttDataset(build_stream(n), columns, lengths, training=training)
    batches = batches_of(dataset)
    cuts = reference_lm.cut(range(n), columns, training)
    assert_columns(*joined(batches), cuts)
    assert sum(batch["ntokens"] for batch in batches) == (n - n % columns if training else n)

    steps = len(cuts[0])
    expected = []  # the segments' lengths, the last one cut off at the end
    while sum(expected) < steps:
        length = lengths if isinstance(lengths, int) else lengths[len(expected)]
        expected.append(min(length, steps - sum(expected)))
    assert [batch["target"].shape[1] for batch in batches] == expected
    last = len(batches) - 1
    for i, batch in enumerate(batches):
        tokens, target = batch["net_input"]["src_tokens"], batch["target"]
        assert tokens.dtype == target.dtype == torch.int64 and tokens.shape == target.shape
        assert batch["ntokens"] == target.ne(PAD).sum()
        assert batch["net_input"]["src_lengths"].equal(target.ne(PAD).sum(1))
        assert batch["nsentences"] == len(batch["id"]) == len(batch["net_input"]["src_lengths"]) == columns
        assert batch["net_input"]["first_segment"] == (i == 0) and batch["last_segment"] == (i == last)


@pytest.mark.parametrize("n, columns", [(1, 1), (7, 7), (8, 7), (13, 7), (14, 7)])
def test_one_step_a_segment(n, columns):
    batches = batches_of(BpttDataset(build_stream(n), columns, 1))
    assert len(batches) == -(-n // columns)
    assert all(batch["target"].shape == (columns, 1) for batch in batches)
    assert_columns(*joined(batches), reference_lm.cut(range(n), columns, False))
    if n % columns:  # only the longer columns have something to predict in the last segment
        assert batches[-1]["target"].ne(PAD).flatten().tolist() == [c < n % columns for c in range(columns)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(walks(), st.integers(2, 4), st.booleans())
def test_processes_share_the_columns(walk, shards, training):
    """Training: B columns each, of B times R. Evaluation: B in all. The same segments in every process."""
    n, columns, lengths = walk
    total = columns * shards if training else max(columns, shards)
    n = max(n, total)
    if not isinstance(lengths, int):
        steps = n // total if training else -(-n // total)
        lengths = lengths + [20] * n
        lengths = lengths[: next(i for i in range(len(lengths)) if sum(lengths[: i + 1]) >= steps) + 1]
    parts = [
        BpttDataset(
            build_stream(n), columns if training else total, lengths, training=training, num_shards=shards, shard_id=r
        )
        for r in range(shards)
    ]
    batches = [batches_of(part) for part in parts]
    assert len({len(part) for part in batches}) == 1
    for step in zip(*batches):
        assert len({batch["target"].shape[1] for batch in step}) == 1
        assert len({(batch["lr_scale"], batch["last_segment"]) for batch in step}) == 1
    rows = [joined(part) for part in batches]
    if training:
        assert all(len(targets) == columns for _, targets in rows)
    inputs, targets = (torch.cat(x) for x in zip(*rows))
    assert_columns(inputs, targets, reference_lm.cut(range(n), total, training))
    assert sum(batch["ntokens"] for part in batches for batch in part) == (n - n % total if training else n)


def test_a_training_batch_names_what_the_model_and_the_optimizer_need():
    """The scale is that of the length drawn, also where the end of the text cuts the segment off."""
    batches = batches_of(BpttDataset(build_stream(2 * 95, "train"), 2, [70, 35], training=True, base_length=70))
    assert [batch["lr_scale"] for batch in batches] == [1.0, 0.5]
    assert [batch["target"].shape[1] for batch in batches] == [70, 25]
    assert {batch["net_input"]["stream"] for batch in batches} == {"train"}
    named = BpttDataset(build_stream(20), 2, 7, name="other")
    assert {batch["net_input"]["stream"] for batch in batches_of(named)} == {"other"}
    assert {batch["lr_scale"] for batch in batches_of(named)} == {1.0}


def test_the_order_of_items_is_free():
    """A data loader may ask for any segment, as a resume in the middle of an epoch does."""
    dataset = BpttDataset(build_stream(100), 3, 7)
    backwards = [dataset.collater([dataset[i]]) for i in reversed(range(len(dataset)))]
    assert_columns(*joined(backwards[::-1]), reference_lm.cut(range(100), 3, False))


def test_what_training_drops_is_reported(caplog):
    with caplog.at_level(logging.INFO):
        BpttDataset(build_stream(103, "train"), 10, [70], training=True)
    assert "train: 3 of 103 tokens do not fill a step of 10 columns and are left out" in caplog.messages


@pytest.mark.parametrize("n", [0, 1, 6])
@pytest.mark.parametrize("training", [False, True])
def test_a_text_shorter_than_its_columns_is_refused(n, training):
    with pytest.raises(UserError, match=f"the .* text has {n} tokens, too few for 7 columns: lower the batch size"):
        BpttDataset(build_stream(n), 7, 5, training=training)


def test_fewer_columns_than_processes_are_refused():
    with pytest.raises(UserError, match="2 columns cannot be shared by 3 processes: raise the batch size"):
        BpttDataset(build_stream(50), 2, 5, num_shards=3, shard_id=0)


# -------------------------------------------------------------------------------------- the segments' lengths


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 3000), st.integers(1, 100), st.integers(1, 2**31), st.integers(1, 1000))
def test_lengths_cover_the_text_and_no_more(total, base, seed, epoch):
    lengths = draw_segment_lengths(total, base, seed=seed, epoch=epoch)
    assert sum(lengths) >= total
    assert sum(lengths[:-1]) < total or total == 0
    assert all(isinstance(length, int) for length in lengths)


def test_lengths_follow_from_seed_and_epoch_alone():
    expected = draw_segment_lengths(5000, 70, seed=3, epoch=2)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert draw_segment_lengths(5000, 70, seed=3, epoch=2) == expected
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]
    others = [draw_segment_lengths(5000, 70, seed=s, epoch=e) for s, e in [(3, 1), (3, 3), (2, 2), (4, 2), (2, 3)]]
    assert all(other != expected for other in others)
    # A longer text only goes on: the law has no memory of the total.
    assert draw_segment_lengths(9000, 70, seed=3, epoch=2)[: len(expected)] == expected


@pytest.mark.parametrize(
    "base, options",
    [
        (70, {}),
        (35, {}),
        (70, {"maximum": 71}),
        (13, {"minimum": 5}),
        (20, {"std": 2.0, "short_probability": 0.3, "minimum": 11, "maximum": 22}),
        (9, {"std": 0.5, "short_probability": 1.0, "minimum": 1}),
    ],
)
def test_lengths_have_the_law_of_the_papers(base, options):
    """How often each length comes, its share of half the base too, within 5 standard deviations of its probability."""
    lengths = draw_segment_lengths(30_000 * base // 2, base, seed=5, **options)
    count, found = len(lengths), collections.Counter(lengths)
    law = {length: reference_lm.segment_length_probability(length, base, **options) for length in range(1, 3 * base)}
    assert sum(law.values()) == pytest.approx(1)
    assert set(found) <= {length for length, probability in law.items() if probability > 1e-9}
    for length, probability in law.items():
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(found[length] - count * probability) <= 5 * deviation + 1

    mean = sum(length * p for length, p in law.items())
    variance = sum((length - mean) ** 2 * p for length, p in law.items())
    assert abs(sum(lengths) / count - mean) < 5 * math.sqrt(variance / count)


def test_the_law_of_the_reference_is_that_of_its_draws():
    """The probabilities above against the formula with random draws, 10% short and both ends cut."""
    options = {"std": 4.0, "short_probability": 0.1, "minimum": 8, "maximum": 23}
    rng = np.random.default_rng(0)
    draws = collections.Counter(
        reference_lm.segment_length(20, rng.random(), rng.standard_normal(), **options) for _ in range(20_000)
    )
    for length in range(1, 40):
        probability = reference_lm.segment_length_probability(length, 20, **options)
        deviation = math.sqrt(20_000 * probability * (1 - probability))
        assert abs(draws[length] - 20_000 * probability) <= 5 * deviation


def test_lengths_stay_those_of_earlier_versions():
    """A training that was interrupted in mid-epoch goes on where it was: uniform and normal numbers in turn."""
    rng = np.random.RandomState([3, 2])  # seed and epoch
    draws = [(rng.random_sample(), rng.standard_normal()) for _ in range(50)]
    options = {"std": 4.0, "short_probability": 0.3, "minimum": 8, "maximum": 23}
    expected = [reference_lm.segment_length(20, *draw, **options) for draw in draws]
    assert draw_segment_lengths(sum(expected), 20, seed=3, epoch=2, **options) == expected


@pytest.mark.parametrize("minimum, maximum", [(5, None), (5, 30), (25, 31), (30, 30)])
def test_floor_and_cap(minimum, maximum):
    lengths = draw_segment_lengths(20_000, 30, std=40.0, minimum=minimum, maximum=maximum)
    assert min(lengths) == minimum
    assert maximum is None or max(lengths) == maximum


def test_without_spread_and_short_segments_all_are_alike():
    assert draw_segment_lengths(100, 35, std=0.0, short_probability=0.0) == [35, 35, 35]
    assert draw_segment_lengths(100, 35, std=0.0, short_probability=1.0) == [17] * 6


@pytest.mark.parametrize("lengths", [[3, 3], [3, 3, 4, 1]])
def test_segments_that_do_not_fit_the_text_are_refused(lengths):
    with pytest.raises(ValueError, match="do not cover a text of 10, or some are empty"):
        BpttDataset(build_stream(20), 2, lengths)


@pytest.mark.parametrize("length", [7, 35, 70])
@pytest.mark.parametrize(
    "text, columns, count",
    [
        ("ptb/ptb.valid", 10, 73_760),
        ("ptb/ptb.test", 1, 82_430),
        ("wikitext2/wiki.valid", 10, 217_646),
        ("wikitext2/wiki.test", 1, 245_569),
    ],
)
def test_every_target_of_the_papers_texts_is_predicted_once(text, columns, count, length):
    tokens = sum(len(line.split()) + 1 for line in real_lines(f"{text}.txt"))  # with </s>
    segments = BpttDataset(build_stream(tokens), columns, length)
    targets = torch.cat([segments[i]["target"].flatten() for i in range(len(segments))])
    targets = targets[targets != PAD]
    assert len(targets) == count and targets.sort().values.equal(torch.arange(FIRST, FIRST + count))
