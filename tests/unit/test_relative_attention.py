"""Self-attention with relative positions against the loops of the reference and against fairseq's own attention."""

import pytest
import reference
import torch
from fairseq.modules import MultiheadAttention
from torch.utils._python_dispatch import TorchDispatchMode

from mixtape_plugin.modules.relative_attention import RelativeMultiheadAttention

LENGTH, BATCH, HEADS, WIDTH, CLIP = 7, 2, 2, 8, 2


def build(clip=CLIP):
    torch.manual_seed(0)
    attention = RelativeMultiheadAttention(WIDTH, HEADS, clip).double().eval()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


def future_mask():
    return torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.float64).triu(1)


def attend(attention, x, **options):
    return attention(x, x, x, need_weights=False, **options)[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("clip", [1, 2, LENGTH + 3])
def test_equals_reference(causal, clip):
    attention = build(clip)
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    actual = attend(attention, x, attn_mask=future_mask() if causal else None)

    projected = [projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)]
    tables = attention.relative_key, attention.relative_value
    expected = torch.stack(
        [
            torch.cat(
                [
                    reference.relative_attention(
                        *(p[:, b].chunk(HEADS, -1)[h] for p in projected), *tables, clip, causal
                    )
                    for h in range(HEADS)
                ],
                dim=-1,
            )
            for b in range(BATCH)
        ],
        dim=1,
    )
    expected = attention.out_proj(expected)
    torch.testing.assert_close(actual, expected)
    inputs = [x, *attention.parameters()]
    weights = torch.randn_like(actual)
    # The bias of the keys shifts every logit of a query alike: its gradient is 0 but for rounding.
    for ours, theirs in zip(*(torch.autograd.grad((y * weights).sum(), inputs) for y in (actual, expected))):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)


def test_what_many_positions_share_is_summed_in_float32():
    """A GPU sums in the type of the summands, and in bfloat16 stands still at the 256th of equal ones."""
    sums = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.scatter_add, torch.ops.aten.scatter_add_):
                sums.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    attention = build().bfloat16()
    with Sums():
        attend(attention, torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.bfloat16)).sum().backward()
    assert sums == [torch.float32] * 2  # weights, and in the backward pass gradients of logits


def test_zero_tables_are_plain_attention():
    attention = build()
    with torch.no_grad():
        attention.relative_key.zero_()
        attention.relative_value.zero_()
    plain = MultiheadAttention(WIDTH, HEADS, self_attention=True).double().eval()
    plain.load_state_dict({k: v for k, v in attention.state_dict().items() if not k.startswith("relative")})
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, :3] = True
    slopes = torch.randn(LENGTH, LENGTH, dtype=torch.float64)  # a mask may hold any numbers to add to the logits
    for options in ({}, {"attn_mask": future_mask()}, {"attn_mask": slopes}, {"key_padding_mask": padding}):
        torch.testing.assert_close(attend(attention, x, **options), attend(plain, x, **options))
    for need_head_weights in (False, True):
        ours, theirs = (
            module(x, x, x, need_weights=True, need_head_weights=need_head_weights, incremental_state=None)[1]
            for module in (attention, plain)
        )
        if not need_head_weights:  # fairseq's fast path averages over heads, whatever is asked for
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours.shape == (HEADS, BATCH, LENGTH, LENGTH)
            torch.testing.assert_close(ours.mean(0), theirs)


@pytest.mark.parametrize("first", [1, 3])
def test_incremental_equals_whole_and_beams_are_reordered(first):
    """The first ``first`` steps at once, then one at a time, with the sequences swapped half-way."""
    attention = build()
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    whole = attend(attention, x, attn_mask=future_mask())
    state, outputs = {}, []
    steps = [x[:first], *x[first:].split(1)]
    for i, step in enumerate(steps):
        mask = future_mask()[:first, :first] if i == 0 else None
        outputs.append(attend(attention, step, incremental_state=state, attn_mask=mask))
    torch.testing.assert_close(torch.cat(outputs), whole)

    state, order = {}, torch.tensor([1, 0])
    for step in steps[:-1]:
        mask = future_mask()[: len(step), : len(step)]
        attend(attention, step, incremental_state=state, attn_mask=mask)
    attention.reorder_incremental_state(state, order)
    torch.testing.assert_close(attend(attention, steps[-1][:, order], incremental_state=state), whole[-1:, order])


def test_padding_changes_nothing():
    attention = build()
    x = torch.randn(LENGTH, 1, WIDTH, dtype=torch.float64)
    padded = torch.cat([torch.randn(2, 1, WIDTH, dtype=torch.float64), x])
    padding = torch.tensor([[True] * 2 + [False] * LENGTH])
    torch.testing.assert_close(attend(attention, padded, key_padding_mask=padding)[2:], attend(attention, x))


def test_padding_that_was_read_before_stays_padding():
    """In incremental decoding, whose later steps bring no mask."""
    attention = build()
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, :2] = True
    whole, state = attend(attention, x, attn_mask=future_mask(), key_padding_mask=padding), {}
    attend(attention, x[:3], incremental_state=state, attn_mask=future_mask()[:3, :3], key_padding_mask=padding[:, :3])
    for step in range(3, LENGTH):
        found = attend(attention, x[step : step + 1], incremental_state=state)
        torch.testing.assert_close(found, whole[step : step + 1])


def test_padding_on_the_left_of_a_causal_text():
    """Its queries have padding alone to look at: no NaN comes of it, in the next layer neither, nor in gradients."""
    first, second = build(), build()
    x = torch.randn(LENGTH, 1, WIDTH, dtype=torch.float64)
    padded = torch.cat([torch.randn(2, 1, WIDTH, dtype=torch.float64), x]).requires_grad_()
    padding = torch.tensor([[True] * 2 + [False] * LENGTH])
    wide = torch.full((LENGTH + 2, LENGTH + 2), float("-inf"), dtype=torch.float64).triu(1)

    def through(x, **options):
        return attend(second, attend(first, x, **options), **options)

    actual = through(padded, attn_mask=wide, key_padding_mask=padding)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual[2:], through(x, attn_mask=future_mask()))
    gradients = torch.autograd.grad(actual[2:].sum(), [padded, *first.parameters(), *second.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:2] == 0).all()


def test_dropout_is_of_a_weight_wherever_it_is_used():
    """z_i = Σ_j m_ij α_ij (v_j + a^V_d) with one mask m, by loops."""
    attention = RelativeMultiheadAttention(WIDTH, HEADS, CLIP, dropout=0.5).double()
    torch.manual_seed(0)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        weights = attention.eval()(x, x, x, need_head_weights=True)[1].transpose(0, 1)  # [B, H, T, S]
        torch.manual_seed(1)
        actual = attend(attention.train(), x)
        torch.manual_seed(1)
        dropped = torch.nn.functional.dropout(weights, 0.5)
        values = attention.v_proj(x).view(LENGTH, BATCH, HEADS, -1)
        mixed = torch.zeros(LENGTH, BATCH, HEADS, WIDTH // HEADS, dtype=torch.float64)
        for i in range(LENGTH):
            for j in range(LENGTH):
                row = attention.relative_value[max(-CLIP, min(CLIP, j - i)) + CLIP]
                mixed[i] += dropped[:, :, i, j, None] * (values[j] + row)
        torch.testing.assert_close(actual, attention.out_proj(mixed.flatten(2)))
        shown = attention(x, x, x, need_weights=True)[1]  # before dropout, as fairseq's
        torch.testing.assert_close(shown, weights.mean(1))


def test_initial_tables_are_uniform():
    """Glorot and Bengio's, of 5 distances and 4 elements of a head."""
    torch.manual_seed(0)
    attention, bound = RelativeMultiheadAttention(8, 2, 2), (6 / (5 + 4)) ** 0.5
    for table in attention.relative_key, attention.relative_value:
        assert table.shape == (5, 4) and 0.7 * bound < table.abs().max() <= bound
