"""A study: cluster, job, failures, step and recovery times, and the policies to compare; one YAML file.

Sections are strict, as in a training configuration. What involves several sections, or the plan, is checked
in `load_study`; every complaint names the line and the value.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import Field, ValidationError, model_validator

from ntp import yaml_text
from ntp.config import (
    Config,
    Count,
    Fraction,
    ModelConfig,
    ParallelConfig,
    Positive,
    PositiveFloat,
    Ratio,
    Section,
    TrainConfig,
    apply_override,
    parse_as,
)
from ntp.errors import ConfigError, NtpError, PlanError
from ntp.model_config import Recompute
from ntp.plan import make_plan

_MOST_GPUS = 1 << 22
_MOST_OUTAGES = 1e7  # of one history: about a gigabyte of intervals, and far from any cluster that trains

NotNegative = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=40)]
FilePath = Annotated[str, Field(min_length=1)]
Degree = Annotated[int, Field(ge=1)]
Efficiency = Annotated[float, Field(gt=0, le=1)]


class StudyError(NtpError):
    """A study, a trace or a table of times asks for something impossible."""


class Cluster(Section):
    """The machine. A *domain* is a set of GPUs joined by NVLink; spare domains come on top of `gpus`."""

    gpus: Positive
    domain_size: Positive
    spare_domains: Count = 0  # of a policy that names no number of its own


class Batch(Section):
    """The batch of one step, in sequences; as `train` of a training configuration."""

    seq_len: Positive
    global_batch: Positive
    micro_batch: Positive = 1
    grad_group: Positive = 1
    recompute: Recompute = "none"


class Job(Section):
    """What runs: dp replicas x pp pipeline stages x tp ranks.

    `batch_rule` says what a damaged replica does to the batch. `constant`: the batch of a step never changes
    and the plan spreads its microbatches by degree (what this trainer does; the step gets longer).
    `shrink`: a damaged replica computes as many microbatches as fit into the healthy step time and the batch
    gets smaller (what the NTP paper does).
    """

    dp: Positive
    tp: Annotated[int, Field(ge=1, le=1024)]
    pp: Positive = 1
    min_degree: Positive = 1
    batch_rule: Literal["constant", "shrink"] = "constant"
    batch: Batch
    model: ModelConfig


class FailureKind(Section):
    """Failures of one kind: `per_gpu_hour` is the rate, a failure takes `blast_radius` neighbours down."""

    name: Name
    per_gpu_hour: NotNegative
    blast_radius: Positive = 1  # aligned GPUs of one domain
    repair_hours: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]  # each as likely as the others


class Failures(Section):
    """Where failures come from: a trace file, or independent Poisson processes."""

    trace: FilePath | None = None  # CSV: time (hours), domain, gpu, event (fail or repair)
    kinds: tuple[FailureKind, ...] = ()
    start: Literal["healthy", "steady"] = "healthy"  # steady: failures before time 0 count too

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.trace is None) == (not self.kinds):
            raise ValueError(
                f"give either trace or kinds, found trace={self.trace!r} and {len(self.kinds)} kinds"
            )
        return self


class Gpu(Section):
    """One GPU and its links, for the analytic step model: a peak, fractions of it, and achieved rates."""

    name: Name = "H100 SXM"
    peak_tflops: PositiveFloat = 989.0  # dense bf16
    gemm_efficiency: Efficiency = 0.63
    attention_efficiency: Efficiency = 0.5  # forward
    attention_backward_efficiency: Efficiency = 0.43
    memory_gib: PositiveFloat = 80.0
    hbm_gbytes_s: PositiveFloat = 3000.0
    nvlink_gbytes_s: PositiveFloat = 175.0  # one direction, sums of a replica
    copies_gbytes_s: PositiveFloat = 300.0  # one direction, gradients by copy engines
    network_gbytes_s: PositiveFloat = 50.0  # one direction


class Step(Section):
    """Time of a microbatch and of the gradient exchange at each degree.

    `proportional`: a microbatch takes tp / degree of the healthy time, everything else is free.
    `analytic`: what the busiest rank computes and moves, sums in the domain, exchange on the network.
    `table`: measured, a CSV with the columns degree, microbatch_s, exchange_s.
    """

    times: Literal["proportional", "analytic", "table"] = "analytic"
    table: FilePath | None = None
    gpu: Gpu = Gpu()
    overlap: Ratio = 0.0  # share of communication hidden behind computation
    sum_bytes: Positive = 4  # an element of a cut product on its way to be summed: int32
    result_bytes: Positive = 2  # the sum on its way back: bfloat16 between peers, 4 as a collective

    @model_validator(mode="after")
    def _table_is_used(self) -> Self:
        if (self.times == "table") != (self.table is not None):
            raise ValueError(f"times={self.times} with table={self.table!r}; a table goes with times: table")
        return self


class Recovery(Section):
    """What a change of membership stops the whole job for, in seconds."""

    failure_s: NotNegative = 0.0  # from a failure until training goes on
    lost_work_s: NotNegative = 0.0  # work since the last commit that is done again
    repair_s: NotNegative = 0.0  # to take repaired GPUs in


class Boost(Section):
    """Domains that may draw more power: speed at a degree, relative to no boost."""

    speed: dict[Degree, Annotated[float, Field(ge=1)]]
    max_domains: Count | None = None  # boosted at once; null = no limit


class Policy(Section):
    """What a cluster does about damaged domains.

    `degrees`: `whole` drops a replica with any damage; a list allows these degrees besides tp; `free` allows
    every degree; `uniform` runs all replicas at one degree, the best at that moment. `pack` forms replicas
    anew, damaged domains into the fewest; without it every domain stays in its replica.
    """

    name: Name
    degrees: Literal["whole", "uniform", "free"] | tuple[Degree, ...]
    pack: bool = False
    spare_domains: Count | None = None
    boost: Boost | None = None
    recovery: Recovery | None = None


class Sweep(Section):
    """Random sets of failed GPUs: loss over failed fraction."""

    fractions: tuple[Fraction, ...] = (0.0, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.0035, 0.004)
    samples: Positive = 100
    blast_radius: Positive = 1


class Simulation(Section):
    """How long, how often. `threshold`: the failed fraction whose share of time is reported."""

    days: PositiveFloat = 15.0
    seeds: Positive = 10
    seed: Count = 0
    threshold: Fraction = 0.001
    max_spare_domains: Count = 0  # how far to search for the spares that keep the batch whole; 0 = not at all


class Study(Section):
    """Everything that decides the outcome of a simulation."""

    cluster: Cluster
    job: Job
    failures: Failures
    step: Step = Step()
    recovery: Recovery = Recovery()
    policies: Annotated[tuple[Policy, ...], Field(min_length=1)]
    sweep: Sweep | None = Sweep()
    simulation: Simulation = Simulation()

    @property
    def groups_per_domain(self) -> int:
        """Tensor-parallel groups of tp GPUs in a domain."""
        return self.cluster.domain_size // self.job.tp

    @property
    def job_slots(self) -> int:
        """Places of the job for a tensor-parallel group: dp x pp."""
        return self.job.dp * self.job.pp

    def spares_of(self, policy: Policy) -> int:
        """Spare domains that `policy` may use."""
        return self.cluster.spare_domains if policy.spare_domains is None else policy.spare_domains

    @property
    def most_spares(self) -> int:
        """Spare domains that exist in the simulation: what any policy or the search for spares needs."""
        return max(self.simulation.max_spare_domains, *(self.spares_of(policy) for policy in self.policies))

    def training_config(self) -> Config:
        """The job as the trainer sees it; pipeline stages share one plan."""
        job = self.job
        return Config(
            model=job.model,
            parallel=ParallelConfig(dp=job.dp, tp=job.tp),
            train=TrainConfig(steps=1, dtype="bfloat16", device="cuda", **job.batch.model_dump()),
        )


def job_of(config: Config) -> Job:
    """The job of a training configuration."""
    parallel = config.parallel
    batch = Batch(**config.train.model_dump(include=set(Batch.model_fields)))
    return Job(
        dp=parallel.dp, tp=parallel.tp, min_degree=parallel.min_degree, batch=batch, model=config.model
    )


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """The study in a YAML file, with `a.b=c` overrides. Raises ConfigError or StudyError."""
    tree = yaml_text.load_mapping(path)
    for override in overrides:
        apply_override(tree, override)
    source = Path(path).read_text(encoding="utf-8")
    try:
        study = parse_as(Study, yaml_text.to_json(tree), source)
        _check(study, source)
    except (ConfigError, StudyError) as error:
        raise StudyError(f"{path}: {error}") from None
    return study


def load_step(path: str | Path) -> Step:
    """The keys of a `step` section in a YAML file of their own. Raises StudyError."""
    tree = yaml_text.load_mapping(path)
    try:
        return parse_as(Step, yaml_text.to_json(tree), Path(path).read_text(encoding="utf-8"))
    except ConfigError as error:
        raise StudyError(f"{path}: {error}") from None


def _check(study: Study, source: str) -> None:
    """Refuses what no single section can see."""

    def refuse(keys: Sequence[str | int], message: str) -> NoReturn:
        line = yaml_text.line_of(source, keys)
        where = f"line {line}: " * (line > 0)
        raise StudyError(f"{where}{'.'.join(str(key) for key in keys)}: {message}")

    cluster, job = study.cluster, study.job
    size, tp = cluster.domain_size, job.tp
    if cluster.gpus % size:
        refuse(("cluster", "gpus"), f"{cluster.gpus} is not a multiple of domain_size {size}")
    if size % tp:
        refuse(("job", "tp"), f"{tp} does not divide cluster.domain_size {size}: a domain holds whole groups")
    if cluster.gpus > _MOST_GPUS:
        refuse(("cluster", "gpus"), f"{cluster.gpus} is over {_MOST_GPUS}, the most that is simulated")
    if job.dp * tp * job.pp != cluster.gpus:
        product = f"dp {job.dp} x tp {tp} x pp {job.pp} = {job.dp * tp * job.pp}"
        refuse(("cluster", "gpus"), f"{cluster.gpus} GPUs, but the job has {product}")
    if job.pp > job.model.num_hidden_layers:
        refuse(("job", "pp"), f"{job.pp} stages for {job.model.num_hidden_layers} layers")
    if job.min_degree > tp:
        refuse(("job", "min_degree"), f"{job.min_degree} exceeds tp {tp}")
    try:
        plan = make_plan(study.training_config())
    except PlanError as error:
        refuse(("job", "tp"), str(error))
    except ValidationError as error:
        refuse(("job", "batch"), str(error.errors()[0]["msg"]))
    if plan.groups < job.dp or (job.batch_rule == "shrink" and plan.groups % job.dp):
        refuse(("job", "batch", "global_batch"), f"{plan.groups} gradient groups for dp {job.dp} replicas")
    for index, kind in enumerate(study.failures.kinds):
        where = ("failures", "kinds", index)
        if size % kind.blast_radius:
            refuse((*where, "blast_radius"), f"{kind.blast_radius} does not divide domain_size {size}")
        expected = kind.per_gpu_hour * cluster.gpus * study.simulation.days * 24 * kind.blast_radius
        if expected > _MOST_OUTAGES:
            refuse((*where, "per_gpu_hour"), f"{kind.per_gpu_hour:g} means {expected:.2g} outages, too many")
    if study.sweep and size % study.sweep.blast_radius:
        refuse(("sweep", "blast_radius"), f"{study.sweep.blast_radius} does not divide domain_size {size}")
    _check_policies(study, refuse)
    if study.most_spares > cluster.gpus // size:
        refuse(("cluster",), f"{study.most_spares} spare domains for a job of {cluster.gpus // size} domains")


def _check_policies(study: Study, refuse: Callable[[Sequence[str | int], str], NoReturn]) -> None:
    tp, seen = study.job.tp, set[str]()
    for index, policy in enumerate(study.policies):
        if policy.name in seen:
            refuse(("policies", index, "name"), f"{policy.name!r} is given twice")
        seen.add(policy.name)
        degrees = policy.degrees if isinstance(policy.degrees, tuple) else ()
        for degree in (*degrees, *(policy.boost.speed if policy.boost else ())):
            if degree > tp:
                refuse(("policies", index), f"degree {degree} exceeds tp {tp}")
