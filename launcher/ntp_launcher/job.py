"""One job as a value, and its run directory.

The run directory gets `resolved.yaml` and `plan.json` before any worker starts, from the agent that leads.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ntp.checkpoint.store import CheckpointStore, checkpoint_directory, named_step
from ntp.config import Config, dump_yaml, load_config
from ntp.errors import NtpError
from ntp.plan import Plan
from ntp.run_directory import replacing
from ntp_launcher.flags import LaunchError

_TOLD = ("metrics.jsonl", "events.jsonl", "summary.json", "tensorboard/events.out.tfevents.*")


@dataclass(frozen=True, slots=True)
class Display:
    """What the terminal shows; `log_format` is text or json."""

    quiet: bool = False
    log_format: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True)
class Job:
    """What to run.

    Attributes:
        run_dir: None = the one that the first node proposes.
        environ: the launcher's own.
        resume: what to go on from: auto, a step or a path; None = a new run.
        strict: refuse a damaged checkpoint.
        display: what the terminal shows.
    """

    config: Config
    plan: Plan
    run_dir: str | None
    environ: Mapping[str, str]
    worker_module: str = "ntp.worker"
    resume: str | None = None
    strict: bool = False
    display: Display = Display()

    def fingerprint(self) -> str:
        """Equal on two nodes exactly when they were asked for the same job."""
        start = [self.resume, self.strict]
        return json.dumps([self.config.model_dump_json(), self.plan.to_json(), start], sort_keys=True)


def proposed_run_dir(job: Job) -> str:
    """`runs/<time>`, in local time, to the millisecond; to go on, the newest run of this model that can."""
    if job.resume is not None and (job.resume == "auto" or named_step(job.resume) is not None):
        previous = previous_run(job.config, Path("runs"))
        if previous is not None:
            return str(previous)
    now = time.time()
    return f"runs/{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}"


def previous_run(config: Config, runs: Path) -> Path | None:
    """The newest run directory below `runs` that has a checkpoint of a model of this shape."""
    for run_dir in sorted(runs.glob("*"), key=lambda path: path.name, reverse=True):
        with suppress(NtpError):  # not a run, or not ours to read
            saved = load_config(run_dir / "resolved.yaml")
            found = CheckpointStore(checkpoint_directory(saved, run_dir)).candidates()
            if saved.model == config.model and found:
                return run_dir
    return None


def make_run_dir(path: str) -> Path:
    """Makes the run directory, which agents may share; raises LaunchError if it cannot."""
    run_dir = Path(path).absolute()
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def clear_run_dir(run_dir: Path, checkpoints: CheckpointStore) -> Iterator[str]:
    """Takes what an earlier run has left out of the way, and says of what there was. Raises LaunchError.

    Its checkpoints go first: whatever stops this, no later `--resume` can take them for the new run's. Its
    logs stay until a rank writes its own.
    """
    with writing(str(checkpoints.directory)):
        away = checkpoints.belong_to(None)
    if away is not None:
        yield f"checkpoints of an earlier run have been moved to {str(away)!r}"
    told = [path for pattern in _TOLD for path in run_dir.glob(pattern)]
    with writing(str(run_dir)):
        for path in told:
            path.unlink(missing_ok=True)
    if told:
        yield f"the results of an earlier run in {str(run_dir)!r} are replaced"


def describe_job(job: Job, run_dir: Path) -> None:
    """Writes what is known before the start; raises LaunchError if it cannot.

    The summary of a run that this one goes on from is removed: it must not pass for this one's.
    """
    with writing(str(run_dir)):
        drafts = {
            run_dir / "resolved.yaml": dump_yaml(job.config),
            run_dir / "plan.json": json.dumps(job.plan.to_json(), indent=1) + "\n",
        }
        with replacing(drafts):
            (run_dir / "summary.json").unlink(missing_ok=True)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """In this context an error of the file system is a LaunchError that names the run directory."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"cannot write the run directory {path!r}: {error.strerror}") from None
