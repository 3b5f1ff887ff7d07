"""What a policy makes of damage: replicas and their degrees, and the throughput that follows.

Everything works on matrices with a row per moment. Forming replicas: slots are sorted by failed GPUs and cut
into consecutive runs of pp, which gives the most replicas of every degree at once (a replica takes the degree
of its worst stage, so a better slot never helps in a worse run).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntp.planner.outages import Counts
from ntp.planner.plans import Plans
from ntp.planner.step_time import StepTimes, step_times
from ntp.planner.study import Policy, Study
from ntp.units import count_units

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """A study with what follows from it, computed once."""

    study: Study
    plans: Plans
    times: StepTimes

    @property
    def whole_batch(self) -> int:
        """Microbatches of a healthy replica."""
        batch = self.study.job.batch
        return batch.global_batch // batch.micro_batch // self.study.job.dp


def prepare(study: Study) -> Setting:
    """Raises StudyError if the healthy job does not fit."""
    plans = Plans(study.training_config())
    return Setting(study, plans, step_times(study.step, study.job, plans))


def throughput(setting: Setting, policy: Policy, failed: Counts, spare_domains: int | None = None) -> Floats:
    """Tokens per second of each moment over those of the healthy job, recovery left out.

    Args:
        failed: `[moments, slots]`, failed GPUs of every slot, those of spare domains last.
        spare_domains: how many of them `policy` may use; None = as the study says.
    """
    study = setting.study
    spares = study.spares_of(policy) if spare_domains is None else spare_domains
    slots = study.job_slots + spares * study.groups_per_domain
    degrees = replica_degrees(study, policy, failed[:, :slots])
    allowed = allowed_degrees(setting, policy)[degrees]
    if policy.degrees == "uniform":
        return _uniform(setting, policy, allowed)
    if study.job.batch_rule == "shrink":
        return _shrunk(setting, policy, allowed)
    return _constant(setting, policy, allowed)


def replica_degrees(study: Study, policy: Policy, failed: Counts) -> Counts:
    """Live ranks of the worst stage of each replica, `[moments, replicas]`.

    With packing and a shrinking batch, spare slots form further replicas; with a constant batch there are dp
    replicas, of the best slots. Without packing, spares stand in for the damaged slots of whole replicas,
    those with the fewest first.
    """
    job, own = study.job, study.job_slots
    if policy.pack:
        replicas = failed.shape[1] // job.pp if job.batch_rule == "shrink" else job.dp
        worst = np.sort(failed, axis=1)[:, job.pp - 1 : replicas * job.pp : job.pp]
        return (job.tp - worst).astype(np.int16)
    stages = failed[:, :own].reshape(-1, job.dp, job.pp)
    worst = stages.max(axis=2)
    if failed.shape[1] > own:
        worst = np.where(_healed(stages, (failed[:, own:] == 0).sum(axis=1)), 0, worst)
    return (job.tp - worst).astype(np.int16)


def _healed(stages: Counts, spares: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which replicas `[moments, dp]` get all damaged stages replaced, with `spares` whole slots a moment."""
    damaged = (stages > 0).sum(axis=2)
    order = np.argsort(damaged, axis=1, kind="stable")
    used = np.cumsum(np.take_along_axis(damaged, order, axis=1), axis=1)
    healed = np.zeros(damaged.shape, np.bool_)
    np.put_along_axis(healed, order, used <= spares[:, None], axis=1)
    return healed


def allowed_degrees(setting: Setting, policy: Policy) -> Counts:
    """For 0 to tp live ranks: the largest degree that policy and memory allow, 0 for none."""
    tp = setting.study.job.tp
    usable = setting.times.usable.copy()
    if policy.degrees == "whole":
        usable[:tp] = False
    elif isinstance(policy.degrees, tuple):
        listed = np.zeros(tp + 1, np.bool_)
        listed[[*policy.degrees, tp]] = True
        usable &= listed
    usable[0] = False
    return np.maximum.accumulate(np.where(usable, np.arange(tp + 1), 0)).astype(np.int16)


def _speed(setting: Setting, policy: Policy) -> Floats:
    speed = np.ones(setting.study.job.tp + 1)
    for degree, factor in (policy.boost.speed if policy.boost else {}).items():
        speed[degree] = factor
    return speed


def _boosted(setting: Setting, policy: Policy) -> int:
    """Replicas that may be boosted at once: all domains of a replica must be."""
    study = setting.study
    if policy.boost is None:
        return 0
    if policy.boost.max_domains is None:
        return study.job_slots
    return policy.boost.max_domains // count_units(study.job.pp, study.groups_per_domain)


def _shrunk(setting: Setting, policy: Policy, degrees: Counts) -> Floats:
    """The step takes the healthy time; what is lost is batch. More than the full batch is not wanted."""
    whole = setting.whole_batch
    plain = setting.times.local_batch(whole, np.ones(setting.study.job.tp + 1))
    batch = plain[degrees].sum(axis=1)
    limit = _boosted(setting, policy)
    if limit:
        gain = (setting.times.local_batch(whole, _speed(setting, policy)) - plain)[degrees]
        batch += -np.sort(-gain, axis=1)[:, :limit].sum(axis=1)
    full = whole * setting.study.job.dp
    return np.minimum(batch, full) / full


def _constant(setting: Setting, policy: Policy, degrees: Counts) -> Floats:
    """The batch stays whole; the plan spreads its microbatches, the slowest replica sets the pace."""
    rows, place = np.unique(-np.sort(-degrees, axis=1), axis=0, return_inverse=True)
    speed, limit = _speed(setting, policy), _boosted(setting, policy)
    healthy = step_seconds(setting, np.full(setting.study.job.dp, setting.study.job.tp, np.int16), speed, 0)
    found = np.array([healthy / step_seconds(setting, row, speed, limit) for row in rows])
    return found[place.reshape(-1)]


def step_seconds(setting: Setting, degrees: Counts, speed: Floats, boosted: int) -> float:
    """Seconds of a step with these degrees, 0 for a dropped replica; infinity if all are dropped."""
    if not degrees.any():
        return float("inf")
    shares = np.array(setting.plans.microbatches_of(tuple(int(degree) for degree in degrees)))
    seconds = setting.times.compute(degrees, shares)
    if boosted:
        slowest = np.argsort(-seconds, kind="stable")[:boosted]
        seconds[slowest] /= speed[degrees[slowest]]
    return float(seconds.max() + setting.times.exchange[degrees[degrees > 0]].max())


def _uniform(setting: Setting, policy: Policy, degrees: Counts) -> Floats:
    """Every replica that can runs at one degree, the rest are dropped; the best such degree."""
    study = setting.study
    best = np.zeros(len(degrees))
    for degree in np.unique(degrees[degrees > 0]):
        same = np.where(degrees >= degree, degree, 0).astype(np.int16)
        rule = _shrunk if study.job.batch_rule == "shrink" else _constant
        best = np.maximum(best, rule(setting, policy, same))
    return best
