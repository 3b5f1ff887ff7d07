"""Break a rule of the numerics, and a test must fail: the rules of ntp/DESIGN.md as executable data.

    python -m tests.mutations                # all, one after the other
    python -m tests.mutations overlap norm   # those whose rule or change has one of these words
    python -m tests.mutations --table        # the table of ntp/DESIGN.md

Each mutation of `data/mutations.yaml` is applied to a copy of the tree, in which its test has to fail;
without the mutation it has to pass, or its failure would say nothing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
_COPIED = ("ntp", "kernels", "launcher", "tests", "configs", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """A change that breaks a rule.

    Attributes:
        rule: the place where bits could drift.
        change: the mutation in a few words.
        edits: (old, new) texts; each old one occurs once in `file`.
        test: pytest node that must fail.
        only: pytest's `-k`, where some parameters of the test are enough; else "".
    """

    rule: str
    change: str
    file: str
    edits: tuple[tuple[str, str], ...]
    test: str
    only: str


@dataclass(frozen=True)
class Outcome:
    """What the test said about a mutation; `why` is a line of pytest's output."""

    caught: bool
    why: str


def load_mutations() -> list[Mutation]:
    """The mutations in the order of the file."""
    entries: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/data/mutations.yaml").read_text("utf-8"))
    return [
        Mutation(
            rule=entry["rule"],
            change=entry["change"],
            file=entry["file"],
            edits=tuple((edit["old"], edit["new"]) for edit in entry["edits"]),
            test=entry["test"],
            only=entry.get("only", ""),
        )
        for entry in entries
    ]


def try_mutation(mutation: Mutation) -> Outcome:
    """Apply a mutation to a copy of the tree and run its test there."""
    done = run_test(mutation, mutated(mutation))
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    caught = done.returncode == 1 and bool(failures)
    return Outcome(caught, (failures or (done.stdout + done.stderr).strip().splitlines())[-1])


def run_test(mutation: Mutation, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the test of a mutation until its first failure, in a copy whose mutated file has this text."""
    options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-k", mutation.only] if mutation.only else []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_tree(copy)
        if text is not None:
            (copy / mutation.file).write_text(text, encoding="utf-8")
        path = os.pathsep.join(str(copy / part) for part in (".", "kernels", "launcher"))
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, mutation.test],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


def mutated(mutation: Mutation) -> str:
    """The text of the file with the mutation in it."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    for old, new in mutation.edits:
        assert text.count(old) == 1, f"{mutation.file} has {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


def table() -> str:
    """The mutations as a table in Markdown."""
    rows = [(m.rule, m.change, f"`{m.test.split('::')[1]}`") for m in load_mutations()]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [("rule for", "mutation", "test that fails"), ("---",) * 3, *rows]
    )


def main(words: list[str]) -> int:
    """Try the chosen mutations; returns how many no test caught."""
    if words == ["--table"]:
        print(table())
        return 0
    every = load_mutations()
    chosen = [m for m in every if not words or any(word in f"{m.rule}: {m.change}" for word in words)]
    missed = 0
    sound: dict[tuple[str, str], bool] = {}
    for mutation in chosen:
        key = mutation.test, mutation.only
        sound[key] = sound[key] if key in sound else run_test(mutation).returncode == 0
        outcome = try_mutation(mutation) if sound[key] else Outcome(False, "the test fails without it")
        missed += not outcome.caught
        verdict = "caught" if outcome.caught else "MISSED"
        print(f"{verdict}  {mutation.rule}: {mutation.change}\n        {outcome.why[:200]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
