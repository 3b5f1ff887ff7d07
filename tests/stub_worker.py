"""A stand-in for the worker: writes down what the launcher told it, then ends as STUB_<rank> says.

STUB_<rank> is one of: `ok` (default), `exit:N`, `kill:N`, `raise:MESSAGE`, `hang`, `lose` (wait for the file
`trigger` in the run directory, then report a broken connection), `deaf` (hang and ignore SIGTERM).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    rank = os.environ["RANK"]
    run_dir = Path(os.environ["NTP_RUN_DIR"])
    keys = [k for k in os.environ if k.startswith(("NTP_", "MASTER_", "TORCHELASTIC_"))]
    known = {key: os.environ[key] for key in [*keys, "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"]}
    (run_dir / f"env{rank}.json").write_text(json.dumps({**known, "pid": os.getpid()}))
    sys.stdout.write(f"hello from {rank}\n")
    sys.stdout.flush()
    action, _, argument = os.environ.get(f"STUB_{rank}", "ok").partition(":")
    if action in ("exit", "kill", "raise"):
        _wait_for_all(run_dir)
        (run_dir / "trigger").touch()
    if action == "exit":
        sys.exit(int(argument))
    if action == "kill":
        os.kill(os.getpid(), int(argument))
    if action == "raise":
        raise ValueError(argument)
    if action == "lose":
        _wait_for(run_dir / "trigger")
        raise RuntimeError("Connection closed by peer [127.0.0.1]:3333")
    if action == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if action in ("hang", "deaf"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    (run_dir / "summary.json").write_text("{}")


def _wait_for_all(run_dir: Path) -> None:
    """Until as many workers as STUB_COUNT says are up."""
    deadline = time.monotonic() + 30
    while len(list(run_dir.glob("env*.json"))) < int(os.environ.get("STUB_COUNT", "1")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


if __name__ == "__main__":
    main()
