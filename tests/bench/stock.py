"""A stock tensor-parallel decoder: cuBLAS, bf16 all-reduce, cuDNN attention, compiled pointwise operations.

Nothing here is invariant: sums over ranks are rounded in the order of the mesh, kernels are picked by shape.
It is what the trainer is compared with, and never part of the product.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ntp.config import ModelConfig
from ntp.model import rope_tables

Reduce = Callable[[Tensor], Tensor]


class _ToRanks(Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _FromRanks(Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


class _VocabParallelLoss(Function):
    """Cross entropy [M] of logits [M, V / ranks]; the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        largest = _row_max(logits)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        both = _sums_and_targets(logits, largest, targets, first)
        dist.all_reduce(both, group=group)
        lse = both[0].log() + largest
        ctx.save_for_backward(logits, lse, targets)
        ctx.first = first
        return lse - both[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, targets = ctx.saved_tensors
        return _loss_gradient(logits, lse, targets, ctx.first, grads[0]), None, None, None


@torch.compile(dynamic=False)
def _row_max(logits: Tensor) -> Tensor:
    return logits.amax(1).float()


@torch.compile(dynamic=False)
def _sums_and_targets(logits: Tensor, largest: Tensor, targets: Tensor, first: int) -> Tensor:
    sums = (logits.float() - largest[:, None]).exp().sum(1)
    local = targets - first
    mine = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].float()
    return torch.stack([sums, torch.where(mine, picked, 0.0)])


@torch.compile(dynamic=False)
def _loss_gradient(logits: Tensor, lse: Tensor, targets: Tensor, first: int, grad: Tensor) -> Tensor:
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = columns[None, :] == (targets - first)[:, None]
    return (((logits.float() - lse[:, None]).exp() - hit.float()) * grad[:, None]).to(logits.dtype)


@torch.compile(dynamic=False)
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * (x32.square().mean(1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


@torch.compile(dynamic=False)
def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = x + residual
    x32 = summed.float()
    return (x32 * (x32.square().mean(1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight, summed


@torch.compile(dynamic=False)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@torch.compile(dynamic=False)
def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, 1)
    return F.silu(gate) * up


class StockModel(nn.Module):
    """The rank's share of the decoder; heads, FFN and vocabulary must divide by the ranks of `group`."""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup, seq_len: int, device: torch.device):
        super().__init__()
        self.config, self.group, self.seq_len = config, group, seq_len
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.heads, self.kv_heads = config.num_attention_heads // size, config.num_key_value_heads // size
        self.vocab = config.vocab_size // size
        hidden, head, ffn = config.hidden_size, config.head_dim, config.intermediate_size // size

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(0.02))

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(hidden, device=device, dtype=torch.bfloat16))

        self.embedding, self.head = weight(self.vocab, hidden), weight(self.vocab, hidden)
        self.norm = ones()
        self.blocks = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            block = nn.Module()
            block.qkv = weight((self.heads + 2 * self.kv_heads) * head, hidden)
            block.o = weight(hidden, self.heads * head)
            block.gate_up, block.down = weight(2 * ffn, hidden), weight(hidden, ffn)
            block.attention_norm, block.mlp_norm = ones(), ones()
            self.blocks.append(block)
        self.tables = rope_tables(config, seq_len, device)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of token losses of whole sequences; ids i64 [M]."""
        eps = self.config.rms_norm_eps
        local = inputs - self.rank * self.vocab
        mine = (local >= 0) & (local < self.vocab)
        x = F.embedding(local.clamp(0, self.vocab - 1), self.embedding) * mine[:, None]
        x, residual = _FromRanks.apply(x, self.group), None
        for block in self.blocks:
            y, residual = self._normed(x, residual, block.attention_norm, eps)
            x = self._attention(y, block)
            y, residual = self._normed(x, residual, block.mlp_norm, eps)
            gate_up = F.linear(_ToRanks.apply(y, self.group), block.gate_up)
            x = _FromRanks.apply(F.linear(_swiglu(gate_up), block.down), self.group)
        y, _ = self._normed(x, residual, self.norm, eps)
        logits = F.linear(_ToRanks.apply(y, self.group), self.head)
        return _VocabParallelLoss.apply(logits, targets, self.rank * self.vocab, self.group).sum()

    def _normed(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return (_norm(x, weight, eps), x) if residual is None else _add_norm(x, residual, weight, eps)

    def _attention(self, y: Tensor, block: Any) -> Tensor:
        head, sequences = self.config.head_dim, y.shape[0] // self.seq_len
        qkv = F.linear(_ToRanks.apply(y, self.group), block.qkv)
        q, k, v = qkv.view(sequences, self.seq_len, -1, head).split(
            [self.heads, self.kv_heads, self.kv_heads], 2
        )
        cos, sin = self.tables
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        backends = [SDPBackend.CUDNN_ATTENTION] if y.is_cuda else [SDPBackend.MATH]
        with sdpa_kernel(backends):
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
        mixed = mixed.transpose(1, 2).reshape(y.shape[0], -1)
        return _FromRanks.apply(F.linear(mixed, block.o), self.group)


class StockOptimizer:
    """Data parallelism and AdamW sharded over replicas: reduce-scatter, fused AdamW, all-gather, all in NCCL.

    Gradients of a block travel as soon as its backward is done.
    """

    def __init__(self, model: StockModel, replicas: dist.ProcessGroup):
        self._group, self._size = replicas, dist.get_world_size(replicas)
        self._buckets = [_Bucket(list(part), replicas) for part in _parts(model)]
        masters = [bucket.master for bucket in self._buckets]
        self._adamw = torch.optim.AdamW(masters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self._world = dist.group.WORLD

    def step(self, lr: float) -> None:
        """Finish the exchange of gradients, clip, update, and return the parameters."""
        for bucket in self._buckets:
            bucket.finish()
        squares = torch.stack([bucket.master.grad.square().sum() for bucket in self._buckets]).sum()
        dist.all_reduce(squares, group=self._world)
        scale = (1.0 / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for bucket in self._buckets:
            bucket.master.grad.mul_(scale)
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        for bucket in self._buckets:
            bucket.publish()


class _Bucket:
    """Parameters that travel together; their gradients are views of one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup):
        self._group, size = group, dist.get_world_size(group)
        count = sum(p.numel() for p in parameters)
        padded = -(-count // size) * size
        self._flat = torch.zeros(padded, dtype=torch.bfloat16, device=parameters[0].device)
        self._gradient = torch.zeros_like(self._flat)
        first = 0
        for parameter in parameters:
            part = slice(first, first + parameter.numel())
            self._flat[part] = parameter.detach().reshape(-1)
            parameter.data = self._flat[part].view_as(parameter)
            parameter.grad = self._gradient[part].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._ready)
            first = part.stop
        self._missing = self._count = len(parameters)
        shard = padded // size
        mine = slice(dist.get_rank(group) * shard, (dist.get_rank(group) + 1) * shard)
        self._shard = torch.empty(shard, dtype=torch.bfloat16, device=self._flat.device)
        self.master = nn.Parameter(self._flat[mine].float())
        self._work: dist.Work | None = None

    def _ready(self, parameter: Tensor) -> None:
        del parameter
        self._missing -= 1
        if not self._missing:
            self._missing = self._count
            self._work = dist.reduce_scatter_tensor(
                self._shard, self._gradient, dist.ReduceOp.AVG, self._group, async_op=True
            )

    def finish(self) -> None:
        assert self._work is not None
        self._work.wait()
        self.master.grad = self._shard.float()
        self._gradient.zero_()

    def publish(self) -> None:
        dist.all_gather_into_tensor(self._flat, self.master.detach().bfloat16(), group=self._group)


def _parts(model: StockModel) -> Iterator[Iterator[nn.Parameter]]:
    yield iter([model.embedding])
    for block in model.blocks:
        yield block.parameters()
    yield iter([model.norm, model.head])
