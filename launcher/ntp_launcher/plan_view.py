"""What `ntp-plan` shows: assumptions, tables over policies, and layouts."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntp.planner.advice import Advice, Layout
from ntp.planner.assumptions import assumptions
from ntp.planner.prediction import Prediction
from ntp.planner.report import damage_of, outcome_of, provisioned
from ntp.planner.simulation import Estimate, Result, Sweep


def show_result(result: Result, console: Console) -> None:
    """Assumptions first, then every table."""
    show_assumptions(assumptions(result.setting), console)
    _print(_cluster_table(result), console)
    _print(_policy_table(result), console)
    if result.sweep:
        _print(_sweep_table(result.sweep), console)


def _print(table: Table, console: Console) -> None:
    """The table; a terminal that is too narrow folds names and numbers, and loses no part of them."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def show_assumptions(lines: Iterable[str], console: Console) -> None:
    """One a line, none styled or cut."""
    console.print(Text("assumptions", style="bold"))
    for line in lines:
        console.print(Text(f"  {line}"))


def _percent(estimate: Estimate, digits: int = 2) -> str:
    return f"{estimate.mean:.{digits}%} ± {estimate.half_width:.{digits}%}"


def _cluster_table(result: Result) -> Table:
    threshold = result.setting.study.simulation.threshold
    table = Table("cluster", "mean over seeds", "lowest", "highest", title="damage (± 95 % over seeds)")
    names = {
        "failed": "GPUs down, mean over time",
        "peak": "GPUs down, most",
        "over_threshold": f"time with more than {threshold:g} of the GPUs down",
        "undamaged": "groups of tp GPUs without damage, mean",
        "least_undamaged": "groups of tp GPUs without damage, least",
    }
    for name, estimate in damage_of(result).items():
        table.add_row(names[name], _percent(estimate), f"{estimate.low:.2%}", f"{estimate.high:.2%}")
    return table


def _policy_table(result: Result) -> Table:
    searched = result.setting.study.simulation.max_spare_domains
    table = Table("policy", title="throughput of the healthy job = 100 %")
    for heading in ("throughput", "lowest", "time at full", "recovering", "per GPU with spares"):
        table.add_column(heading, justify="right")
    if searched:
        table.add_column("spare domains for no loss", justify="right")
    for policy in result.setting.study.policies:
        found = outcome_of(result, policy.name)
        cells = [
            _percent(found["throughput"]),
            f"{found['lowest'].low:.2%}",
            f"{found['whole'].mean:.1%}",
            f"{found['recovering'].mean:.2%}",
            f"{provisioned(result, policy.name):.2%}",
        ]
        if searched:
            cells.append(_spares(result.spares[policy.name], searched))
        table.add_row(Text(policy.name), *cells)
    return table


def _spares(needed: list[int | None], searched: int) -> str:
    """Mean and most over seeds."""
    found = [each for each in needed if each is not None]
    if len(found) < len(needed):
        return f"over {searched}"
    return f"{sum(found) / len(found):.1f}, at most {max(found)}"


def _sweep_table(sweep: Sweep) -> Table:
    """Mean loss over random sets, a row per size of the sets, and the worst of the largest ones."""
    table = Table("GPUs down", title="loss in random sets of failed GPUs, mean")
    for name in sweep.loss:
        table.add_column(Text(name), justify="right")
    for place, fraction in enumerate(sweep.fractions):
        table.add_row(f"{fraction:.2%}", *(f"{loss[place].mean():.2%}" for loss in sweep.loss.values()))
    table.add_row("worst of the last", *(f"{loss[-1].max():.2%}" for loss in sweep.loss.values()))
    return table


def show_advice(advice: Advice, console: Console) -> None:
    """The given layout beside the best one, then the best one's replicas."""
    table = Table("layout", "how", "degrees", "min_degree", "microbatches", "step", title="advice")
    for name, layout in (("given", advice.given), ("best", advice.best)):
        table.add_row(
            *([name, "cannot run", *[""] * 4] if layout is None else [name, *_layout_cells(layout)])
        )
    _print(table, console)
    replicas = Table("replica", "degree", "live ranks", "microbatches", title="best layout")
    for replica in advice.best.plan.replicas:
        members = " ".join(str(rank) for rank in replica.members)
        replicas.add_row(str(replica.index), str(replica.degree), members, str(len(replica.microbatches)))
    _print(replicas, console)


def _layout_cells(layout: Layout) -> list[str]:
    replicas = layout.plan.replicas
    return [
        layout.name,
        _counted([replica.degree for replica in replicas]),
        str(layout.min_degree),
        _counted([len(replica.microbatches) for replica in replicas]),
        f"{layout.seconds:.4g} s",
    ]


def _counted(numbers: list[int]) -> str:
    """`[4, 4, 3]` as `2 x 4, 1 x 3`."""
    return ", ".join(f"{numbers.count(n)} x {n}" for n in sorted(set(numbers), reverse=True))


def show_prediction(found: Prediction, console: Console) -> None:
    """A microbatch in parts on every kind of replica, then the step; milliseconds."""
    table = Table("which", title="one microbatch, forward and backward, ms on the busiest rank")
    for heading in ("degree", "number", "products", "attention", "pointwise", "sums", "all"):
        table.add_column(heading, justify="right")
    kinds: dict[tuple[int, int], list[int]] = {}
    for replica in found.replicas:
        kinds.setdefault((replica.degree, replica.microbatches), []).append(replica.index)
    first = {replica.index: replica for replica in found.replicas}
    for (degree, microbatches), indices in kinds.items():
        one = first[indices[0]].microbatch
        parts = (one.products, one.attention, one.pointwise, one.sums, one.total(found.overlap))
        names = f"{indices[0]}" if len(indices) == 1 else f"{len(indices)} x"
        table.add_row(names, f"{degree}", f"{microbatches}", *(f"{part * 1e3:.1f}" for part in parts))
    _print(table, console)
    console.print(
        Text(
            f"step {found.step * 1e3:.1f} ms = microbatches {found.compute * 1e3:.1f} + exchange over "
            f"{found.link} {found.exchange * 1e3:.1f} + update {found.update * 1e3:.1f}; "
            f"{found.tokens / found.step:.0f} tokens/s, {found.tokens / found.step / found.gpus:.0f} a GPU"
        )
    )
