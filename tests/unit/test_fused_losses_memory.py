"""The chunks of the fused losses: how many tokens they hold, and what memory a loss takes.

Shapes: D features, V vocabulary, S frequent tokens.
"""

import sys
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_fused_losses import (
    MASKED,
    PAD,
    D,
    S,
    V,
    assert_same,
    build,
    chunk_bytes,
    each_case,
    each_smoothing,
    loss_and_gradients,
    random_batch,
    twin,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixtape_plugin.kernels import common, dispatch, mixture_of_softmaxes
from mixtape_plugin.kernels.mixtape import MixtapeLoss
from mixtape_plugin.kernels.mixture_of_softmaxes import MixtureOfSoftmaxesLoss
from mixtape_plugin.kernels.softmax import SoftmaxLoss


class Memory(TorchDispatchMode):
    """Bytes of the largest tensor made, and of all alive at once; how many operations made them."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.largest = self.operations = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            weakref.finalize(storage, self._free, key, size)
            self.live += size
            self.largest = max(self.largest, size)
            self.peak = max(self.peak, self.live)

    def _free(self, key, size):
        self.known.discard(key)
        self.live -= size


@pytest.mark.parametrize("triton, capability", [(True, (8, 0)), (True, (7, 5)), (False, (9, 0))])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_chunks_hold_as_many_tokens_as_their_bytes_allow(device, triton, capability, monkeypatch):
    """32 MiB, with kernels for the GPU 512 MiB, but at least 256 rows of scores, some of which may be of one token."""
    mib = 512 if device == "cuda" and triton and capability >= (8, 0) else 32
    monkeypatch.setattr(dispatch, "has_triton", lambda: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cases = (10**6, 10_000, 1), (70, 10_000, 1), (10**4, 250_000, 1), (10**4, 250_000, 15), (0, 2, 1)
    for tokens, scores, rows in cases:
        size = 4 * scores  # in bfloat16, too: softmaxes are computed in float32
        slices = common.chunks(tokens, scores, torch.bfloat16, torch.device(device), rows)
        assert [token for chunk in slices for token in range(chunk.start, chunk.stop)] == list(range(tokens))
        longest = max((chunk.stop - chunk.start for chunk in slices), default=0)
        most = max(mib * 1024**2 // size, -(-256 // rows))
        assert longest == common.longest(slices) <= most
        assert len(slices) == -(-tokens // most)


@pytest.mark.parametrize(
    "version, enough", [("3.3.0", True), ("3.10.1+git0a1b", True), ("4.0", True), ("3.2.0", False), (None, False)]
)
def test_kernels_are_for_triton_3_3_and_later(version, enough, monkeypatch):
    """None: there is no Triton."""
    monkeypatch.setitem(sys.modules, "triton", version and SimpleNamespace(__version__=version))
    assert dispatch.has_triton.__wrapped__() is enough


@each_case
def test_scores_per_token_are_about_what_an_evaluation_holds(case):
    layer = build(case, vocab_size=1500, feature_dim=3, embed_dim=3, num_components=4, gate_dim=2).float().eval()
    features, _ = random_batch(layer, 600)  # beside whose scores, in one chunk, the blocks of torch_ops are small
    layer(features[:1])  # tables that are made once
    with torch.no_grad(), Memory() as memory:
        layer(features)
    assert 1 <= memory.peak / (4 * 600 * layer.scores_per_token) < 1.4


def test_scores_of_mos_in_evaluation_come_in_chunks():
    """Of all K components, of two tokens at a time here."""
    layer, seen = build("mos", num_components=4).eval(), []

    def chunks(*args):
        seen.extend(common.chunks(*args))
        return seen

    with torch.no_grad(), mock.patch.object(mixture_of_softmaxes, "chunks", chunks), chunk_bytes(8 * 2 * 4 * V):
        layer(torch.randn(5, D, dtype=torch.float64))
    assert [rows.stop - rows.start for rows in seen] == [2, 2, 1]


def test_a_chunk_of_mos_has_as_few_tokens_as_keep_a_product_fast(monkeypatch):
    """256 rows are 64 tokens of 4 components: more would be memory for nothing, where a row has many scores."""
    layer, seen = build("mos", num_components=4), []

    def chunks(*args):
        seen.append(common.chunks(*args))
        return seen[-1]

    monkeypatch.setattr(mixture_of_softmaxes, "chunks", chunks)
    monkeypatch.setattr(common, "CHUNK_BYTES", {"torch": 1})
    features, target = random_batch(layer, 150)
    layer.loss(features, target)
    with torch.no_grad():
        layer.eval()(features)
    assert [[rows.stop - rows.start for rows in slices] for slices in seen] == [[50, 50, 50]] * 2


@each_case
def test_the_size_of_chunks_changes_nothing_in_evaluation(case):
    layer = build(case, masked=MASKED).eval()
    features, _ = random_batch(layer, 2, 5)
    with torch.no_grad(), chunk_bytes(600):
        actual, expected = layer.log_probs(features), twin(layer).log_probs(features)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case, loss, scores",
    [("softmax", SoftmaxLoss, V), ("mos", MixtureOfSoftmaxesLoss, 4 * V), ("mixtape", MixtapeLoss, V + (4 + 3) * S)],
)
def test_a_chunk_of_a_loss_has_no_more_scores_than_its_bytes_allow(case, loss, scores, monkeypatch):
    """All components', leaves and gate logits among them; of two tokens at a time here."""
    seen, add_chunk = [], loss.add_chunk
    monkeypatch.setattr(loss, "add_chunk", lambda self, rows: seen.append(rows) or add_chunk(self, rows))
    layer = build(case, num_components=4)
    with chunk_bytes(8 * 2 * scores):
        layer.loss(*random_batch(layer, 5))
    assert [rows.stop - rows.start for rows in seen] == [2, 2, 1]


@each_case
def test_the_size_of_chunks_changes_nothing(case):
    layer = build(case, masked=MASKED)
    features, target = random_batch(layer, 2, 9, ignored=(3, 4, 17))
    options = {"label_smoothing": 0.1, "ignore_index": PAD}
    with Memory() as whole:
        expected = loss_and_gradients(layer, features, target, **options)
    operations = [whole.operations]
    for size in 5000, 1500, 1:
        with chunk_bytes(size), Memory() as memory:
            actual = loss_and_gradients(layer, features, target, **options)
        operations.append(memory.operations)
        assert_same(actual, expected)
    assert operations == sorted(operations) and operations[-1] > 2 * operations[0]  # there were several chunks


@each_smoothing
@each_case
def test_a_loss_without_gradients_holds_none(case, label_smoothing):
    """The largest, that of the embedding, is of vocabulary by width."""
    layer = build(case, vocab_size=1500, output_impl="fused", num_components=3, gate_dim=2).float()
    features, target = random_batch(layer, 4)
    layer.loss(features, target)  # tables that are made once
    peaks = {}
    for grad in True, False:
        with Memory() as memory, torch.set_grad_enabled(grad):
            layer.loss(features, target, label_smoothing=label_smoothing)
        peaks[grad] = memory.peak
    assert peaks[True] - peaks[False] >= layer.weight.nbytes


@pytest.mark.parametrize("impl", ["fused", "auto"])
@each_smoothing
@each_case
def test_memory_does_not_grow_with_tokens_times_vocabulary(case, label_smoothing, impl):
    """All that is left is tokens by widths and vocabulary by widths; the widths are tiny here."""
    vocab_size, item = 1500, 4
    noise = {"context_dropout": 0.2, "gate_dropout": 0.2, "gate_noise": 0.1}
    sizes = {"feature_dim": 3, "embed_dim": 3, "num_components": 3, "gate_dim": 2}
    if case == "mixtape":
        noise["frequent_ratio"] = 0.5
    layer = build(case, vocab_size=vocab_size, masked=MASKED, output_impl=impl, **sizes, **noise).float()
    layer.loss(*random_batch(layer, 1))  # tables that the first loss of a process makes, once for all sizes
    for grad in True, False:
        peaks = []
        for num_tokens in 200, 400:
            features, target = random_batch(layer, num_tokens)
            with chunk_bytes(16 * vocab_size * item), Memory() as memory, torch.set_grad_enabled(grad):
                loss, _ = layer.loss(features, target, label_smoothing=label_smoothing)
                if grad:
                    loss.backward()
            assert memory.largest < num_tokens * vocab_size * item / 4
            peaks.append(memory.peak)
        assert peaks[1] < 400 * vocab_size * item / 2
        assert peaks[1] - peaks[0] < 200 * vocab_size * item / 10


@each_case
def test_a_backward_pass_makes_no_second_gradient_of_the_embedding(case):
    """What the loss has found is multiplied in place."""
    layer = build(case, feature_dim=40, embed_dim=40, vocab_size=1500, num_components=2, gate_dim=2).float()
    features, target = random_batch(layer, 3)
    layer.loss(features, target)  # tables that are made once
    with Memory() as memory:
        loss, _ = layer.loss(features, target, label_smoothing=0.1)
        before = memory.peak = memory.live
        (loss / 3).backward()
    assert memory.peak - before < layer.weight.nbytes / 4
