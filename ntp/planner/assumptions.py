"""Every assumption of a study in plain lines: what is printed above each result."""

from collections.abc import Iterator

from ntp.planner.policies import Setting, allowed_degrees
from ntp.planner.step_time import StepTimes
from ntp.planner.study import Policy, Recovery, Step, Study


def assumptions(setting: Setting) -> Iterator[str]:
    """What the figures rest on."""
    study = setting.study
    cluster, job = study.cluster, study.job
    yield (
        f"job: dp {job.dp} x pp {job.pp} x tp {job.tp} = {cluster.gpus} GPUs in domains of "
        f"{cluster.domain_size}; all stages of a replica take the degree of its most damaged one"
    )
    yield (
        f"batch: {job.batch.global_batch} sequences of {job.batch.seq_len} tokens, {setting.whole_batch} "
        f"microbatches a healthy replica, rule {job.batch_rule}: {_RULES[job.batch_rule]}"
    )
    yield from _failures(study)
    yield from step_assumptions(study.step, setting.times, job.tp)
    yield f"recovery: {_recovery(study.recovery)}; a change during a recovery starts it anew"
    yield (
        "the plan knows no power: boosting makes a replica faster, it does not give it more microbatches"
        if (job.batch_rule == "constant")
        else "spare domains of a packing policy form further replicas; the batch never exceeds the full one"
    )
    for policy in study.policies:
        yield f"policy {policy.name}: {_policy(setting, policy)}"
    yield "not modelled: slow GPUs, links and switches, correlated failures beyond the blast radius, storage"


_RULES = {
    "constant": "the plan spreads all of them by degree, the slowest replica sets the pace",
    "shrink": "a damaged replica computes what fits into the healthy step time, the batch gets smaller",
}


def _failures(study: Study) -> Iterator[str]:
    failures = study.failures
    if failures.trace:
        yield f"failures: the trace {failures.trace}; what it does not repair stays down"
        return
    yield (
        "failures: independent Poisson processes; a GPU hit while down stays down until the last repair; "
        f"{'none before time 0' if failures.start == 'healthy' else 'those before time 0 count'}"
    )
    for kind in failures.kinds:
        hours = " or ".join(f"{value:g}" for value in kind.repair_hours)
        yield (
            f"failures, {kind.name}: {kind.per_gpu_hour:g} an hour and GPU, blast radius "
            f"{kind.blast_radius}, down for {hours} h"
            + (", equally likely" if len(kind.repair_hours) > 1 else "")
        )


def step_assumptions(step: Step, times: StepTimes, tp: int) -> Iterator[str]:
    """The time model and what it says at a few degrees."""
    yield {
        "proportional": "step: a microbatch takes tp / degree of the healthy time, the exchange nothing",
        "table": f"step: measured times of {step.table}, between measured degrees a line over 1 / degree",
        "analytic": f"step: analytic, {gpu_assumptions(step)}",
    }[step.times]
    for degree in sorted({tp, tp - 1, tp - 2, tp - 4, tp // 2} - {0, -1, -2, -3}, reverse=True):
        if times.usable[degree]:
            slower = times.microbatch[degree] / times.microbatch[tp]
            yield (
                f"step, degree {degree}: {slower:.3f} of the healthy microbatch"
                + ("" if step.times == "proportional" else f" ({times.microbatch[degree] * 1e3:.3g} ms), ")
                + ("" if step.times == "proportional" else f"exchange {times.exchange[degree] * 1e3:.3g} ms")
            )
    if times.why_not:
        highest = max(times.why_not)
        numbers = _ranges(sorted(times.why_not))
        yield f"step: degrees that cannot run: {numbers}; {highest}: {times.why_not[highest]}"


def gpu_assumptions(step: Step) -> str:
    """The rates of the analytic model, and what it leaves out."""
    gpu = step.gpu
    return (
        f"{gpu.name}: {gpu.peak_tflops:g} TFLOP/s x {gpu.gemm_efficiency:g} in products, "
        f"x {gpu.attention_efficiency:g} in attention forward and x {gpu.attention_backward_efficiency:g} "
        f"backward, memory {gpu.hbm_gbytes_s:g} GB/s and {gpu.memory_gib:g} GiB, NVLink "
        f"{gpu.nvlink_gbytes_s:g} GB/s in sums and {gpu.copies_gbytes_s:g} GB/s in copies of gradients, "
        f"network {gpu.network_gbytes_s:g} GB/s, {step.overlap:.0%} of communication hidden, "
        f"{step.sum_bytes} + {step.result_bytes} B an element summed in a replica; whole units on "
        "the busiest rank; launches hidden, one document a sequence"
    )


def _recovery(recovery: Recovery) -> str:
    return (
        f"{recovery.failure_s:g} s and {recovery.lost_work_s:g} s of lost work a failure, "
        f"{recovery.repair_s:g} s a repair"
    )


def _policy(setting: Setting, policy: Policy) -> str:
    study = setting.study
    degrees = sorted(set(allowed_degrees(setting, policy).tolist()) - {0}, reverse=True)
    parts = ["one degree for all of " * (policy.degrees == "uniform") + f"degrees {_ranges(degrees)}"]
    parts.append(
        "damaged domains packed into the fewest replicas" if policy.pack else "domains stay in place"
    )
    parts.append(f"{study.spares_of(policy)} spare domains")
    if policy.boost:
        speeds = ", ".join(f"{degree}: x {factor:g}" for degree, factor in policy.boost.speed.items())
        limit = policy.boost.max_domains
        parts.append(f"power boost {speeds}, {'any number of' if limit is None else limit} domains")
    if policy.recovery:
        parts.append(_recovery(policy.recovery))
    return "; ".join(parts)


def _ranges(numbers: list[int]) -> str:
    """`[1, 2, 3, 7]` as `1-3, 7`, in the order given."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and abs(number - runs[-1][-1]) == 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
