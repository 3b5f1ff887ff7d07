"""One job as a value, and its run directory.

The run directory gets `resolved.yaml` and `plan.json` before any worker starts. They depend on nothing but
the configuration and the failed ranks, so several agents may write them into one shared directory.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ntp.config import Config, dump_yaml
from ntp.plan import Plan
from ntp_launcher.flags import LaunchError


@dataclass(frozen=True, slots=True)
class Job:
    """What to run. `run_dir` None = the one that the first node proposes; `environ` is the launcher's own."""

    config: Config
    plan: Plan
    run_dir: str | None
    environ: Mapping[str, str]
    worker_module: str = "ntp.worker"

    def fingerprint(self) -> str:
        """Equal on two nodes exactly when they were asked for the same job."""
        return json.dumps([self.config.model_dump_json(), self.plan.to_json()], sort_keys=True)


def proposed_run_dir() -> str:
    """`runs/<time>`, in local time, to the millisecond."""
    now = time.time()
    return f"runs/{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}"


def prepare_run_dir(job: Job, path: str) -> Path:
    """Makes the run directory and writes what is known before the start; raises LaunchError if it cannot.

    A summary of an earlier run in the same directory is removed: it must not pass for this one's.
    """
    run_dir = Path(path).absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "summary.json").unlink(missing_ok=True)
        (run_dir / "resolved.yaml").write_text(dump_yaml(job.config), encoding="utf-8")
        (run_dir / "plan.json").write_text(json.dumps(job.plan.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"cannot write the run directory {path!r}: {error.strerror}") from None
    return run_dir
