"""Causal attention inside each sequence and each document, forward and backward.

One program per (sequence, unit): the G query heads of a KV head are the rows of one [G*S, S] score matrix,
so that every GEMM and every softmax has one shape on every mesh. The backward recomputes the probabilities
from `lse`, the logarithm of the sum of exponentials of a row's scaled scores. No work is skipped for masked
blocks: this twin is for small shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_FLOOR = -87.0
"""Of a weight's exponent: e^-87 is the least that float32 has in full, and exp is slow below it."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document: torch.Tensor,
    seq_len: int,
    scale: float,
    bounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [M, U, G, H] and lse f32 [M, U, G] for q [M, U, G, H], k and v [M, U, H].

    M is a multiple of `seq_len`. A token attends to the tokens of its sequence that are not after it and
    whose `document` (i32 [M]) equals its own. `bounds` is not needed: it is here for the kernel.
    """
    del bounds
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for rows, seen in _sequences(document, seq_len):
        for unit in range(q.shape[1]):
            scores = _scores(q[rows, unit], k[rows, unit], seen, scale)
            top = scores.amax(1, keepdim=True)
            weights = _weights(scores, top, seen)
            total = weights.sum(1, keepdim=True)
            mixed = torch.mm(weights, _float(v[rows, unit])).div_(total)
            out[rows, unit] = _by_token(mixed, q).to(q.dtype)
            lse[rows, unit] = _by_token(total.log_().add_(top), q).squeeze(2)
    return out, lse


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    document: torch.Tensor,
    seq_len: int,
    scale: float,
    bounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk, dv of `attention`; a key head's gradients are one sum over query heads and queries."""
    del bounds
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, seen in _sequences(document, seq_len):
        for unit in range(q.shape[1]):
            dmixed = _by_head(dout[rows, unit])
            row_lse = _by_head(lse[rows, unit].unsqueeze(2))
            weights = _weights(_scores(q[rows, unit], k[rows, unit], seen, scale), row_lse, seen)
            delta = (dmixed * _by_head(out[rows, unit])).sum(1, keepdim=True)
            dscores = torch.mm(dmixed, _float(v[rows, unit]).t()).sub_(delta).mul_(weights).mul_(scale)
            dq[rows, unit] = _by_token(torch.mm(dscores, _float(k[rows, unit])), q).to(q.dtype)
            dk[rows, unit] = torch.mm(dscores.t(), _by_head(q[rows, unit])).to(k.dtype)
            dv[rows, unit] = torch.mm(weights.t(), dmixed).to(v.dtype)
    return dq, dk, dv


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which keys the queries of a sequence see.

    Attributes:
        bits: i32 [S, S], all bits where a key is seen, none where it is hidden.
        least: f32 [S, S], 0 where a key is seen, -inf where it is hidden.
    """

    bits: torch.Tensor
    least: torch.Tensor

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """Replace what is hidden in x f32 [G*S, S] by zero, in place; also a NaN, which times 0 is NaN."""
        x.view(torch.int32).view(-1, *self.bits.shape).bitwise_and_(self.bits)
        return x


def _sequences(document: torch.Tensor, seq_len: int) -> Iterator[tuple[slice, _Seen]]:
    """Yield for each sequence its rows, and what they see."""
    past = torch.ones(seq_len, seq_len, dtype=torch.bool, device=document.device).tril_()
    for start in range(0, document.shape[0], seq_len):
        rows = slice(start, start + seq_len)
        ids = document[rows]
        seen = past & (ids[:, None] == ids[None, :])
        least = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        yield rows, _Seen(-seen.int(), least)


def _scores(q: torch.Tensor, k: torch.Tensor, seen: _Seen, scale: float) -> torch.Tensor:
    """Return the scaled scores f32 [G*S, S] of q [S, G, H] and k [S, H], -inf where hidden."""
    scores = seen.keep(torch.mm(_by_head(q), _float(k).t()).mul_(scale))
    scores.view(-1, *seen.least.shape).add_(seen.least)
    return scores


def _weights(scores: torch.Tensor, top: torch.Tensor, seen: _Seen) -> torch.Tensor:
    """Return e^(scores - top) f32 [G*S, S] for top [G*S, 1], 0 where hidden. In place."""
    return seen.keep(scores.sub_(top).clamp_(min=_FLOOR).exp_())


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """Return [G*S, H] contiguous float32 of x [S, G, H]."""
    return x.float().transpose(0, 1).reshape(-1, x.shape[2]).contiguous()


def _by_token(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return [S, G, ...] of x [G*S, ...], the inverse of `_by_head` (G from q [M, U, G, H])."""
    return x.view(q.shape[2], -1, x.shape[1]).transpose(0, 1)


def _float(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()
