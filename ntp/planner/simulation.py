"""Run a study: every policy against the same failures, over time and over random sets of failed GPUs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ntp.planner.outages import Counts, Timeline, draw, read_trace, scattered, timeline
from ntp.planner.policies import Setting, prepare, throughput
from ntp.planner.study import Policy, Recovery, Study

Floats = NDArray[np.float64]

_WHOLE = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over seeds: mean, half width of its 95 % interval (normal), smallest and largest."""

    mean: float
    half_width: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Of one value per seed; with a single one the half width is 0."""
        found = np.asarray(values, np.float64)
        spread = found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else 0.0
        return cls(float(found.mean()), float(1.96 * spread), float(found.min()), float(found.max()))


@dataclass(frozen=True, slots=True)
class Damage:
    """What the cluster itself suffers, over time, job domains only.

    Attributes:
        failed: mean share of GPUs that are down.
        peak: largest share.
        over_threshold: share of the time with more than `simulation.threshold` down.
        undamaged: mean share of tensor-parallel groups without any failed GPU.
        least_undamaged: smallest such share.
    """

    failed: float
    peak: float
    over_threshold: float
    undamaged: float
    least_undamaged: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy against one history of failures.

    Attributes:
        throughput: mean over time, recovery included; 1 is the healthy job.
        lowest: smallest throughput of any moment, recovery left out.
        whole: share of the time at full throughput, recovery left out.
        recovering: share of the time spent on recovery.
    """

    throughput: float
    lowest: float
    whole: float
    recovering: float


@dataclass(frozen=True, slots=True)
class Series:
    """The first seed over time.

    Attributes:
        time: start of each interval in hours; `hours` is its length.
        failed: share of the job's GPUs that are down.
        throughput: policy -> its throughput.
    """

    time: Floats
    hours: Floats
    failed: Floats
    throughput: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Loss over failed fraction: policy -> `[fractions, samples]`."""

    fractions: tuple[float, ...]
    loss: Mapping[str, Floats]


@dataclass(slots=True)
class Result:
    """A whole study. `spares` is the fewest spare domains that never shrink the step, None = not found."""

    setting: Setting
    damage: list[Damage] = field(default_factory=list[Damage])
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict[str, list[Outcome]])
    spares: dict[str, list[int | None]] = field(default_factory=dict[str, list[int | None]])
    series: Series | None = None
    sweep: Sweep | None = None


def run(study: Study, advance: Callable[[], None] = lambda: None) -> Result:
    """Simulate; `advance` is called `pieces(study)` times."""
    result = Result(prepare(study))
    for seed in range(_seeds(study)):
        _run_seed(result, seed)
        advance()
    if study.sweep:
        losses: dict[str, list[Floats]] = {policy.name: [] for policy in study.policies}
        for fraction in study.sweep.fractions:
            for name, loss in losses_at(result.setting, fraction).items():
                losses[name].append(loss)
            advance()
        result.sweep = Sweep(study.sweep.fractions, {name: np.stack(rows) for name, rows in losses.items()})
    return result


def pieces(study: Study) -> int:
    """Steps of progress of `run`."""
    return _seeds(study) + (len(study.sweep.fractions) if study.sweep else 0)


def _seeds(study: Study) -> int:
    """A trace is one history."""
    return 1 if study.failures.trace else study.simulation.seeds


def _run_seed(result: Result, seed: int) -> None:
    study = result.setting.study
    line = history(study, seed)
    jobs = study.job_slots
    failed, damaged = np.zeros(len(line.time)), np.zeros(len(line.time))
    rates = {policy.name: np.zeros(len(line.time)) for policy in study.policies}
    for rows, counts in line.chunks():
        failed[rows] = counts[:, :jobs].sum(axis=1) / study.cluster.gpus
        damaged[rows] = (counts[:, :jobs] > 0).sum(axis=1) / jobs
        for policy in study.policies:
            rates[policy.name][rows] = throughput(result.setting, policy, counts)
    result.damage.append(_damage(study, line, failed, damaged))
    for policy in study.policies:
        outcome = _outcome(study, policy, line, rates[policy.name])
        result.outcomes.setdefault(policy.name, []).append(outcome)
        if study.simulation.max_spare_domains:
            needed = spares_needed(result.setting, policy, line)
            result.spares.setdefault(policy.name, []).append(needed)
    if seed == 0:
        result.series = Series(line.time, line.hours, failed, rates)


def history(study: Study, seed: int) -> Timeline:
    """The failures of one seed, those of every spare domain included."""
    horizon = study.simulation.days * 24
    domains = study.cluster.gpus // study.cluster.domain_size + study.most_spares
    gpus = domains * study.cluster.domain_size
    if study.failures.trace:
        outages = read_trace(study.failures.trace, domains, study.cluster.domain_size, horizon)
    else:
        random = np.random.default_rng((study.simulation.seed, seed))
        outages = draw(study.failures, gpus, horizon, random)
    return timeline(outages, gpus // study.job.tp, study.job.tp, horizon)


def _damage(study: Study, line: Timeline, failed: Floats, damaged: Floats) -> Damage:
    share = line.hours / line.hours.sum()
    return Damage(
        failed=float(failed @ share),
        peak=float(failed.max()),
        over_threshold=float((failed > study.simulation.threshold) @ share),
        undamaged=float(1 - damaged @ share),
        least_undamaged=float(1 - damaged.max()),
    )


def _outcome(study: Study, policy: Policy, line: Timeline, rates: Floats) -> Outcome:
    slots = study.job_slots + study.spares_of(policy) * study.groups_per_domain
    paused = pauses(policy.recovery or study.recovery, line, slots)
    share = line.hours / line.hours.sum()
    return Outcome(
        throughput=float((rates * (1 - paused)) @ share),
        lowest=float(rates.min()),
        whole=float((rates >= _WHOLE) @ share),
        recovering=float(paused @ share),
    )


def pauses(recovery: Recovery, line: Timeline, slots: int) -> Floats:
    """Share of each interval that goes into recovery.

    A change of membership during a recovery starts it anew: an interval cannot lose more than itself.
    """
    fails, repairs = line.changes(slots)
    seconds = np.where(
        fails, recovery.failure_s + recovery.lost_work_s, np.where(repairs, recovery.repair_s, 0)
    )
    return np.minimum(seconds / 3600 / line.hours, 1)


def spares_needed(setting: Setting, policy: Policy, line: Timeline) -> int | None:
    """Fewest spare domains with which `policy` always runs at full throughput; None if too few exist.

    More spares never hurt, so it is found by halving.
    """
    low, high = 0, setting.study.simulation.max_spare_domains
    if not stays_whole(setting, policy, line, high):
        return None
    while low < high:
        middle = (low + high) // 2
        if stays_whole(setting, policy, line, middle):
            high = middle
        else:
            low = middle + 1
    return low


def stays_whole(setting: Setting, policy: Policy, line: Timeline, spares: int) -> bool:
    """Whether `policy` never falls under full throughput with so many spare domains."""
    return all(
        bool((throughput(setting, policy, counts, spares) >= _WHOLE).all()) for _, counts in line.chunks()
    )


def losses_at(setting: Setting, fraction: float) -> dict[str, Floats]:
    """Lost throughput of each policy in random sets of failed GPUs: `samples` values each.

    The fraction is of all GPUs that a policy has, spares included; every policy sees sets of its own size.
    """
    study = setting.study
    assert study.sweep is not None
    found: dict[str, Floats] = {}
    for policy in study.policies:
        random = np.random.default_rng((study.simulation.seed, round(fraction * 1e9)))
        gpus = study.cluster.gpus + study.spares_of(policy) * study.cluster.domain_size
        counts = [
            _slot_counts(study, round(fraction * gpus), gpus, random) for _ in range(study.sweep.samples)
        ]
        found[policy.name] = 1 - throughput(setting, policy, np.stack(counts))
    return found


def _slot_counts(study: Study, count: int, gpus: int, random: np.random.Generator) -> Counts:
    assert study.sweep is not None
    failed = scattered(count, gpus, study.sweep.blast_radius, random)
    return np.bincount(failed // study.job.tp, minlength=gpus // study.job.tp).astype(np.int16)
