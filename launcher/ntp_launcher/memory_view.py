"""What `--dry-run` says about device memory: per replica its heaviest rank, and whether it fits."""

import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice

from rich.table import Table
from rich.text import Text

from ntp.config import Config
from ntp.plan import Plan
from ntp.planner.memory import RankMemory, on_replica, smallest_degree
from ntp_launcher.flags import LaunchError

_UNITS = {"": 1, "G": 1 << 30, "M": 1 << 20, "MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": 1 << 30}
_MOST_COLUMNS = 4


def parse_memory(text: str) -> int:
    """The bytes that `80GiB`, `80GB` or a bare number mean. Raises LaunchError."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,3})?)\s*([A-Za-z]{0,3})\s*", text)
    bytes_ = int(float(found[1]) * _UNITS[found[2].upper()]) if found and found[2].upper() in _UNITS else 0
    if bytes_ < 1:
        raise LaunchError(f"--device-memory {text!r}: expected bytes above 0, as in 80GiB")
    return bytes_


def show_bytes(count: int) -> str:
    """As people read it: KiB, MiB or GiB."""
    power = next((p for p in (1, 2, 3) if count < 1000 * 1024**p), 4)
    size, unit = count / 1024**power, "KMGT"[power - 1] + "iB"
    return f"{size:.2f} {unit}" if size < 10 else f"{size:.1f} {unit}"


def memory_table(plan: Plan, memory: tuple[RankMemory, ...], capacity: int | None) -> Table:
    """A column for every kind of replica, by its heaviest rank, those with the smallest degree first."""
    columns = list(islice(_kinds(plan, memory), _MOST_COLUMNS))
    table = Table("per device", title="device memory (estimate)")
    for replicas, degree, heaviest in columns:
        table.add_column(Text(f"replica {replicas}\ndegree {degree}\nrank {heaviest.rank}"), justify="right")
    for part in (field.name for field in fields(RankMemory)[1:]):
        table.add_row(part, *(show_bytes(getattr(heaviest, part)) for _, _, heaviest in columns))
    table.add_section()
    table.add_row("total", *(show_bytes(heaviest.total) for _, _, heaviest in columns))
    if capacity is not None:
        table.add_row("fits", *("yes" if heaviest.total <= capacity else "NO" for _, _, heaviest in columns))
    return table


def memory_notes(config: Config, memory: tuple[RankMemory, ...], capacity: int | None) -> Iterator[str]:
    """Whether everything fits, and down to which degree a damaged replica does."""
    worst = max(memory, key=lambda rank: rank.total)
    if capacity is None:
        most = show_bytes(worst.total)
        yield f"rank {worst.rank} needs most: {most}; --device-memory 80GiB says whether that fits"
        return
    over = sum(rank.total > capacity for rank in memory)
    if over:
        yield (
            f"does not fit: {over} of {len(memory)} ranks need more than {show_bytes(capacity)}, "
            f"rank {worst.rank} {show_bytes(worst.total)}, most of it {_largest(worst)}"
        )
        return
    yield f"fits: rank {worst.rank} needs most, {show_bytes(worst.total)} of {show_bytes(capacity)}"
    least = smallest_degree(config, capacity)
    if least is not None and least > config.parallel.min_degree:
        yield (
            f"a replica that has lost ranks fits down to degree {least}; parallel.min_degree={least} "
            f"drops one that would not (found {config.parallel.min_degree})"
        )
    elif least is not None:
        yield f"a replica that has lost ranks fits down to parallel.min_degree={config.parallel.min_degree}"


def _kinds(plan: Plan, memory: tuple[RankMemory, ...]) -> Iterator[tuple[str, int, RankMemory]]:
    """Replicas by degree and load, with the heaviest rank among them; the smallest degree first."""
    by_rank = {rank.rank: rank for rank in memory}
    alike: dict[tuple[int, int], list[tuple[int, RankMemory]]] = {}
    for replica in plan.replicas:
        key = replica.degree, len(replica.microbatches)
        alike.setdefault(key, []).append((replica.index, on_replica(by_rank, replica)))
    for (degree, _), members in sorted(alike.items()):
        heaviest = max((rank for _, rank in members), key=lambda rank: rank.total)
        yield spans([index for index, _ in members]), degree, heaviest


def spans(indices: list[int]) -> str:
    """`0-3 7`: ascending numbers with runs joined; cut off when there are many."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return " ".join(words[:6]) + (f" ... ({len(indices)})" if len(words) > 6 else "")


_REMEDIES = {
    "parameters": "raise parallel.tp",
    "gradients": "raise train.grad_group or parallel.tp",
    "optimizer": "raise parallel.dp or parallel.tp, or lower optimizer.copies",
    "exchange": "raise train.grad_group so that a replica sends one sum, or lower optimizer.copies",
    "activations": "lower train.micro_batch or train.seq_len, or raise parallel.tp",
    "reserved": "use devices with more memory",
}


def _largest(memory: RankMemory) -> str:
    """What takes most, and what makes it smaller."""
    name = max(_REMEDIES, key=lambda part: getattr(memory, part))
    return f"{name} ({_REMEDIES[name]})"
