"""The workers of one node: started, looked at, probed and killed as the coordinator orders."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from ntp_launcher.events import Kill, Mailed, Probe, ProbeDone, Start, WorkerExited
from ntp_launcher.lease import Pulse
from ntp_launcher.outcome import last_error_line
from ntp_launcher.processes import WorkerProcess, start_worker, stop_workers
from ntp_launcher.signals import held

_CANNOT_START = 127
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a worker of this node.

    Attributes:
        environ: of a rank's process, by rank and incarnation.
        streams: what of a rank's output is shown (1 stdout, 2 stderr, 3 both).
        prefix: whether shown lines begin with their rank.
        probe: the command that looks at the device of a worker, in its environment. () = none.
    """

    module: str
    environ: Callable[[int, int], Mapping[str, str]]
    log_dir: Path
    streams: Callable[[int], int]
    prefix: bool
    probe: tuple[str, ...]
    probe_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Look:
    """A device that is being looked at; what the probe writes goes to a file."""

    order: Probe
    log: Path
    popen: "subprocess.Popen[bytes]"
    deadline: float


class Crew:
    """This node's processes. What has become of them is told by `news`, once."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._workers: dict[int, tuple[int, WorkerProcess]] = {}
        self._looks: list[_Look] = []
        self._tails: list[TailLog] = []
        self._shown: set[tuple[int, int, int]] = set()
        self._news: list[WorkerExited | ProbeDone] = []
        self._looked_at = time.monotonic()
        self._is_fenced = False

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every rank that runs, by rank."""
        return {rank: worker.popen.pid for rank, (_, worker) in list(self._workers.items())}

    def obey(self, order: Mailed) -> None:
        """Does what the coordinator wants done here."""
        match order:
            case Start(rank, incarnation):
                with held():
                    self._start(rank, incarnation)
            case Kill(rank, incarnation):
                running = self._workers.get(rank)
                if running and running[0] == incarnation:
                    running[1].send(signal.SIGKILL)
            case Probe():
                with held():
                    self._probe(order)
            case _:
                raise AssertionError(order)

    def news(self) -> list[WorkerExited | ProbeDone]:
        """What has happened since the last look."""
        now = time.monotonic()
        since, self._looked_at = now - self._looked_at, now
        for rank, (incarnation, worker) in list(self._workers.items()):
            code = worker.poll()
            if code is not None:
                error = worker.error() if code else ""
                self._news.append(WorkerExited(rank, incarnation, code, error, since, socket.gethostname()))
                del self._workers[rank]
        for look in list(self._looks):
            verdict = _verdict(look)
            if verdict is not None:
                self._looks.remove(look)
                self._news.append(verdict)
        news, self._news = self._news, []
        return news

    def pulse(self, count: int) -> Pulse:
        """How the workers are. Called by another thread."""
        stopped: list[int] = []
        used: dict[str, float] = {}
        for rank, pid in self.pids.items():
            state = _proc_stat(pid)
            if state:
                used[str(rank)] = (int(state[11]) + int(state[12])) / _TICKS
                stopped += [rank] if state[0] in "tT" else []
        return Pulse(count, stopped, used)

    def fence(self) -> None:
        """Kills all workers, one that is being started too, and waits for nothing. For another thread."""
        self._is_fenced = True
        for _, worker in list(self._workers.values()):
            worker.send(signal.SIGKILL)

    def show(self, rank: int, streams: int) -> None:
        """Copies streams of a rank's newest process to the terminal, from their beginning."""
        if rank not in self._workers:
            return
        incarnation, worker = self._workers[rank]
        prefix = {rank: f"[rank{rank}] " if self._recipe.prefix else ""}
        for stream, file, to in ((1, worker.stdout, sys.stdout), (2, worker.stderr, sys.stderr)):
            if streams & stream and (rank, incarnation, stream) not in self._shown:
                self._shown.add((rank, incarnation, stream))
                with held():
                    self._tails.append(TailLog("rank", {rank: str(file)}, to, prefix).start())

    def stop(self, signal_number: int, grace_s: float) -> None:
        """Ends everything: the signal, `grace_s` to obey it, SIGKILL. For where signals to us are held."""
        try:
            for look in self._looks:
                look.popen.kill()
                look.popen.wait()
            self._looks = []
            stop_workers([worker for _, worker in self._workers.values()], signal_number, grace_s)
        finally:  # a running tail would block our own exit
            for tail in self._tails:
                tail.stop()
            self._tails = []

    def _start(self, rank: int, incarnation: int) -> None:
        if self._is_fenced:
            return
        name = f"rank{rank}.{incarnation}" if incarnation else f"rank{rank}"
        environ = self._recipe.environ(rank, incarnation)
        try:
            worker = start_worker(rank, self._recipe.module, environ, self._recipe.log_dir / name)
        except OSError as error:
            self._news.append(WorkerExited(rank, incarnation, _CANNOT_START, f"OSError: {error.strerror}"))
            return
        self._workers[rank] = (incarnation, worker)
        if self._is_fenced:  # it was not among those that were killed
            worker.send(signal.SIGKILL)
        self.show(rank, self._recipe.streams(rank))

    def _probe(self, order: Probe) -> None:
        if not self._recipe.probe:
            self._news.append(ProbeDone(order.rank, order.incarnation, True))
            return
        log = self._recipe.log_dir / f"rank{order.rank}" / "probe.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environ = dict(self._recipe.environ(order.rank, order.incarnation + 1))
        deadline = time.monotonic() + self._recipe.probe_timeout_s
        try:
            with log.open("wb") as out:
                popen = subprocess.Popen(
                    self._recipe.probe, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ
                )
        except OSError as error:
            detail = f"{self._recipe.probe[0]}: {error.strerror}"
            self._news.append(ProbeDone(order.rank, order.incarnation, False, detail))
            return
        self._looks.append(_Look(order, log, popen, deadline))


def probe_command(on_gpu: bool) -> tuple[str, ...]:
    """What is run on a device before a worker is: the kernels' self-test on a GPU, a bare start on a CPU."""
    if on_gpu:
        return (sys.executable, "-m", "ntp_launcher.probe")
    return (sys.executable, "-I", "-S", "-c", "")


def _verdict(look: _Look) -> ProbeDone | None:
    """The result of a look, None while it goes on."""
    rank, incarnation = look.order.rank, look.order.incarnation
    code = look.popen.poll()
    if code == 0:
        return ProbeDone(rank, incarnation, True)
    if code is not None:
        said = last_error_line(look.log.read_text(encoding="utf-8", errors="replace").splitlines())
        return ProbeDone(rank, incarnation, False, said or f"exit code {code}")
    if time.monotonic() < look.deadline:
        return None
    look.popen.kill()
    look.popen.wait()
    return ProbeDone(rank, incarnation, False, "it takes too long")


def _proc_stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; [] where there are none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
