"""Loading: which checkpoint a run starts from, decided by all ranks together.

Every rank reads and verifies what it owns, nothing else. A checkpoint that one rank finds damaged is damaged
for all; the next older one is tried, or with `strict` the run refuses to start. A run that has checkpoints
but no sound one never starts from fresh weights.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ntp.checkpoint.figures import gbytes_s
from ntp.checkpoint.manifest import (
    MANIFEST,
    NUMERICS,
    DamagedError,
    Manifest,
    check_files,
    damage_of,
    read_manifest,
)
from ntp.checkpoint.pieces import optimizer_shards, read_shards, tensor_shapes
from ntp.checkpoint.store import CheckpointStore, named_step
from ntp.collectives import Group
from ntp.config import Config
from ntp.errors import CheckpointError
from ntp.messages import gather_values, leaders_value
from ntp.optim import DistributedOptimizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where a run goes on: after `step`. `notes` are lines for the terminal, the same on every rank.

    `path` is None for `auto` where nothing was ever saved; then nothing has been loaded. `bytes` are those
    that all ranks together have read.
    """

    path: Path | None
    step: int
    notes: tuple[str, ...]
    bytes: int = 0
    seconds: float = 0.0


def resume_candidates(resume: str, directory: Path) -> tuple[list[Path], list[str]]:
    """Checkpoints to try, best first, and the names of unfinished ones.

    Args:
        resume: `auto`, the number of a step, or the path of a run, a checkpoint directory or one checkpoint.
        directory: where `auto` and a step look.

    Raises:
        CheckpointError: a step or path was asked for and is not there.
    """
    step = named_step(resume)
    if resume == "auto" or step is not None:
        store = CheckpointStore(directory)
        return store.candidates(step), store.unfinished()
    try:
        return _found_at(Path(resume))
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot read what --resume names, {resume[:80]!r}: {reason}") from None


def _found_at(path: Path) -> tuple[list[Path], list[str]]:
    if (path / MANIFEST).exists():
        return [path], []
    for place in (path / "checkpoints", path):
        store = CheckpointStore(place)
        if place.is_dir() and store.steps():
            return store.candidates(), store.unfinished()
    raise CheckpointError(
        f"--resume {str(path)!r} is neither auto, a step, a checkpoint nor a run that has one"
    )


def check_resume(
    resume: str, directory: Path, config: Config, strict: bool = False
) -> tuple[int, Path | None]:
    """What can be told of `load` without a model and without reading values.

    Returns:
        The step after which the run would go on, if no value turns out to be damaged, and its checkpoint; 0
        and None where nothing was ever saved.

    Raises:
        CheckpointError: `load` would refuse. The arguments are those of `load`.
    """
    candidates, _ = resume_candidates(resume, directory)
    damages: list[str] = []
    for path in candidates:
        try:
            manifest = read_manifest(path)
            _check_fit(path, manifest, config)
            check_files(path, manifest)
        except DamagedError as error:
            damages.append(_damage(path, str(error), strict))
        else:
            return manifest.step, path
    if candidates:
        _refuse_all(damages)
    return 0, None


def load(
    resume: str,
    directory: Path,
    config: Config,
    optimizer: DistributedOptimizer,
    group: Group,
    strict: bool = False,
) -> Loaded:
    """Fill the optimizer's masters and moments from a checkpoint; collective over the workers.

    The parameters that compute are left as they are: `Trainer.publish` renews them.

    Args:
        group: every worker; carries host tensors.
        strict: refuse a damaged checkpoint instead of taking an older one.

    Raises:
        CheckpointError: nothing to load, on every rank alike.
    """
    candidates, unfinished = _leaders_candidates(resume, directory, group)
    notes = [f"{name} is what an interrupted save has left; not used" for name in unfinished]
    damaged: list[str] = []
    for place, path in enumerate(candidates):
        started = time.monotonic()
        outcomes = gather_values(group, _try(Path(path), config, optimizer))
        refusals = [outcome["refusal"] for outcome in outcomes if outcome["refusal"]]
        if refusals:
            raise CheckpointError(refusals[0])
        damages = [
            f"rank {rank}: {outcome['damage']}"
            for rank, outcome in zip(group.ranks, outcomes, strict=True)
            if outcome["damage"]
        ]
        if not damages:
            seconds = time.monotonic() - started
            read = sum(outcome["read"] for outcome in outcomes)
            notes += outcomes[0]["notes"]
            notes.append(
                f"resumed after step {outcomes[0]['step']} from {path}: {read / 1e6:.1f} MB in "
                f"{seconds:.2f} s ({gbytes_s(read, seconds):.3f} GB/s)"
            )
            return Loaded(Path(path), outcomes[0]["step"], tuple(notes), read, seconds)
        said = _damage(path, damages[0], strict)
        damaged.append(said)
        rest = candidates[place + 1 :]
        notes.append(f"{said}; taking {Path(rest[0]).name}" if rest else said)
    if candidates:
        _refuse_all(damaged)
    return Loaded(None, 0, (*notes, f"no checkpoint in {str(directory)!r}: starting from step 0"))


def _damage(path: str | Path, damage: str, strict: bool) -> str:
    """What is said of a damaged checkpoint. Raises CheckpointError where no older one may be taken."""
    said = damage_of(path, damage)
    if strict:
        raise CheckpointError(f"{said}; --strict takes no older one, without it the next sound one is taken")
    return said


def _refuse_all(said: Sequence[str]) -> NoReturn:
    advice = "name one elsewhere, or go without --resume"
    raise CheckpointError(f"no sound checkpoint is left ({advice}): {'; '.join(said)}")


def _leaders_candidates(resume: str, directory: Path, group: Group) -> tuple[list[str], list[str]]:
    """What the leading rank sees, so that all try the same."""
    found: dict[str, Any] = {"paths": [], "unfinished": [], "error": None}
    if group.leads:
        try:
            paths, found["unfinished"] = resume_candidates(resume, directory)
            found["paths"] = [str(path) for path in paths]
        except (CheckpointError, OSError) as error:
            found["error"] = str(error)
    found = leaders_value(group, found)
    if found["error"]:
        raise CheckpointError(found["error"])
    return found["paths"], found["unfinished"]


def _try(path: Path, config: Config, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Load this rank's share: what was found, or why it was not usable, as JSON values."""
    outcome: dict[str, Any] = {"damage": None, "refusal": None, "read": 0, "step": 0, "notes": []}
    try:
        manifest = read_manifest(path)
        _check_fit(path, manifest, config)
        assert dict(manifest.shapes) == tensor_shapes(optimizer.buffer.specs), path
        check_files(path, manifest)
        outcome["read"] = read_shards(path, manifest, optimizer_shards(optimizer))
        outcome["step"] = manifest.step
        outcome["notes"] = _changes(manifest.config, config)
    except DamagedError as error:
        outcome["damage"] = str(error)
    except CheckpointError as error:
        outcome["refusal"] = str(error)
    return outcome


def _check_fit(path: Path, manifest: Manifest, config: Config) -> None:
    """Raises CheckpointError where a checkpoint is of another model or other numerics."""
    mine, theirs = config.model.model_dump(mode="json"), manifest.config["model"]
    for key in sorted(mine.keys() | theirs.keys()):
        if key not in ("init_from", "initializer_range") and mine.get(key) != theirs.get(key):
            raise CheckpointError(
                f"checkpoint {str(path)!r} is of another model: model.{key} is {theirs.get(key)} there, "
                f"{mine.get(key)} here"
            )
    if manifest.numerics != NUMERICS:
        raise CheckpointError(
            f"checkpoint {str(path)!r} was computed with numerics {manifest.numerics}, this is {NUMERICS}"
        )


def _changes(saved: Mapping[str, Any], config: Config) -> list[str]:
    """A line for every setting with which the run does not go on as it began."""
    now = config.model_dump(mode="json")
    return [
        f"{section}.{key} was {saved[section].get(key)}, now {now[section][key]}: the run changes from here"
        for section in ("data", "optimizer", "train")
        for key in _that_decide(section, now[section])
        if saved[section].get(key) != now[section][key]
    ]


def _that_decide(section: str, settings: Mapping[str, Any]) -> Sequence[str]:
    """Settings of a section that have a part in the weights."""
    silent = {"device", "eval_every", "timeout_s", "stop_after", "eval_sequences"}
    return [key for key in settings if key not in silent]
