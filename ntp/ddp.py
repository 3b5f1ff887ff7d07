"""Data-parallel gradient synchronisation, between replicas of equal and of different degree.

    for index in ddp.microbatches():          # the microbatches of this replica, group by group
        model.loss(batch(index)).backward()   # adds into each weight's main_grad
    gradients = ddp.sync()                    # sums over the global batch, this rank's slices

The sum is the fixed tree of `ntp.schedule` on every mesh: a replica sends the tree nodes that it could sum,
the carrier of a slice completes the tree. Exchange of a bucket starts as soon as the backward of the last
microbatch has finished its parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ntp.buffers import NonuniformTPParamAndGradBuffer, ParamAndGradBuffer
from ntp.collectives import Mesh
from ntp.delivery import Delivery, delivery_over
from ntp.parameters import ParameterSpec
from ntp.plan import Plan
from ntp.reshard import Manifest
from ntp.schedule import Node, complete, fold_of

_AHEAD = 128
"""Pieces that the host takes up before it waits for their arrival: a full queue of launches behind a wait for
a dead peer would hold what the thread that ends the wait needs."""

Gradients = Mapping[tuple[str, int], Tensor]
"""(Parameter name, first element of a slice) -> summed gradient of the slice, float32
`[carried units, slice elements]`."""


class Trainable(Protocol):
    """What the wrappers need of a weight.

    `on_grad_ready` is to be called when a backward has added a microbatch's gradient to `main_grad`.
    """

    data: Tensor
    main_grad: Tensor | None
    on_grad_ready: Callable[[], None] | None


class DistributedDataParallel:
    """Gradient synchronisation where every replica has the same degree.

    Args:
        specs: every parameter, canonical order.
        weights: the tensors that compute, by parameter name; their `data`, `main_grad` and `on_grad_ready`
            are bound to this object's storage.
        overlap: start exchanges behind the backward rather than after it. The bits are the same.
        bucket_elements: how many elements of the whole model's gradient are exchanged at once.
    """

    buffer_class: type[ParamAndGradBuffer] = ParamAndGradBuffer

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        weights: Mapping[str, Trainable],
        plan: Plan,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        overlap: bool = True,
        bucket_elements: int = 1 << 25,
    ):
        self.buffer = self.buffer_class(specs, plan, mesh, dtype, torch.device(device))
        self._weights = weights
        self._overlap = overlap
        self._buckets = self.buffer.buckets(bucket_elements)
        self._manifests = [self.buffer.gradient_manifest(bucket.specs) for bucket in self._buckets]
        self._follow(plan)
        travels = self.buffer.group.size > 1 and self.buffer.parameters.is_cuda
        self._side = torch.cuda.Stream(self.buffer.parameters.device) if travels else None
        self._missing: list[set[str]] = []
        self._started = 0
        self._delivery = self._new_delivery()
        for spec in self.buffer.specs:
            weights[spec.name].data = self.buffer.view(self.buffer.parameters, spec)

    def microbatches(self) -> Iterator[int]:
        """Yield the index of each microbatch that this replica computes in a step."""
        self._missing = [{spec.name for spec in bucket.specs} for bucket in self._buckets]
        for group, merges in zip(self.buffer.replica.groups, self.buffer.fold.merges, strict=True):
            flat = self.buffer.begin_group()
            for spec in self.buffer.specs:
                self._weights[spec.name].main_grad = self.buffer.view(flat, spec)
            members = self._plan.microbatches_of(group)
            last_group = group == self.buffer.replica.groups[-1]
            for index in members:
                if self._overlap and last_group and index == members[-1]:
                    self._watch()
                yield index
            if not last_group:
                self.buffer.merge(merges, 0, flat.numel())
                self.buffer.pop(merges)

    def sync(self, places: Gradients | None = None) -> Gradients:
        """Finish the exchange and return this rank's slices of the summed gradient, in `places` if given."""
        while self._started < len(self._buckets):
            self._start()
        gradients: dict[tuple[str, int], Tensor] = {}
        buckets, arrived, pending = self._delivery.finish(), self._mark(), 0
        for manifest, pieces in zip(self._manifests, buckets, strict=True):
            gradients |= self._complete(manifest, pieces, places)
            pending += len(pieces)
            if arrived is not None and pending > _AHEAD:
                arrived.synchronize()
                self.buffer.group.confirm()
                arrived = None
        self._started = 0
        for weight in self._weights.values():
            weight.on_grad_ready = None
        self.buffer.clear()
        return gradients

    def reassign(self, plan: Plan) -> None:
        """Take over a plan with other groups for the replicas (`Plan.with_shares`), between two steps.

        Collective over the workers.
        """
        assert self._started == 0, "the exchange of a step is under way"
        self.buffer.reassign(plan)
        self._follow(plan)
        self._delivery.close()
        self._delivery = self._new_delivery()

    def retire(self) -> None:
        """Give up parameters and gradients, and what the weights hold of them."""
        for weight in self._weights.values():
            weight.data, weight.main_grad, weight.on_grad_ready = weight.data.new_empty(0), None, None
        self._delivery.close()
        self.buffer.retire()

    def _mark(self) -> torch.cuda.Event | None:
        """On a GPU, the moment at which all that is launched by now is done."""
        if self._side is None:
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def _follow(self, plan: Plan) -> None:
        self._plan, self._nodes = plan, _nodes_by_rank(plan)
        self._merges = self.buffer.fold.merges[-1] if self.buffer.fold.merges else 0

    def _watch(self) -> None:
        for place, bucket in enumerate(self._buckets):
            for spec in bucket.specs:
                self._weights[spec.name].on_grad_ready = self._ready(place, spec.name)

    def _ready(self, place: int, name: str) -> Callable[[], None]:
        def ready() -> None:
            self._missing[place].discard(name)
            while self._started < len(self._buckets) and not self._missing[self._started]:
                self._start()

        return ready

    def _start(self) -> None:
        """Start the exchange of the next bucket; every rank starts them in the same order."""
        bucket, manifest = self._buckets[self._started], self._manifests[self._started]
        with self._beside():
            self.buffer.merge(self._merges, bucket.start, bucket.stop)
            sums = self.buffer.sums(self._merges)
            outgoing = [
                (part.peer, self.buffer.rectangle(s, part)) for part in manifest.sends for _, s in sums
            ]
            self._delivery.start(self._started, outgoing)
        self._started += 1

    def _new_delivery(self) -> Delivery:
        incoming = [
            [(part.peer, part.elements) for part in manifest.receives for _ in self._nodes[part.peer]]
            for manifest in self._manifests
        ]
        return delivery_over(self.buffer.group, incoming, torch.float32)

    def _beside(self) -> AbstractContextManager[object]:
        """What is launched here runs, on a GPU, beside the backward and after what that has launched."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        return torch.cuda.stream(self._side)

    def _complete(
        self, manifest: Manifest, pieces: Sequence[Tensor], places: Gradients | None
    ) -> dict[tuple[str, int], Tensor]:
        sums: dict[tuple[str, int], dict[Node, Tensor]] = {}
        arrived = iter(pieces)
        for part in manifest.receives:
            carried = self.buffer.carried(part.spec)
            nodes = sums.setdefault((part.spec.name, part.start), {})
            for node in self._nodes[part.peer]:
                piece = next(arrived).view(len(part.units), part.stop - part.start)
                if len(part.units) == len(carried):
                    nodes[node] = piece
                    continue
                whole = nodes.setdefault(node, piece.new_empty(len(carried), piece.shape[1]))
                part.of(whole, carried, first=part.start).copy_(piece)
        groups = self._plan.groups
        if places is None:
            return {key: complete(nodes, groups) for key, nodes in sums.items()}
        return {key: _complete_in(places[key], nodes, groups) for key, nodes in sums.items()}


class NonuniformTPDistributedDataParallel(DistributedDataParallel):
    """Gradient synchronisation across replicas of any degrees: one exchange over mismatched shards."""

    buffer_class = NonuniformTPParamAndGradBuffer


def _complete_in(place: Tensor, nodes: Mapping[Node, Tensor], groups: int) -> Tensor:
    total = complete(nodes, groups, lambda left, right: torch.add(left, right, out=place))
    return total if total is place else place.copy_(total)


def _nodes_by_rank(plan: Plan) -> dict[int, tuple[Node, ...]]:
    nodes: dict[int, tuple[Node, ...]] = {}
    for replica in plan.replicas:
        nodes |= dict.fromkeys(replica.members, fold_of(replica.groups, plan.groups).nodes)
    return nodes
