"""What a job finds in its run directory: looked at before anything there is touched."""

from collections.abc import Iterator
from pathlib import Path

from ntp.checkpoint.load import check_resume
from ntp.checkpoint.store import CheckpointStore, checkpoint_directory
from ntp.run_directory import RunError
from ntp_launcher.flags import LaunchError, NothingToDoError
from ntp_launcher.job import Job, clear_run_dir, writing
from ntp_launcher.run_files import read_steps, read_summary


def check_resumption(job: Job, run_dir: Path) -> Path | None:
    """Looks whether the job can go on in `run_dir`, as far as that shows without reading values.

    Returns:
        What it would go on from; None for a new run, and for `auto` where nothing was ever saved.

    Raises:
        CheckpointError: what is to be resumed is missing, damaged or of another model.
        LaunchError: it is of a later step than the run is to reach.
        NothingToDoError: the run is complete.
    """
    if job.resume is None:
        return None
    step, found = check_resume(job.resume, checkpoint_directory(job.config, run_dir), job.config, job.strict)
    last = job.config.train.last_step
    if step > last:
        raise LaunchError(
            f"--resume {job.resume}: the checkpoint is of step {step}, but train.steps and train.stop_after "
            f"end the run after step {last}; raise them, or name an older checkpoint"
        )
    goes_on_from_its_end = step == last or (step == 0 and not job.config.checkpoint.every)
    if last > 0 and goes_on_from_its_end and _is_complete(run_dir, last):
        raise NothingToDoError(f"done already, up to step {last}: results in {run_dir}")
    return found


def take_over(job: Job, run_dir: Path) -> Iterator[str]:
    """Makes a run directory the job's, for whoever holds its lock: what to say of what was there.

    Raises as `check_resumption` does, LaunchError where what is there cannot be cleared away, and RunError
    where what the run has told so far cannot be read, and so not be gone on with.
    """
    found = check_resumption(job, run_dir)
    store = CheckpointStore(checkpoint_directory(job.config, run_dir))
    if job.resume is None:
        yield from clear_run_dir(run_dir, store)
        return
    steps = read_steps(run_dir)
    if found is None and steps:
        yield f"no checkpoint in {str(store.directory)!r}: the run in {str(run_dir)!r} begins again at step 0"
    elif found is not None and not store.steps():
        with writing(str(store.directory)):  # whoever is killed before the workers note it goes on from there
            store.come_from(found)


def _is_complete(run_dir: Path, step: int) -> bool:
    try:
        summary = read_summary(run_dir)
    except RunError:
        return False
    return summary.get("steps") == step and "weights_sha256" in summary
