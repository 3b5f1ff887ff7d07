"""What `--dry-run` shows: the resolved configuration, the plan and the memory it needs."""

import json
from collections.abc import Iterator
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntp.config import Config
from ntp.plan import Plan, Replica
from ntp.planner.memory import estimate
from ntp.units import UnitKind
from ntp_launcher.memory_view import memory_notes, memory_table, spans

_LONG = 16  # replicas; of more, those that are alike share a row


def show(config: Config, plan: Plan, console: Console, device_memory: int | None = None) -> None:
    """Prints configuration, plan and memory as tables, and what has to be said about them.

    Args:
        device_memory: bytes of one device, to say whether the job fits.
    """
    memory = estimate(config, plan)
    console.print(config_table(config))
    console.print(plan_table(plan))
    console.print(memory_table(plan, memory, device_memory))
    for line in (*plan_notes(plan), *memory_notes(config, memory, device_memory)):
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
    for cells in _rows(plan, kinds):
        table.add_row(*(Text(cell) for cell in cells))
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


def _rows(plan: Plan, kinds: list[UnitKind]) -> Iterator[list[str]]:
    if len(plan.replicas) <= _LONG:
        yield from (list(_cells(replica, kinds)) for replica in plan.replicas)
        return
    alike: dict[tuple[int, int], list[Replica]] = {}
    for replica in plan.replicas:
        alike.setdefault((replica.degree, len(replica.microbatches)), []).append(replica)
    for (_, work), replicas in sorted(alike.items()):
        first = list(_cells(replicas[0], kinds))
        live = sum(replica.degree for replica in replicas)
        names = spans([replica.index for replica in replicas])
        yield [names, first[1], f"{live} ranks", *first[3:-1], f"{work} each"]


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
    elif isinstance(value, list) and any(isinstance(item, dict) for item in cast("list[Any]", value)):
        for place, inner in enumerate(cast("list[Any]", value)):
            given = {key: part for key, part in inner.items() if part is not None}
            yield from _flat(f"{prefix}[{place}]", given)
    else:
        yield prefix, value


def _plain(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
