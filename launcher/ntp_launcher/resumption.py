"""What `--resume` would go on from: looked at before anything in a run directory is touched."""

from pathlib import Path

from ntp.checkpoint.load import check_resume
from ntp.checkpoint.store import checkpoint_directory
from ntp.run_directory import RunError, read_summary
from ntp_launcher.flags import LaunchError, NothingToDoError
from ntp_launcher.job import Job


def check_resumption(job: Job, run_dir: Path) -> None:
    """Looks whether the job can go on in `run_dir`, as far as that shows without reading values.

    Raises:
        CheckpointError: what is to be resumed is missing, damaged or of another model.
        LaunchError: it is of a later step than the run is to reach.
        NothingToDoError: the run is complete.
    """
    if job.resume is None:
        return
    step = check_resume(job.resume, checkpoint_directory(job.config, run_dir), job.config, job.strict)
    last = job.config.train.last_step
    if step > last:
        raise LaunchError(
            f"--resume {job.resume}: the checkpoint is of step {step}, but train.steps and train.stop_after "
            f"end the run after step {last}; raise them, or name an older checkpoint"
        )
    if step == last > 0 and _is_complete(run_dir, step):
        raise NothingToDoError(f"done already, up to step {step}: results in {run_dir}")


def _is_complete(run_dir: Path, step: int) -> bool:
    try:
        summary = read_summary(run_dir)
    except RunError:
        return False
    return summary.get("steps") == step and "weights_sha256" in summary
