"""A stand-in for the worker: writes down what the launcher told it, then ends as STUB_<rank> says.

STUB_<rank> is one of: `ok` (default: the run is complete once all are here), `exit:N`, `kill:N`,
`raise:MESSAGE` (all three once STUB_COUNT workers are up), `once` (exit with 5, but only before a restart),
`lose` (report a broken connection after another worker has ended), `hang` (with a child process), `deaf` (the
same, and ignore SIGTERM), `loud` (`hang`, after more output than a pipe holds).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from ntp.protocol import FINISHED
from tests.store_client import StoreClient

PATIENCE_S = 60


def main() -> None:
    rank, run_dir = os.environ["RANK"], Path(os.environ["NTP_RUN_DIR"])
    action, _, argument = os.environ.get(f"STUB_{rank}", "ok").partition(":")
    sys.stdout.write(f"hello from {rank}\n")
    sys.stderr.write(f"rank {rank} warns\n")
    child = subprocess.Popen(["sleep", "600"]) if action in ("hang", "deaf", "loud") else None
    if action == "loud":
        sys.stdout.write("loud\n" * (1 << 18))
        sys.stdout.flush()
    if action == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids = [os.getpid(), *([child.pid] if child else [])]
    draft = run_dir / f"draft{rank}"
    draft.write_text(json.dumps({"pids": pids, "environ": dict(os.environ)}))
    draft.rename(run_dir / f"seen{rank}.json")
    if action in ("exit", "kill", "raise"):
        wait(lambda: len(list(run_dir.glob("seen*.json"))) >= int(os.environ["STUB_COUNT"]))
        (run_dir / "trigger").touch()
    if action == "exit":
        sys.exit(int(argument))
    if action == "kill":
        os.kill(os.getpid(), int(argument))
    if action == "raise":
        raise ValueError(argument)
    if action == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(5)
    if action == "lose":
        wait((run_dir / "trigger").exists)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:3333")
    if child:
        time.sleep(PATIENCE_S)
    store = StoreClient(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        f"ntp/{os.environ['TORCHELASTIC_RUN_ID']}",
    )
    store.add("ok", 1)
    wait(
        lambda: (
            store.add("ok", 0)
            == int(os.environ["WORLD_SIZE"]) - len(re.findall(r"[0-9]+", os.environ["NTP_FAILED"]))
        )
    )
    store.set(FINISHED, "{}")


def wait(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


if __name__ == "__main__":
    main()
