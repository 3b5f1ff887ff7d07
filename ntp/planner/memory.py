"""How much device memory a rank will need: an estimate from the plan alone, for any mesh and without a GPU.

It counts what the trainer allocates, in the layouts that it uses: parameters in the compute dtype, float32
gradients as deep as the summation tree stacks them, the optimizer's slices, what the exchange holds in
flight, and what the layers save for the backward pass of one microbatch. What the device itself takes (its
context, NCCL's buffers, fragmentation) is a constant, `RESERVED_BYTES`, on a GPU. Not counted: masters and
moments of the old layout while state moves to another. Gradients and activations, which are not there then,
take more: 8B from TP4 to TP3 needs 59.8 GiB for the move and 77.4 for its steps, by these sizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ntp.config import Config
from ntp.errors import PlanError
from ntp.parameters import BLOCK, ParameterSpec, kept_places, parameter_specs, slice_of
from ntp.plan import Plan, Replica, make_plan
from ntp.schedule import fold_of
from ntp.units import UnitKind, UnitRange, count_units

FLOAT = 4
RESERVED_BYTES = 2 << 30
"""CUDA context, NCCL's buffers and what the allocator cannot use: an assumption, not a measurement."""

_Sizes = dict[UnitKind | None, int]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank's device.

    Attributes:
        parameters: in the compute dtype.
        gradients: float32 sums of gradient groups, all that stand on the stack at once.
        optimizer: masters, two moments and the gradient of this rank's slices, float32.
        exchange: gradients on their way between replicas.
        activations: saved for the backward pass of one microbatch, and the largest temporary.
        reserved: what the device takes for itself.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    exchange: int
    activations: int
    reserved: int

    @property
    def total(self) -> int:
        """Bytes at the peak of a step: the exchange runs behind the last backward pass."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.exchange + self.activations + self.reserved


def estimate(config: Config, plan: Plan) -> tuple[RankMemory, ...]:
    """The memory of every rank that holds a shard, in mesh order."""
    common = _Common(config, plan)
    return tuple(rank for place in range(len(plan.replicas)) for rank in common.of_replica(place))


def estimate_replica(config: Config, plan: Plan, place: int) -> Iterator[RankMemory]:
    """The memory of the ranks of the replica at this place of the plan."""
    return _Common(config, plan).of_replica(place)


class _Common:
    """What all replicas of a plan have in common, counted once."""

    def __init__(self, config: Config, plan: Plan):
        specs = parameter_specs(config.model)
        self._config, self._plan, self._held = config, plan, _sizes(specs)
        self._folds = [fold_of(replica.groups, plan.groups) for replica in plan.replicas]
        self._nodes = sum(len(fold.nodes) for fold in self._folds)
        self._specs = [(spec, spec.unit_elements) for spec in specs]
        self._shares: dict[tuple[int, int], int] = {}

    def of_replica(self, place: int) -> Iterator[RankMemory]:
        """The memory of the ranks of one replica."""
        config, plan, replica = self._config, self._plan, self._plan.replicas[place]
        width = 2 if config.train.dtype == "bfloat16" else FLOAT
        kept, fold = self._kept(place), self._folds[place]
        for position, rank in enumerate(replica.members):
            mine = _elements(self._held, replica, position)
            slices = _elements(kept, replica, position)
            flights = (
                len(fold.nodes) * plan.copies * mine + self._nodes * slices
            )  # all buckets, own share too
            yield RankMemory(
                rank,
                parameters=mine * width,
                gradients=mine * FLOAT * fold.depth,
                optimizer=slices * FLOAT * 4,
                exchange=flights * FLOAT if len(plan.replicas) > 1 else 0,
                activations=_activations(config, replica, position, width),
                reserved=0 if config.train.device == "cpu" else RESERVED_BYTES,
            )

    def _kept(self, place: int) -> _Sizes:
        """The part of `_sizes` whose optimizer state the replica at `place` keeps, in whole blocks.

        What it keeps of a unit depends on the unit's size and on its turn, which few parameters have alone.
        """
        sizes: _Sizes = {}
        holders = len(self._plan.replicas)
        for spec, elements in self._specs:
            turn = elements, (place + spec.index) % holders
            if turn not in self._shares:
                self._shares[turn] = _kept_of_unit(spec, place, holders, self._plan.copies)
            sizes[spec.kind] = sizes.get(spec.kind, 0) + self._shares[turn]
        return sizes


def smallest_degree(config: Config, capacity: int) -> int | None:
    """The smallest degree at which one damaged replica still fits in `capacity` bytes; None = not even whole.

    The other replicas are whole. Put it in `parallel.min_degree`, so that a replica that would not fit is
    dropped instead of running out of memory.
    """
    least = None
    for degree in range(config.parallel.tp, 0, -1):
        try:
            plan = make_plan(_without_standbys(config), range(degree, config.parallel.tp))
        except PlanError:
            break
        if max(rank.total for rank in estimate(config, plan)) > capacity:
            break
        least = degree
    return least


def _without_standbys(config: Config) -> Config:
    parallel = config.parallel.model_copy(update={"standbys": 0, "rank_map": None, "min_degree": 1})
    return config.model_copy(update={"parallel": parallel})


def _sizes(specs: tuple[ParameterSpec, ...]) -> _Sizes:
    """Elements of one unit of each kind, over all parameters; under None those that every rank has."""
    sizes: _Sizes = {}
    for spec in specs:
        sizes[spec.kind] = sizes.get(spec.kind, 0) + spec.unit_elements
    return sizes


def _kept_of_unit(spec: ParameterSpec, place: int, holders: int, copies: int) -> int:
    """Elements of a unit whose optimizer state the replica at `place` keeps, in whole blocks."""
    slices = (slice_of(spec, owner, holders) for owner in kept_places(place, holders, copies))
    return sum(count_units(stop - start, BLOCK) * BLOCK for start, stop in slices)


def _elements(sizes: _Sizes, replica: Replica, position: int) -> int:
    owned = sum(size * len(_units(replica, kind, position)) for kind, size in sizes.items() if kind)
    return owned + sizes.get(None, 0)


def _units(replica: Replica, kind: UnitKind, position: int) -> UnitRange:
    return replica.owners[kind][position]


def _activations(config: Config, replica: Replica, position: int, width: int) -> int:
    model, tokens = config.model, config.train.micro_batch * config.train.seq_len
    kv, ffn, vocab = (len(_units(replica, kind, position)) for kind in UnitKind)
    lean = sum(_saved_per_token(config, kv, ffn, width))
    layer = lean + sum(_recomputable_per_token(config, kv, width))
    outputs = (2 * model.hidden_size + ffn * model.ffn_unit) * width  # of the norms and SwiGLU
    kept = {
        "none": layer,
        "pointwise": layer - outputs,
        "attention": lean,
        "block": 2 * model.hidden_size * width,
    }[config.train.recompute]
    saved = model.num_hidden_layers * kept + (layer - kept)  # one layer's at a time are computed again
    logits = vocab * model.vocab_unit * width
    backward = max(
        logits,  # their gradient
        2 * ffn * model.ffn_unit * 2 * width,  # gate and up, and the gradient of both
    )
    residual = model.hidden_size * (4 * width + 2 * FLOAT)  # streams, gradients, an int32 sum and its result
    return tokens * (saved + logits + backward + residual)


def _saved_per_token(config: Config, kv: int, ffn: int, width: int) -> Iterator[int]:
    """Bytes that a layer keeps of a token for its backward pass if it recomputes attention."""
    model = config.model
    queries = model.num_attention_heads // model.num_key_value_heads
    yield 4 * model.hidden_size * width  # two residual sums and the two inputs of column-parallel products
    yield kv * queries * model.head_dim * width  # attention's output
    yield ffn * model.ffn_unit * 3 * width  # gate, up and their product
    yield 2 * FLOAT  # statistics of the norms


def _recomputable_per_token(config: Config, kv: int, width: int) -> Iterator[int]:
    """Bytes that attention keeps of a token in a layer, unless it computes them again."""
    model = config.model
    queries = model.num_attention_heads // model.num_key_value_heads
    yield kv * (queries + 2) * model.head_dim * width  # before rotation
    yield kv * (queries + 2) * model.head_dim * width  # q, k, v
    yield kv * queries * FLOAT  # row statistics


def on_replica(memory: Mapping[int, RankMemory], replica: Replica) -> RankMemory:
    """The rank of a replica that needs most, of the memory by rank."""
    return max((memory[rank] for rank in replica.members), key=lambda rank: rank.total)
