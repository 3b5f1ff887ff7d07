import math

import pytest
import torch
from ntp_kernels.attention import attention, attention_backward, document_bounds
from ntp_kernels.reference.attention import attention as twin


def oracle(q, k, v, document, seq_len, scale):
    """Attention in float64 with the mask spelled out, differentiable. Return out and lse."""
    tokens, _units, _group, _size = q.shape
    position = torch.arange(tokens, device=q.device)
    seen = (position[None, :] <= position[:, None]) & (document[None, :] == document[:, None])
    seen &= position[None, :] // seq_len == position[:, None] // seq_len
    scores = torch.einsum("iugh,juh->ugij", q, k) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    out = torch.einsum("ugij,juh->iugh", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).permute(2, 0, 1)


def packed(device, sequences, seq_len, lengths):
    """Documents of the given lengths, repeated in every sequence, with ids that differ between neighbours."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert len(ids) == seq_len
    return ids.repeat(sequences).to(torch.int32).to(device)


def run(q, k, v, dout, document, seq_len):
    scale = q.shape[-1] ** -0.5
    out, lse = attention(q, k, v, document, seq_len, scale)
    return out, lse, *attention_backward(dout, q, k, v, out, lse, document, seq_len, scale)


def inputs(draw, tokens, units, group, size):
    return (
        draw(tokens, units, group, size),
        draw(tokens, units, size),
        draw(tokens, units, size),
        draw(tokens, units, group, size),
    )


def difference(mine, theirs):
    return ((mine.double() - theirs).norm() / theirs.norm()).item()


CASES = [
    # sequences, seq_len, document lengths, units, group, head size
    (1, 256, [256], 1, 2, 64),
    (2, 160, [7, 1, 100, 52], 2, 1, 64),
    (1, 300, [130, 3, 167], 1, 2, 128),
]


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # the oracle's autograd thread
@pytest.mark.parametrize(("sequences", "seq_len", "lengths", "units", "group", "size"), CASES)
def test_forward_and_backward_follow_the_float64_formula(
    draw, device, sequences, seq_len, lengths, units, group, size
):
    q, k, v, dout = inputs(draw, sequences * seq_len, units, group, size)
    document = packed(device, sequences, seq_len, lengths)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = oracle(*wide, document, seq_len, size**-0.5)
    out.backward(dout.double())
    expected = [out.detach(), lse.detach(), *(t.grad for t in wide)]
    for mine, theirs, bound in zip(
        run(q, k, v, dout, document, seq_len), expected, (6e-3, 1e-5, 8e-3, 8e-3, 8e-3), strict=True
    ):
        assert difference(mine, theirs) < bound


def test_bounds_are_the_first_and_past_position_of_each_run(device):
    document = torch.tensor([3, 3, 1, 1, 1, 3, 3, 3, 3, 3], dtype=torch.int32, device=device)
    first, past = document_bounds(document, 5).tolist()
    assert first == [0, 0, 2, 2, 2, 0, 0, 0, 0, 0]
    assert past == [2, 2, 5, 5, 5, 5, 5, 5, 5, 5]


def test_heads_and_sequences_keep_their_bits_whatever_else_is_in_the_call(draw, device):
    seq_len = 160
    q, k, v, dout = inputs(draw, 2 * seq_len, 2, 2, 64)
    document = packed(device, 2, seq_len, [90, 70])
    whole = run(q, k, v, dout, document, seq_len)
    for tokens, units in ((slice(0, 160), slice(0, 1)), (slice(160, 320), slice(1, 2))):
        cut = [t[tokens, units].contiguous() for t in (q, k, v, dout)]
        part = run(*cut, document[tokens], seq_len)
        assert all(torch.equal(a[tokens, units], b) for a, b in zip(whole, part, strict=True))


def test_a_document_does_not_see_its_neighbours(draw, device):
    q, k, v, dout = inputs(draw, 256, 1, 1, 64)
    document = packed(device, 1, 256, [128, 128])
    whole = run(q, k, v, dout, document, 256)
    k[:128], v[:128], q[:128], dout[:128] = 3, 5, 1, 2
    other = run(q, k, v, dout, document, 256)
    assert all(torch.equal(a[128:], b[128:]) for a, b in zip(whole, other, strict=True))


def test_a_nan_reaches_the_rows_that_see_it(draw, device):
    q, k, v, _ = inputs(draw, 256, 1, 1, 64)
    document = packed(device, 1, 256, [256])
    k[130, 0, 0] = math.nan
    out, lse = attention(q, k, v, document, 256, 0.125)
    assert out[130:].isnan().all()
    assert lse[130:].isnan().all()
    assert lse[:130].isfinite().all()


def test_the_twin_keeps_what_is_not_finite_to_the_rows_that_see_it(draw, device):
    q, k, v, _ = inputs(draw, 256, 1, 1, 64)
    q[0], k[0], k[130, 0, 0] = -1e30, 1e30, math.nan  # the only score of row 0 is -inf
    out, lse = twin(q, k, v, packed(device, 1, 256, [1, 255]), 256, 0.125)
    for rows in (out[:1], lse[:1], out[130:], lse[130:]):
        assert not rows.isfinite().any()
    assert out[1:130].isfinite().all()
    assert lse[1:130].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_large_calls_keep_bits_over_head_counts_and_batch_splits(draw, device, size):
    seq_len = 2048
    q, k, v, dout = inputs(draw, 4 * seq_len, 8, 4, size)
    document = packed(device, 4, seq_len, [5, 1000, 43, 1000])
    whole = run(q, k, v, dout, document, seq_len)
    again = run(q, k, v, dout, document, seq_len)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    for sequences, units in (((0, 1), (0, 1)), ((1, 4), (1, 4)), ((2, 4), (3, 8)), ((0, 4), (7, 8))):
        tokens, heads = slice(sequences[0] * seq_len, sequences[1] * seq_len), slice(*units)
        cut = [t[tokens, heads].contiguous() for t in (q, k, v, dout)]
        part = run(*cut, document[tokens], seq_len)
        assert all(torch.equal(a[tokens, heads], b) for a, b in zip(whole, part, strict=True))
