"""Random faults over random meshes: every run must end with the bits of an unfailed one.

    python -m ntp.testing.campaign --faults 200 --seed 0

Each run goes through the real launcher with up to three faults (`ntp.faults`), on a mesh of at least four
ranks drawn at random, so that somebody always survives. A run fails if its hashes or the loss of any step
differ, if it does not end in time, or if it leaves a process behind; its directory is then kept.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ntp.faults import Fault, Part
from ntp.protocol import Phase
from ntp.testing.trial import SAVE_EVERY, STEPS, Trial, reference, run_trial

_MESHES = ((2, 2), (2, 3), (3, 2), (4, 1))
_KINDS = tuple(Fault.model_fields)
_PHASES = (*(phase for phase in Phase if phase is not Phase.WAITING), *Part)


def trials(seed: int) -> Iterator[Trial]:
    """Trials without end; a function of the seed."""
    draw = random.Random(seed)
    while True:
        dp, tp = draw.choice(_MESHES)
        faults: list[Fault] = []
        for rank in draw.sample(range(dp * tp), draw.choices((1, 2, 3), (1, 2, 3))[0]):
            faults.append(_fault(draw, rank, faults))
        yield Trial(dp, tp, tuple(faults))


def _fault(draw: random.Random, rank: int, before: Sequence[Fault]) -> Fault:
    """A fault in a place to which the run comes; one in a recovery is in that from a fault before."""
    kind = draw.choice(_KINDS)
    phase = Phase.STEP if kind == "nan" else draw.choice(_PHASES)
    if kind == "disconnect" and phase is Part.OPTIMIZER:  # it talks to nobody
        phase = Phase.UPDATE
    step = draw.randint(1, STEPS)
    match phase:
        case Phase.STARTUP:
            step = 0
        case Phase.MOVING:
            step = max(0, draw.choice(before).place.step - 1) if before else 0
        case Phase.CHECKPOINT | Part.WRITER:
            step += step % SAVE_EVERY
        case Phase.FINISHING:
            step = STEPS
        case _:
            pass
    return Fault.of(kind, rank, step, phase)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if any run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="that strike at least (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    scratch = Path(tempfile.mkdtemp(prefix="ntp-campaign-"))
    began, expected = time.monotonic(), reference()
    kinds: Counter[str] = Counter()
    struck = runs = changes = failures = 0
    for trial in trials(args.seed):
        if struck >= args.faults:
            break
        directory = scratch / str(runs)
        outcome = run_trial(trial, directory, expected)
        struck, runs = struck + outcome.struck, runs + 1
        changes += outcome.changes
        failures += bool(outcome.problem)
        kinds.update(fault.kind for fault in trial.faults)
        verdict = outcome.problem or f"same bits, {outcome.changes} changes of membership"
        sys.stdout.write(f"{trial.describe()}\n    {verdict} ({outcome.seconds:.1f} s)\n")
        sys.stdout.flush()
        if not outcome.problem:
            shutil.rmtree(directory)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    sys.stdout.write(
        f"{struck} faults struck of {kinds.total()} drawn ({told}); {runs} runs, "
        f"{changes} changes of membership, {failures} failures, {(time.monotonic() - began) / 60:.1f} min\n"
    )
    if failures:
        sys.stdout.write(f"the failed runs are in {scratch}\n")
    else:
        scratch.rmdir()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
