"""The agent of one node, on torch.distributed.elastic: rendezvous, start, watch, stop.

It differs from torch's LocalElasticAgent in three ways. Ranks are those of the base mesh and only live ones
are started. A failure is looked at for a moment before anything is killed, so that the cause can be told from
its consequences. Agents tell each other through the rendezvous store: a failure on one node ends the others,
success is success everywhere. What has happened is collected here, what it means is decided in `outcome`.
"""

import contextlib
import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from ntp_launcher.board import Board
from ntp_launcher.environment import Rendezvous, worker_environment
from ntp_launcher.flags import LaunchError, Nodes
from ntp_launcher.job import Job, prepare_run_dir, proposed_run_dir
from ntp_launcher.outcome import Exit, describe, explain
from ntp_launcher.placement import block_size, local_ranks, node_ranks
from ntp_launcher.processes import WorkerProcess, start_worker, stop_workers

SETTLE_S = 1.0  # from the first failed exit to the judgement: consequences arrive within tens of milliseconds
PEERS_S = 3.0  # for other agents to tell what they have seen
FAREWELL_S = 5.0  # for other agents to read it
STOP_S = 10.0  # from a signal to the launcher until its workers get SIGKILL
FAILED_STOP_S = 3.0  # the same after a failure, when there is nothing left to finish
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class MeshAgent(SimpleElasticAgent):
    """Runs this node's block of the base mesh. After a failed run, `failure` is the reason in one line."""

    def __init__(self, spec: WorkerSpec, job: Job, nodes: Nodes) -> None:
        super().__init__(spec, exit_barrier_timeout=FAREWELL_S, shutdown_timeout=int(STOP_S))
        self.failure = ""
        self.run_dir = Path()
        self._job, self._nodes = job, nodes
        self._board: Board | None = None
        self._node = 0
        self._workers: list[WorkerProcess] = []
        self._exits: dict[int, Exit] = {}
        self._tails: list[TailLog] = []

    @property
    def log_dir(self) -> Path:
        """Where the output of every rank goes, in a directory of its own."""
        return Path(self._nodes.log_dir).absolute() if self._nodes.log_dir else self.run_dir / "logs"

    def _assign_worker_ranks(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """This node's live ranks, once the agents agree on the job, the blocks and the run directory."""
        job = self._job
        self._board = Board(store, group_rank, group_world_size)
        claim = {"node": self._nodes.node_rank, "job": job.fingerprint(), "run_dir": proposed_run_dir(job)}
        claims = self._board.exchange("claim", claim)
        try:
            places = self._take_block(claims, group_rank)
        except LaunchError as error:
            self._board.post("failure", {"note": f"node {self._node} refused the job: {error}"})
            self._leave(self._board)
            raise
        world = job.config.parallel.world_size
        return [Worker(local, rank, rank, world, world) for rank, local in places.items()]

    def _take_block(self, claims: list[dict[str, Any]], group_rank: int) -> dict[int, int]:
        """Rank -> local rank of this node's workers. Raises LaunchError when the agents cannot agree."""
        job, nodes = self._job, self._nodes
        self._node = group_rank
        blocks = node_ranks([other["node"] for other in claims])
        self._node = blocks[group_rank]
        for other, block in zip(claims, blocks, strict=True):
            if other["job"] != claims[group_rank]["job"]:
                raise LaunchError(
                    f"node {block} was given another config or other failed ranks than this one"
                )
        self.run_dir = prepare_run_dir(job, job.run_dir or claims[blocks.index(0)]["run_dir"])
        size = block_size(job.config.parallel.world_size, nodes.nnodes, nodes.nproc_per_node)
        return local_ranks(self._node, size, job.plan.world)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        logs = self.log_dir / f"attempt{attempt}" if attempt else self.log_dir
        rendezvous = _rendezvous_of(worker_group, attempt)
        self._exits = {}
        self._workers = []
        for worker in worker_group.workers:
            environ = worker_environment(
                self._job, self.run_dir, worker.global_rank, worker.local_rank, rendezvous
            )
            directory = logs / f"rank{worker.global_rank}"
            self._workers.append(
                start_worker(worker.global_rank, self._job.worker_module, environ, directory)
            )
        self._tails = self._start_tails(worker_group.workers)
        return {index: worker.popen.pid for index, worker in enumerate(self._workers)}

    def _start_tails(self, workers: list[Worker]) -> list[TailLog]:
        """Copies of worker output to the terminal, as `--tee` asks."""
        tee = self._nodes.tee
        out: dict[int, str] = {}
        err: dict[int, str] = {}
        for worker, process in zip(workers, self._workers, strict=True):
            if tee is None:
                streams = 3 if process.rank == self._job.plan.reporter else 0
            else:
                streams = tee.get(worker.local_rank, tee.get(-1, 0))
            if streams & 1:
                out[process.rank] = str(process.stdout)
            if streams & 2:
                err[process.rank] = str(process.stderr)
        prefixes = {process.rank: f"[rank{process.rank}] " if tee else "" for process in self._workers}
        tails = [TailLog("rank", out, sys.stdout, prefixes), TailLog("rank", err, sys.stderr, prefixes)]
        return [tail.start() for tail in tails]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """One look: FAILED if a worker here or an agent elsewhere has failed, SUCCEEDED once all are done."""
        board = self._board
        assert board is not None
        self._look()
        failed_here = any(exit.code for exit in self._exits.values())
        try:
            if failed_here or board.any_up("failure"):
                return self._fail(board)
            if len(self._exits) < len(self._workers):
                return RunResult(state=WorkerState.HEALTHY)
            board.post("done", {})
            if not board.all_up("done"):
                return RunResult(state=WorkerState.HEALTHY)
        except RuntimeError:
            return self._lose_store()
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={worker.global_rank: None for worker in worker_group.workers},
        )

    def _look(self) -> None:
        """Records the exits since the last look."""
        for worker in self._workers:
            code = worker.poll()
            if code is not None and worker.rank not in self._exits:
                error = worker.error() if code else ""
                self._exits[worker.rank] = Exit(worker.rank, code, error, order=len(self._exits))

    def _fail(self, board: Board) -> RunResult:
        """Waits for the picture to be whole, then settles on one cause with the other agents."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and len(self._exits) < len(self._workers):
            time.sleep(0.05)
            self._look()
        self.failure = explain(self._exits.values())
        if self._remaining_restarts == 0:
            board.post("failure", {"exits": [exit.to_json() for exit in self._exits.values()]})
            reports = board.collect("failure", PEERS_S)
            exits = [Exit(**exit) for report in reports.values() for exit in report.get("exits", [])]
            notes = [report["note"] for report in reports.values() if "note" in report]
            self.failure = explain(exits, notes, silent=self._nodes.nnodes - len(reports))
            self._leave(board)
        return RunResult(state=WorkerState.FAILED)

    def _lose_store(self) -> RunResult:
        self._remaining_restarts = 0
        reason = explain(self._exits.values())
        self.failure = f"lost the rendezvous store, its agent is gone{': ' if reason else ''}{reason}"
        return RunResult(state=WorkerState.FAILED)

    def _leave(self, board: Board) -> None:
        """Closes the rendezvous to late agents, then waits so that the host of the store leaves last."""
        self._worker_group.spec.rdzv_handler.shutdown()
        board.farewell(FAREWELL_S)

    def _exit_barrier(self) -> None:
        """After success everywhere."""
        assert self._board is not None
        with contextlib.suppress(RuntimeError):
            self._leave(self._board)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown(timeout=FAILED_STOP_S)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = STOP_S, **_: Any
    ) -> None:
        """Ends the workers and the copying of their output; tells other agents if a signal is the reason."""
        cause = sys.exception()
        if self._board is not None and isinstance(cause, SignalException):
            with contextlib.suppress(RuntimeError):
                self._board.post(
                    "failure", {"note": f"the agent of node {self._node} was stopped by {cause.sigval.name}"}
                )
        try:
            stop_workers(self._workers, death_sig, timeout)
        finally:  # also when a second signal cuts the wait short: a running tail would block our own exit
            for tail in self._tails:
                tail.stop()
            self._tails = []


def launch(job: Job, nodes: Nodes) -> tuple[int, str]:
    """Runs the job's share of this node to its end.

    Returns (0, run directory), (1, the cause of the failure) or (128 + signal, what stopped it). Raises
    LaunchError for nodes that cannot run the job; then no worker has been started.
    """
    _quiet(job.config.log.level)
    for number in _SIGNALS:
        signal.signal(number, _raise_signal)
    try:
        return _run(job, nodes)
    except SignalException as stop:
        return 128 + stop.sigval.value, f"stopped by {stop.sigval.name}"
    except RendezvousError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return 1, f"no rendezvous at {nodes.rdzv_endpoint}: {reason}"
    except DistError:
        return 1, f"lost the rendezvous store at {nodes.rdzv_endpoint}, its agent is gone"


def _run(job: Job, nodes: Nodes) -> tuple[int, str]:
    host, _, port = nodes.rdzv_endpoint.rpartition(":")
    static = nodes.rdzv_backend == "static"
    spec = WorkerSpec(
        role=DEFAULT_ROLE,
        local_world_size=block_size(job.config.parallel.world_size, nodes.nnodes, nodes.nproc_per_node),
        rdzv_handler=_rendezvous_handler(nodes),
        entrypoint=job.worker_module,
        max_restarts=nodes.max_restarts,
        monitor_interval=nodes.monitor_interval,
        master_addr=host if static else None,
        master_port=int(port) if static else None,
    )
    agent = MeshAgent(spec, job, nodes)
    result = cast("RunResult | None", agent.run())
    if result is None:
        return 1, "the rendezvous was closed by another agent"
    if result.is_failed():
        return 1, f"{agent.failure}; logs in {agent.log_dir}"
    return _check_summary(job, agent)


def _check_summary(job: Job, agent: MeshAgent) -> tuple[int, str]:
    """Success, unless every worker has exited with 0 without one having finished the run."""
    ranks = {worker.global_rank for worker in agent.get_worker_group().workers}
    if job.plan.reporter in ranks and not (agent.run_dir / "summary.json").exists():
        return 1, describe(Exit(job.plan.reporter, 0))
    return 0, str(agent.run_dir)


def _rendezvous_handler(nodes: Nodes) -> RendezvousHandler:
    parameters = RendezvousParameters(
        nodes.rdzv_backend,
        nodes.rdzv_endpoint,
        nodes.rdzv_id,
        nodes.nnodes,
        nodes.nnodes,
        nodes.local_addr,
        **({"rank": nodes.node_rank or 0} if nodes.rdzv_backend == "static" else {}),
        **nodes.rdzv_conf,
    )
    try:
        return rendezvous_registry.get_rendezvous_handler(parameters)
    except (ValueError, ImportError) as error:
        raise LaunchError(
            f"--rdzv-backend {nodes.rdzv_backend} at {nodes.rdzv_endpoint!r}: {' '.join(str(error).split())}"
        ) from None


def _rendezvous_of(group: WorkerGroup, attempt: int) -> Rendezvous:
    """What the workers are told of the rendezvous."""
    handler = group.spec.rdzv_handler
    return Rendezvous(
        master_addr=str(group.master_addr),
        master_port=int(group.master_port or 0),
        agent_store=handler.use_agent_store,
        run_id=handler.get_run_id(),
        group_rank=int(group.group_rank or 0),
        group_size=int(group.group_world_size or 1),
        local_size=group.spec.local_world_size,
        attempt=attempt,
        max_restarts=group.spec.max_restarts,
    )


def _quiet(level: str) -> None:
    """Keeps torch's own running commentary off the terminal, except for `log.level: debug`."""
    if level != "debug":
        logger = logging.getLogger("torch.distributed")
        logger.handlers = [logging.NullHandler()]
        logger.propagate = False


def _raise_signal(number: int, frame: FrameType | None) -> None:
    received = signal.Signals(number)
    raise SignalException(f"received {received.name}", received)
