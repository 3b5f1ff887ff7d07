"""What `--dry-run` shows: the resolved configuration and the plan as tables."""

import json
from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntp.config import Config
from ntp.plan import Plan, Replica
from ntp.units import UnitKind


def show(config: Config, plan: Plan, console: Console) -> None:
    """Prints both tables and what the plan leaves out."""
    console.print(config_table(config))
    console.print(plan_table(plan))
    for line in plan_notes(plan):
        console.print(Text(line))


def config_table(config: Config) -> Table:
    """Every key with its resolved value."""
    table = Table("key", "value", title="config")
    for section, values in config.model_dump(mode="json").items():
        for key, value in _flat(section, values):
            table.add_row(Text(key), Text(_plain(value)))
        table.add_section()
    return table


def plan_table(plan: Plan) -> Table:
    """A row per replica: degree, live ranks, units of each kind per rank, microbatches."""
    kinds = list(UnitKind)
    table = Table("replica", "degree", "live ranks", title="plan (units of each kind per live rank)")
    for kind in kinds:
        table.add_column(kind.value)
    table.add_column("microbatches")
    for replica in plan.replicas:
        table.add_row(*(Text(cell) for cell in _cells(replica, kinds)))
    return table


def plan_notes(plan: Plan) -> Iterator[str]:
    """What is not in the table: failed ranks, standbys, dropped replicas."""
    if plan.failed:
        yield f"failed ranks: {_spaced(plan.failed)}"
    if plan.standbys:
        yield f"standbys: {_spaced(plan.standbys)}"
    for index, reason in plan.dropped:
        yield f"replica {index} is dropped: {reason}"
    yield f"{len(plan.world)} processes, {len(plan.workers)} of them with a shard"


def _cells(replica: Replica, kinds: list[UnitKind]) -> Iterator[str]:
    yield str(replica.index)
    yield str(replica.degree)
    yield _spaced(replica.members)
    for kind in kinds:
        yield _spaced(len(units) for units in replica.owners[kind])
    work = replica.microbatches
    yield f"{len(work)} ({work.start}-{work.stop - 1})" if work else "0"


def _spaced(numbers: Any) -> str:
    return " ".join(str(number) for number in numbers)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _flat(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def _plain(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
