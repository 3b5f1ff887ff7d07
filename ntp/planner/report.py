"""A result as plain JSON values."""

from dataclasses import asdict, fields

from ntp.planner.assumptions import assumptions
from ntp.planner.simulation import Damage, Estimate, Outcome, Result


def damage_of(result: Result) -> dict[str, Estimate]:
    """Figures of the cluster over seeds."""
    return {
        field.name: Estimate.of([getattr(each, field.name) for each in result.damage])
        for field in fields(Damage)
    }


def outcome_of(result: Result, policy: str) -> dict[str, Estimate]:
    """Figures of a policy over seeds."""
    return {
        field.name: Estimate.of([getattr(each, field.name) for each in result.outcomes[policy]])
        for field in fields(Outcome)
    }


def provisioned(result: Result, policy: str) -> float:
    """Throughput of a policy for each GPU it has, spares included; 1 is the healthy job without spares."""
    study = result.setting.study
    spares = next(study.spares_of(each) for each in study.policies if each.name == policy)
    extra = spares * study.cluster.domain_size
    return outcome_of(result, policy)["throughput"].mean * study.cluster.gpus / (study.cluster.gpus + extra)


def to_json(result: Result) -> dict[str, object]:
    """Everything that the tables and plots show, and the study itself."""
    study = result.setting.study
    return {
        "assumptions": list(assumptions(result.setting)),
        "study": study.model_dump(mode="json"),
        "plans_made": result.setting.plans.calls,
        "cluster": {name: asdict(estimate) for name, estimate in damage_of(result).items()},
        "policies": {
            policy.name: {
                **{name: asdict(each) for name, each in outcome_of(result, policy.name).items()},
                "throughput_per_provisioned_gpu": provisioned(result, policy.name),
                "spare_domains_needed": result.spares.get(policy.name),
            }
            for policy in study.policies
        },
        "series": None
        if result.series is None
        else {
            "time_h": result.series.time.tolist(),
            "failed": result.series.failed.tolist(),
            "throughput": {name: rates.tolist() for name, rates in result.series.throughput.items()},
        },
        "sweep": None
        if result.sweep is None
        else {
            "fractions": list(result.sweep.fractions),
            "loss": {
                name: {"mean": loss.mean(axis=1).tolist(), "max": loss.max(axis=1).tolist()}
                for name, loss in result.sweep.loss.items()
            },
        },
    }
