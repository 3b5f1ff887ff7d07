"""The agent of one node, on torch.distributed.elastic: rendezvous, start, watch, stop.

It differs from torch's LocalElasticAgent in four ways. Ranks are those of the base mesh and only live ones
are started. The death of a worker ends no other worker. What is to be done is decided in one place for all
nodes: `coordinator`, which the agent of node 0 runs (`leader`). And agents and workers talk through a control
store of their own, so that the rendezvous may go once everybody has met.
"""

import contextlib
import logging
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
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
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from ntp.errors import NtpError
from ntp.run_directory import is_run
from ntp_launcher import control_store
from ntp_launcher.board import Board
from ntp_launcher.control_store import Address
from ntp_launcher.environment import Rendezvous
from ntp_launcher.events import End
from ntp_launcher.failure import failure_report
from ntp_launcher.flags import LaunchError, Nodes, NothingToDoError
from ntp_launcher.job import Job, describe_job, make_run_dir, proposed_run_dir
from ntp_launcher.late import EndedError, LateRendezvous, running_job
from ntp_launcher.mail import Post
from ntp_launcher.node import LeaderLostError, Node
from ntp_launcher.outcome import ExitCode
from ntp_launcher.output import complain
from ntp_launcher.placement import block_size, local_ranks, node_ranks
from ntp_launcher.resumption import take_over
from ntp_launcher.run_lock import locked
from ntp_launcher.signals import ending_signals, held

FAREWELL_S = 5.0  # for other agents to read the end of the job
STOP_S = 10.0  # from a signal to the launcher until its workers get SIGKILL
FAILED_STOP_S = 3.0  # the same after a failure, when there is nothing left to finish
LOOK_S = 0.05  # between looks at the workers, unless --monitor-interval is shorter


class MeshAgent(SimpleElasticAgent):
    """Runs this node's block of the base mesh. After `run`, `end` says how the job ended.

    Attributes:
        was_fenced: this node could not reach the store for too long and has killed its workers.
    """

    def __init__(self, spec: WorkerSpec, job: Job, nodes: Nodes) -> None:
        super().__init__(spec, exit_barrier_timeout=FAREWELL_S)
        self._shutdown_timeout = STOP_S  # torch 2.11 takes it as no argument
        self.end = End(ExitCode.FAILED, "the rendezvous was closed by another agent")
        self.run_dir = Path()
        self.was_fenced = False
        self._job, self._nodes = job, nodes
        self._post = Post(0, 0)
        self._attempt = -1  # how often all workers have been restarted; none has been started yet
        self._leader_rank, self._leader_host = 0, ""
        self._board: Board | None = None
        self._server: Store | None = None
        self._node: Node | None = None
        self._locked = contextlib.ExitStack()  # the lock of the run directory, from a start to its stop

    @property
    def log_dir(self) -> Path:
        """Where the output of every rank of this attempt goes, in a directory of its own."""
        logs = Path(self._nodes.log_dir).absolute() if self._nodes.log_dir else self.run_dir / "logs"
        return logs / f"attempt{self._attempt}" if self._attempt > 0 else logs

    def _assign_worker_ranks(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """This node's live ranks, once the agents agree on the job, the blocks and the run directory.

        A late agent has none yet: the leader will tell it what to start.
        """
        self._attempt += 1
        handler = spec.rdzv_handler
        if isinstance(handler, LateRendezvous):
            assert handler.place is not None
            place = handler.place
            self._post, self._attempt = Post(place.node, place.session), place.attempt
            self.run_dir = Path(place.run_dir)
            return []
        job = self._job
        self._board = Board(store, group_rank, group_world_size)
        claim = {
            "node": self._nodes.node_rank,
            "job": job.fingerprint(),
            "run_dir": proposed_run_dir(job),
            "host": self._nodes.local_addr or socket.getfqdn(),
        }
        claims = self._board.exchange("claim", claim)
        try:
            places = self._take_block(claims, group_rank)
        except (NtpError, OSError) as error:
            code = getattr(error, "exit_code", LaunchError.exit_code)
            said = f"node {self._post.node} refused the job: {error}" if code else str(error)
            self._board.post("control", {"refused": said, "code": code})
            self._leave(self._board)
            raise
        world = job.config.parallel.world_size
        return [Worker(local, rank, rank, world, world) for rank, local in places.items()]

    def _take_block(self, claims: list[dict[str, Any]], group_rank: int) -> dict[int, int]:
        """Rank -> local rank of this node's workers. Raises LaunchError when the agents cannot agree."""
        job, nodes = self._job, self._nodes
        self._post = Post(group_rank, 0)
        blocks = node_ranks([other["node"] for other in claims])
        self._post = Post(blocks[group_rank], 0)
        for other, block in zip(claims, blocks, strict=True):
            if other["job"] != claims[group_rank]["job"]:
                raise LaunchError(
                    f"node {block} was given another config or other failed ranks than this one"
                )
        leader = claims[blocks.index(0)]
        self._leader_rank, self._leader_host = blocks.index(0), leader["host"]
        self.run_dir = make_run_dir(job.run_dir or leader["run_dir"])
        if self._post.node == 0:
            self._take_run_dir()
        size = block_size(job.config.parallel.world_size, nodes.nnodes, nodes.nproc_per_node)
        return local_ranks(self._post.node, size, job.plan.world)

    def _take_run_dir(self) -> None:
        """Makes the run directory this job's alone. Raises NtpError where the job cannot have it, or go on.

        What describes a run that is gone on with stays until its state has been loaded.
        """
        self._locked.enter_context(locked(self.run_dir))
        if self._attempt == 0:
            for line in take_over(self._job, self.run_dir):
                complain("ntp-launch", line)
        if self._job.resume is None or not is_run(self.run_dir):
            describe_job(self._job, self.run_dir)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = worker_group.spec.rdzv_handler
        address = handler.address if isinstance(handler, LateRendezvous) else self._meet()
        rendezvous = _rendezvous_of(worker_group, address, self._attempt)
        with held():
            self._node = Node(
                self._job, self._nodes, self.run_dir, self._post, address, rendezvous, self.log_dir
            )
        self._node.start([worker.global_rank for worker in worker_group.workers])
        pids = self._node.crew.pids
        return {i: pids.get(worker.global_rank) for i, worker in enumerate(worker_group.workers)}

    def _meet(self) -> Address:
        """Where the job's control store is; the leader starts it, unless there is one outside."""
        assert self._board is not None
        endpoint, job_id = self._nodes.control_endpoint, self._nodes.rdzv_id
        message: dict[str, Any] = {}
        if self._post.node == 0:
            run_id = f"{job_id}-{time.time_ns():x}" if endpoint else f"{job_id}.{self._attempt}"
            if endpoint:
                address = Address(*control_store.split(endpoint), run_id)
            else:
                server = control_store.serve(self._leader_host)
                self._server, address = server, Address(self._leader_host, server.port, run_id)
            self._publish(address)
            message = {"address": address.to_json()}
        messages = self._board.exchange("control", message)
        for other in messages:
            if "refused" in other:
                self._leave(self._board)
                raise LaunchError(other["refused"]) if other["code"] else NothingToDoError(other["refused"])
        return Address.from_json(messages[self._leader_rank]["address"])

    def _publish(self, address: Address) -> None:
        """Tells late agents where the job is."""
        where = _notice_board(self._nodes)
        if where is not None:
            with contextlib.suppress(DistError):
                control_store.publish(where, self._nodes.rdzv_id, address)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Looks until the job has ended: torch's own loop would ask the rendezvous, which may be gone."""
        assert self._node is not None
        pause = min(LOOK_S, worker_group.spec.monitor_interval)
        try:
            while (end := self._node.look()) is None:
                if self._node.is_fenced:
                    return self._lose(
                        "gave no sign of life for too long, and the job goes on without this node"
                    )
                time.sleep(pause)
        except LeaderLostError:
            return self._lose("the agent of node 0, which leads, is gone")
        except RuntimeError:
            return self._lose("lost the control store, its host is gone")
        self.end = end
        if end.code != ExitCode.DONE:
            if end.code >= 128:  # somebody wants the job to end
                self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={worker.global_rank: None for worker in worker_group.workers},
        )

    def _lose(self, reason: str) -> RunResult:
        assert self._node is not None
        self.was_fenced = self._node.is_fenced
        self._node.accept()
        self.end = End(ExitCode.LOST_STORE, reason)
        self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED)

    def _leave(self, board: Board) -> None:
        """Closes the rendezvous to late agents, then waits so that the host of the store leaves last."""
        with contextlib.suppress(RuntimeError):
            self._worker_group.spec.rdzv_handler.shutdown()
            board.farewell(FAREWELL_S)

    def _exit_barrier(self) -> None:
        """After success everywhere; `_shutdown` follows."""

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown(timeout=FAILED_STOP_S)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = STOP_S, **_: Any
    ) -> None:
        """Ends the workers; tells the other agents if a signal is the reason, and lets them go first.

        Workers never get SIGINT: Python answers with a traceback until they have begun.
        """
        if death_sig == signal.SIGINT:
            death_sig = signal.SIGTERM
        with held(), self._locked:
            node, self._node = self._node, None
            if node is None:
                return
            cause = sys.exception()
            try:
                if isinstance(cause, SignalException):
                    name, number = cause.sigval.name, cause.sigval.value
                    node.resign(death_sig, timeout, f"its agent was stopped by {name}", 128 + number)
                else:
                    node.crew.stop(death_sig, timeout)
            finally:
                node.leave(FAREWELL_S)


def launch(job: Job, nodes: Nodes) -> tuple[int, str]:
    """Runs the job's share of this node to its end.

    Returns an exit code (`ExitCode`, or 128 + signal) and what to tell the user: where the results are, or
    the cause of the failure.
    Raises LaunchError for nodes that cannot run the job; then no worker has been started.
    """
    _quiet(job.config.log.level)
    try:
        with ending_signals():
            return _until_it_ends(job, nodes)
    except SignalException as stop:
        return 128 + stop.sigval.value, f"stopped by {stop.sigval.name}"
    except EndedError as error:
        return error.code, str(error)
    except RendezvousConnectionError:
        return ExitCode.LOST_STORE, f"no rendezvous at {nodes.rdzv_endpoint}: the store there does not answer"
    except RendezvousError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        code = ExitCode.FAILED if isinstance(error, RendezvousClosedError) else ExitCode.LOST_STORE
        return code, f"no rendezvous at {nodes.rdzv_endpoint}: {reason}"
    except DistError:
        return ExitCode.LOST_STORE, f"lost the rendezvous store at {nodes.rdzv_endpoint}, its agent is gone"


def _until_it_ends(job: Job, nodes: Nodes) -> tuple[int, str]:
    while True:
        agent = _run(job, nodes)
        if not agent.was_fenced or _address_of_running(job, nodes) is None:
            break
    if agent.end.code == ExitCode.DONE:
        return ExitCode.DONE, f"done, results in {agent.run_dir}"
    sys.stderr.write(failure_report(agent.end, agent.log_dir))
    return agent.end.code, f"{agent.end.reason}; logs in {agent.log_dir}"


def _run(job: Job, nodes: Nodes) -> MeshAgent:
    """Begins the job with the other nodes, or goes into it where it is running already; to its end."""
    address = _address_of_running(job, nodes)
    if address is None:
        handler, restarts = _rendezvous_handler(job, nodes), nodes.max_restarts
    else:
        handler, restarts = LateRendezvous(address, job, nodes), 0
    host, _, port = nodes.rdzv_endpoint.rpartition(":")
    static = nodes.rdzv_backend == "static" and address is None
    spec = WorkerSpec(
        role=DEFAULT_ROLE,
        local_world_size=block_size(job.config.parallel.world_size, nodes.nnodes, nodes.nproc_per_node),
        rdzv_handler=handler,
        entrypoint=job.worker_module,
        max_restarts=restarts,
        monitor_interval=min(LOOK_S, nodes.monitor_interval),
        master_addr=host if static else None,
        master_port=int(port) if static else None,
    )
    agent = MeshAgent(spec, job, nodes)
    try:
        agent.run()
    finally:  # its thread must not see the end of the process
        handler.shutdown()
    return agent


def _address_of_running(job: Job, nodes: Nodes) -> Address | None:
    where = _notice_board(nodes)
    return None if where is None else running_job(where, nodes, job.config.elastic)


def _notice_board(nodes: Nodes) -> str | None:
    """The c10d store on which a running job tells late agents where it is; None where there are none."""
    if nodes.control_endpoint is not None:
        return nodes.control_endpoint
    return nodes.rdzv_endpoint if nodes.nnodes > 1 and nodes.rdzv_backend in ("c10d", "static") else None


def _rendezvous_handler(job: Job, nodes: Nodes) -> RendezvousHandler:
    settings: dict[str, Any] = dict(nodes.rdzv_conf)
    if nodes.rdzv_backend == "static":
        settings["rank"] = nodes.node_rank or 0
    if nodes.rdzv_backend == "c10d":
        patience = str(int(job.config.elastic.agent_timeout_s))
        settings.setdefault("join_timeout", patience)
        if nodes.is_on_one_host and nodes.node_rank is not None:
            # else whoever comes first has the store, and takes it along: late agents would find no job
            settings.setdefault("is_host", str(nodes.node_rank == 0))
            settings.setdefault("read_timeout", patience)
    parameters = RendezvousParameters(
        nodes.rdzv_backend,
        nodes.rdzv_endpoint,
        nodes.rdzv_id,
        nodes.nnodes,
        nodes.nnodes,
        nodes.local_addr,
        **settings,
    )
    try:
        return rendezvous_registry.get_rendezvous_handler(parameters)
    except (ValueError, ImportError) as error:
        raise LaunchError(
            f"--rdzv-backend {nodes.rdzv_backend} at {nodes.rdzv_endpoint!r}: {' '.join(str(error).split())}"
        ) from None


def _rendezvous_of(group: WorkerGroup, address: Address, attempt: int) -> Rendezvous:
    """What the workers are told of the rendezvous: the control store takes its place."""
    return Rendezvous(
        master_addr=address.host,
        master_port=address.port,
        agent_store=True,
        run_id=address.run_id,
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
