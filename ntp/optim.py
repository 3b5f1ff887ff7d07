"""AdamW whose state is sharded over replicas, with a gradient norm that no mesh can move.

Each rank keeps float32 masters and moments of its slices (`ntp.parameters.slice_of`) in flat buffers of fixed
blocks. The norm is a float64 sum per fixed block; every rank adds the blocks by one tree over their canonical
order. The clip coefficient is computed once from that; the update is elementwise. `commit` ends with the
return of the updated parameters, in compute precision, to every rank that holds them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ntp import ops
from ntp.buffers import NonuniformTPParamAndGradBuffer, ParamAndGradBuffer
from ntp.collectives import Group
from ntp.config import OptimizerConfig
from ntp.ddp import Gradients
from ntp.delivery import Delivery, delivery_over
from ntp.initial import initial_units
from ntp.parameters import BLOCK, ParameterSpec
from ntp.reshard import Rectangle, kept_slices
from ntp.units import UnitRange


@dataclass(frozen=True, slots=True)
class Slice:
    """One parameter's slice: elements `[start, stop)` of `units`, blocks `[first, last)` of the flat state.

    A unit's share fills whole blocks; the rest of its last block is zero. One of the ranks that keep a slice
    `counts`: its copy enters sums over the whole model.
    """

    spec: ParameterSpec
    units: UnitRange
    start: int
    stop: int
    first: int
    last: int
    counts: bool

    def blocks(self, flat: Tensor) -> Tensor:
        """`[units, blocks * BLOCK]` of the flat state, padding included."""
        return flat[self.first * BLOCK : self.last * BLOCK].view(len(self.units), -1)

    def of(self, flat: Tensor) -> Tensor:
        """`[units, stop - start]` of the flat state."""
        return self.blocks(flat)[:, : self.stop - self.start]


class DistributedOptimizer:
    """AdamW over this rank's slices where every replica has the same degree.

    Args:
        buffer: the rank's storage; `buffer.parameters` receives initial and updated parameters.
        world: the group of every worker, over which norms are combined.
        config: learning-rate independent settings.
    """

    buffer_class: type[ParamAndGradBuffer] = ParamAndGradBuffer

    def __init__(self, buffer: ParamAndGradBuffer, world: Group, config: OptimizerConfig):
        assert type(buffer) is self.buffer_class, type(buffer)
        self.buffer = buffer
        self.slices = tuple(self._layout())
        self._kept: dict[str, list[Slice]] = {}
        for part in self.slices:
            self._kept.setdefault(part.spec.name, []).append(part)
        self._world = world
        self._config = config
        self._manifest = buffer.parameter_manifest(buffer.specs)
        self._delivery = None if buffer.keeps_what_it_holds else self._new_delivery()
        self._block_ids = self._global_blocks()
        self._total_blocks = sum(spec.units * spec.blocks for spec in buffer.specs)
        blocks = self.slices[-1].last if self.slices else 0
        device = buffer.parameters.device
        self.master, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(blocks * BLOCK, dtype=torch.float32, device=device) for _ in range(3)
        )

    def retire(self) -> None:
        """Keep masters and moments alone."""
        if self._delivery is not None:
            self._delivery.close()
        for name in ("_gradient", "places"):
            vars(self).pop(name, None)

    @cached_property
    def _gradient(self) -> Tensor:
        """Made for the first step: until then state may move here from another layout, which takes room."""
        return torch.zeros_like(self.master)

    @cached_property
    def places(self) -> Gradients:
        """Where `vote` has the gradients of each slice, views `[units, elements]`."""
        return {(part.spec.name, part.start): part.of(self._gradient) for part in self.slices}

    @property
    def flats(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments, all that is kept of a step."""
        return self.master, self.exp_avg, self.exp_avg_sq

    def state(self, part: Rectangle) -> list[Tensor]:
        """Master and moments of a rectangle that lies in one slice kept here: views [units, elements]."""
        for kept in self._kept.get(part.spec.name, ()):
            if kept.start <= part.start and part.stop <= kept.stop:
                return [part.of(kept.of(flat), kept.units, kept.start) for flat in self.flats]
        raise AssertionError(f"{part.spec.name}: elements {part.start} to {part.stop} are not kept here")

    def commit(self, gradients: Gradients, tokens: int, learning_rate: float, step: int) -> float:
        """Clip, update and send the new parameters to their holders; collective over the workers.

        Args:
            gradients: what `sync` returned: sums of token losses' gradients.
            tokens: target tokens in the global batch.
            learning_rate: of this step.
            step: number of this step, from 1.

        Returns:
            The norm of the mean gradient before clipping.
        """
        norm = self.vote(gradients, tokens)
        self.update(norm, tokens, learning_rate, step)
        self.return_parameters()
        return norm

    def vote(self, gradients: Gradients, tokens: int) -> float:
        """Take over the gradients and return the norm of their mean; collective over the workers.

        Those that are in `places` stay there. A worker that gets the norm knows that every worker has its
        gradients of this step.
        """
        for key, place in self.places.items():
            if gradients[key].data_ptr() != place.data_ptr():
                place.copy_(gradients[key])
        return math.sqrt(self._square_sum()) / tokens

    def update(self, norm: float, tokens: int, learning_rate: float, step: int) -> None:
        """Clip what `vote` has taken over and update this rank's slices. Local: it cannot be cut short."""
        limit = self._config.max_grad_norm
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        betas, eps, weight_decay = self._config.betas, self._config.eps, self._config.weight_decay
        split = next((part.first for part in self.slices if not part.spec.decay), None)
        split = len(self.master) if split is None else split * BLOCK
        for region, decay in ((slice(0, split), weight_decay), (slice(split, None), 0.0)):
            ops.adamw(
                self.master[region],
                self.exp_avg[region],
                self.exp_avg_sq[region],
                self._gradient[region],
                learning_rate,
                *betas,
                eps,
                decay,
                step,
                grad_scale=scale / tokens,
            )

    def return_parameters(self) -> None:
        """Send every slice's master, in compute precision, to the ranks that hold its units."""
        rank, parameters = self.buffer.rank, self.buffer.parameters
        if self._delivery is None:
            for part in self.slices:
                whole = Rectangle(part.spec, rank, part.units, part.start, part.stop)
                self.buffer.rectangle(parameters, whole).copy_(part.of(self.master))
            return
        kept = {(part.spec.name, part.start): part for part in self.slices}
        outgoing: list[tuple[int, Tensor]] = []
        for sent in self._manifest.sends:
            part = kept[sent.spec.name, sent.start]
            master = part.of(self.master)[part.units.local(sent.units)]
            outgoing.append((sent.peer, master if sent.peer == rank else master.to(parameters.dtype)))
        self._delivery.start(0, outgoing)
        (pieces,) = self._delivery.finish()
        for part, piece in zip(self._manifest.receives, pieces, strict=True):
            target = self.buffer.rectangle(parameters, part)
            target.copy_(piece.view(target.shape))

    def _new_delivery(self) -> Delivery:
        incoming = [(part.peer, part.elements) for part in self._manifest.receives]
        return delivery_over(self.buffer.group, [incoming], self.buffer.parameters.dtype)

    def _layout(self) -> Iterator[Slice]:
        """Slices in canonical order, those with weight decay first."""
        plan = self.buffer.plan
        place = plan.replicas.index(self.buffer.replica)
        first = 0
        for decay in (True, False):
            for spec in self.buffer.specs:
                if spec.decay is not decay:
                    continue
                units = self.buffer.carried(spec)
                for back, (start, stop) in enumerate(kept_slices(plan, spec, place)):
                    if units and stop > start:
                        last = first + len(units) * -(-(stop - start) // BLOCK)
                        counts = back == 0 and self.buffer.counts(spec)
                        yield Slice(spec, units, start, stop, first, last, counts)
                        first = last

    def initialise(self, seed: int, init_std: float) -> None:
        """Set masters and parameters to the initial weights, a function of `seed`; local.

        Args:
            init_std: standard deviation of normally distributed weights.
        """
        for spec in self.buffer.specs:
            held = self.buffer.held[spec.name]
            values = initial_units(spec, held, seed, init_std, self.buffer.parameters.device)
            self.buffer.view(self.buffer.parameters, spec).view(values.shape).copy_(values)
            for part in self.slices:
                if part.spec is spec:
                    part.of(self.master).copy_(values[held.local(part.units), part.start : part.stop])

    def _global_blocks(self) -> Tensor:
        """Canonical number of every block of the flat state; -1 where another rank's copy counts."""
        first_of: dict[str, int] = {}
        total = 0
        for spec in self.buffer.specs:
            first_of[spec.name] = total
            total += spec.units * spec.blocks
        ids: list[int] = []
        for part in self.slices:
            blocks = range(part.start // BLOCK, -(-part.stop // BLOCK))
            for unit in part.units:
                base = first_of[part.spec.name] + unit * part.spec.blocks
                ids += [base + block if part.counts else -1 for block in blocks]
        return torch.tensor(ids, dtype=torch.int64, device=self.buffer.parameters.device)

    def _square_sum(self) -> float:
        """Sum of squares of the whole gradient, the same bits on every rank of every mesh."""
        sums = ops.square_sums(self._gradient.view(-1, BLOCK))
        counted = self._block_ids >= 0
        every = torch.zeros(self._total_blocks, dtype=torch.float64, device=sums.device)
        every[self._block_ids[counted]] = sums[counted]
        self._world.all_reduce(every.view(torch.int64))  # each block is non-zero on one rank: bits are kept
        total = float(_tree_sum(every))
        self._world.confirm()
        return total


def _tree_sum(values: Tensor) -> Tensor:
    """The sum of a vector by halves, the same bits on every device and for every mesh."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        folded = values[:half].clone()
        folded[: len(values) - half] += values[half:]
        values = folded
    return values[0]


class NonuniformTPOptimizer(DistributedOptimizer):
    """AdamW over slices whose gradients and parameters cross between replicas of different degrees."""

    buffer_class = NonuniformTPParamAndGradBuffer
