"""Flat parameter and gradient storage of one rank, and the sums of its gradient groups.

Parameters of a rank lie in one flat tensor in canonical order, so that a bucket (consecutive parameters) is a
contiguous range. Gradients of a group accumulate in a flat float32 tensor of the same layout; finished groups
stand on a stack and are added as `ntp.schedule.Fold` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ntp.collectives import Group, Mesh
from ntp.parameters import ParameterSpec
from ntp.plan import Plan, Replica
from ntp.reshard import Manifest, Rectangle, carriers, gradient_manifest, holders, parameter_manifest
from ntp.schedule import Fold, Node, fold_of
from ntp.units import OwnerTable, UnitRange

_ALIGNMENT = 64
"""Elements to which every parameter is aligned in the flat tensors (128 bytes in bfloat16)."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive parameters whose gradients are exchanged together; `[start, stop)` in the flat tensors."""

    specs: tuple[ParameterSpec, ...]
    start: int
    stop: int


class ParamAndGradBuffer:
    """Storage of one rank where every replica has the same degree.

    Each rank then has a counterpart with the same units in every replica, and exchanges with those alone.
    """

    def __init__(
        self, specs: Sequence[ParameterSpec], plan: Plan, mesh: Mesh, dtype: torch.dtype, device: torch.device
    ):
        self.specs = tuple(specs)
        self.plan = plan
        self.rank = mesh.rank
        self.replica: Replica = plan.replica_of(mesh.rank)
        self.group = self._group(mesh)
        self.fold: Fold = fold_of(self.replica.groups, plan.groups)
        self.held = {spec.name: holders(spec, self.replica)[self.rank] for spec in specs}
        self._offsets: dict[str, int] = {}
        size = 0
        for spec in self.specs:
            self._offsets[spec.name] = size
            size += -(-len(self.held[spec.name]) * spec.unit_elements // _ALIGNMENT) * _ALIGNMENT
        self.parameters = torch.zeros(size, dtype=dtype, device=device)
        self._stack: list[Tensor] = []
        self._free: list[Tensor] = []

    def _group(self, mesh: Mesh) -> Group:
        return mesh.peers

    def carried_by(self, spec: ParameterSpec, replica: Replica) -> OwnerTable:
        """The rank of `replica` that exchanges with this one, and its units: the counterpart."""
        counterpart = replica.members[self.replica.members.index(self.rank)]
        return {counterpart: holders(spec, replica)[counterpart]}

    def held_by(self, spec: ParameterSpec, replica: Replica) -> OwnerTable:
        """The ranks of `replica` that this one sends updated parameters to, and the units they hold."""
        return self.carried_by(spec, replica)

    @property
    def keeps_what_it_holds(self) -> bool:
        """Whether every rank keeps the optimizer slices of all the units that it computes with."""
        return self.plan.copies == len(self.plan.replicas)

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether this rank's slice of `spec` is the one that enters sums over the whole model."""
        return spec.kind is not None or self.replica.members[0] == self.rank

    def carried(self, spec: ParameterSpec) -> UnitRange:
        """The units of `spec` whose optimizer slice this rank keeps."""
        return self.carried_by(spec, self.replica).get(self.rank, UnitRange(0, 0))

    def gradient_manifest(self, specs: Sequence[ParameterSpec]) -> Manifest:
        """What the gradient exchange of `specs` sends and receives."""
        return gradient_manifest(self.plan, self.rank, specs, self.carried_by)

    def parameter_manifest(self, specs: Sequence[ParameterSpec]) -> Manifest:
        """What the return of updated parameters of `specs` sends and receives."""
        return parameter_manifest(self.plan, self.rank, specs, self.carried_by, self.held_by)

    def view(self, flat: Tensor, spec: ParameterSpec) -> Tensor:
        """`spec` in a flat tensor of this layout: `[units, *unit_shape]` (`unit_shape` if replicated)."""
        units = len(self.held[spec.name])
        start = self._offsets[spec.name]
        shape = spec.unit_shape if spec.kind is None else (units, *spec.unit_shape)
        return flat[start : start + units * spec.unit_elements].view(shape)

    def rectangle(self, flat: Tensor, part: Rectangle) -> Tensor:
        """A rectangle of a parameter in a flat tensor of this layout, `[units, elements]`."""
        held = self.held[part.spec.name]
        return part.of(self.view(flat, part.spec).view(len(held), part.spec.unit_elements), held)

    def buckets(self, elements: int) -> tuple[Bucket, ...]:
        """Cut the parameters into buckets in the order in which backward finishes them.

        A bucket has at least `elements` elements of the whole model, so that every rank makes the same cuts.
        """
        found: list[Bucket] = []
        pending: list[ParameterSpec] = []
        stop = self.parameters.numel()
        for spec in reversed(self.specs):
            pending.append(spec)
            if spec is self.specs[0] or sum(s.units * s.unit_elements for s in pending) >= elements:
                start = self._offsets[spec.name]
                found.append(Bucket(tuple(pending), start, stop))
                pending, stop = [], start
        return tuple(found)

    def reassign(self, plan: Plan) -> None:
        """Take over a plan with other groups for the replicas (`Plan.with_shares`), between two steps."""
        self.plan, self.replica = plan, plan.replica_of(self.rank)
        self.fold = fold_of(self.replica.groups, plan.groups)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one flat gradient tensor."""
        return self.parameters.numel() * torch.float32.itemsize

    @property
    def gradients(self) -> Tensor:
        """The flat gradient tensor of the group under way."""
        return self._stack[-1]

    def begin_group(self) -> Tensor:
        """Push a zeroed flat gradient tensor for the next group and return it."""
        flat = self._free.pop().zero_() if self._free else self._new_gradients()
        self._stack.append(flat)
        return flat

    def merge(self, count: int, start: int, stop: int) -> None:
        """Add the `count` topmost sums into the one below, in `[start, stop)` only."""
        for below, top in zip(self._stack[-2::-1][:count], self._stack[::-1], strict=False):
            below[start:stop] += top[start:stop]

    def pop(self, count: int) -> None:
        """Drop the `count` topmost tensors, which have been merged into those below."""
        for _ in range(count):
            self._free.append(self._stack.pop())

    def sums(self, count: int = 0) -> list[tuple[Node, Tensor]]:
        """The tree nodes of this replica and their flat sums, the `count` topmost not counted."""
        stack = self._stack[: len(self._stack) - count]
        return list(zip(self.fold.nodes, stack, strict=True))

    def clear(self) -> None:
        """Forget all sums."""
        self.pop(len(self._stack))

    def retire(self) -> None:
        """Give up parameters and gradients."""
        self.parameters = self.parameters.new_empty(0)
        self._stack, self._free = [], []

    def _new_gradients(self) -> Tensor:
        return torch.zeros(self.parameters.numel(), dtype=torch.float32, device=self.parameters.device)


class NonuniformTPParamAndGradBuffer(ParamAndGradBuffer):
    """Storage of one rank where the degrees of the replicas differ.

    The units of a rank may then belong to several ranks of another replica. Which ones follows from the owner
    tables; every worker takes part in one exchange, and a replicated parameter has one carrier per replica.
    """

    def _group(self, mesh: Mesh) -> Group:
        return mesh.workers

    def carried_by(self, spec: ParameterSpec, replica: Replica) -> OwnerTable:
        """By the owner tables: one carrier per replica for what is replicated."""
        return carriers(spec, replica)

    def held_by(self, spec: ParameterSpec, replica: Replica) -> OwnerTable:
        """By the owner tables: every rank of the replica that holds a copy."""
        return holders(spec, replica)

    @property
    def keeps_what_it_holds(self) -> bool:
        """Never: what is replicated has one carrier in a replica."""
        return False

    def counts(self, spec: ParameterSpec) -> bool:
        """Always: a unit has one carrier in a replica, so no slice is there twice."""
        return True
