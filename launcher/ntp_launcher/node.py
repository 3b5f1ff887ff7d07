"""One node of a running job: its workers, its lease, its letters, and the leader where it is here.

`look` is one turn of the agent's loop. A lost control store shows as RuntimeError, a lost leader as
LeaderLostError.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from ntp.device import wants_gpu
from ntp.plan import make_plan
from ntp.protocol import GENERATION, Generation
from ntp_launcher.control_store import Address, connect
from ntp_launcher.crew import Crew, Recipe, probe_command
from ntp_launcher.environment import Rendezvous, worker_environment
from ntp_launcher.events import AgentLost, End, Start
from ntp_launcher.flags import Nodes
from ntp_launcher.job import Job
from ntp_launcher.leader import Leader
from ntp_launcher.lease import PATIENCE, Lease
from ntp_launcher.listeners import audience_of
from ntp_launcher.mail import END, Inbox, Outbox, Post, dropped_key, lease_key, left_key, peek, read_json
from ntp_launcher.placement import block_size
from ntp_launcher.signals import held

_LOOK_S = 0.5  # between looks at what changes rarely: the reporter, the leader
_LEADER_PATIENCE = 2 * PATIENCE  # leases


class LeaderLostError(Exception):
    """The agent of node 0 gives no sign of life."""


class Node:
    """This node from before the start of its workers to the end of the job.

    Args:
        post: which node, and which of its agents.
        log_dir: the output of every rank goes to a directory of its own there.
    """

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        run_dir: Path,
        post: Post,
        address: Address,
        rendezvous: Rendezvous,
        log_dir: Path,
    ) -> None:
        self._job, self._nodes, self._run_dir, self._post = job, nodes, run_dir, post
        self._rendezvous = rendezvous
        self._size = block_size(job.config.parallel.world_size, nodes.nnodes, nodes.nproc_per_node)
        self._store: Store = connect(address)
        self._inbox, self._outbox = Inbox(self._store, "order", post), Outbox(self._store, "event", post)
        self._reporter, self._looked_at = job.plan.reporter, time.monotonic()
        self._leader_lease, self._leader_seen = "", time.monotonic()
        self._is_dropped = False
        self._leader: Leader | None = None
        self.crew = Crew(self._recipe(log_dir))
        seconds = job.config.elastic.lease_s if nodes.nnodes > 1 else math.inf
        self._lease = Lease(connect(address), lease_key(post), seconds, self.crew.pulse, self.crew.fence)

    def start(self, ranks: Sequence[int]) -> None:
        """Leads the job where that is this node's part, and starts workers; a late agent is told which later.

        Where a signal cuts it short, `resign` and `leave` end what has begun.
        """
        if self._post == Post(0, 0):
            with held():
                self._leader = self._lead()
        for rank in ranks:
            self.crew.obey(Start(rank, 0))

    @property
    def is_fenced(self) -> bool:
        """The job goes on without this node, and the workers have been killed."""
        return self._lease.is_lost or self._is_dropped

    def accept(self) -> None:
        """This node knows that the job goes on, or ends, without it: its lease need not say so."""
        self._lease.close()

    def look(self) -> End | None:
        """Tells what has happened here, does what is ordered; the end of the job when it has come."""
        for news in self.crew.news():
            self._outbox.send(news)
        if self._leader is not None:
            self._leader.poll()
        for order in self._inbox.take():
            self.crew.obey(order)
        end = read_json(self._store, END)
        if end is not None:
            self._store.set(left_key(self._post), "")
            return End(**end)
        if time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            self._show_reporter()
            self._look_for_leader()
            if self._store.check([dropped_key(self._post)]):
                self.crew.fence()
                self._is_dropped = True
        return None

    def resign(self, signal_number: int, grace_s: float, reason: str, code: int) -> None:
        """Stops the workers and leaves the job: it goes on elsewhere, or ends where the leader is here."""
        if self._leader is not None:
            with contextlib.suppress(RuntimeError):
                self._leader.end(code, f"node {self._post.node}: {reason}")
                self._store.set(left_key(self._post), "")
        self.crew.stop(signal_number, grace_s)
        if self._leader is None:
            with contextlib.suppress(RuntimeError):
                self._outbox.send(AgentLost(self._post.node, self._post.session, reason))

    def leave(self, timeout_s: float) -> None:
        """After the end: the leader leaves last, in case that the store is in its process."""
        self._lease.close()
        if self._leader is not None:
            with contextlib.suppress(RuntimeError):
                self._leader.farewell(timeout_s)

    def _lead(self) -> Leader:
        world = self._job.config.parallel.world_size
        homes = {rank: rank // self._size for rank in range(world)}
        resumes = bool(self._environ(self._job.plan.reporter, 0)["NTP_RESUME"])
        return Leader(
            self._job,
            self._run_dir,
            self._store,
            self._post.node,
            homes,
            resumes,
            self._rendezvous.attempt,
            audience_of(self._job, self._run_dir),
        )

    def _recipe(self, log_dir: Path) -> Recipe:
        elastic = self._job.config.elastic
        probe = elastic.probe
        if probe == "auto":
            probe = probe_command(wants_gpu(self._job.config))
        return Recipe(
            module=self._job.worker_module,
            environ=self._environ,
            log_dir=log_dir,
            streams=self._streams,
            prefix=bool(self._nodes.tee),
            probe=probe or (),
            probe_timeout_s=elastic.probe_timeout_s,
        )

    def _environ(self, rank: int, incarnation: int) -> dict[str, str]:
        local = rank - self._post.node * self._size
        return worker_environment(self._job, self._run_dir, rank, local, self._rendezvous, incarnation)

    def _streams(self, rank: int) -> int:
        """What of a rank's output goes to the terminal, as `--tee` asks; else all of the reporter's."""
        tee = self._nodes.tee
        if tee is None:
            return 3 if rank == self._reporter else 0
        return tee.get(rank - self._post.node * self._size, tee.get(-1, 0))

    def _show_reporter(self) -> None:
        """Follows the reporter when it changes."""
        text = peek(self._store, GENERATION)
        if self._nodes.tee is None and text is not None:
            reporter = make_plan(self._job.config, Generation.from_json(text).failed).reporter
            if reporter != self._reporter:
                self._reporter = reporter
                self.crew.show(reporter, 3)

    def _look_for_leader(self) -> None:
        """A store outside outlives the leader: nobody would ever say that the job is over."""
        lease, now = peek(self._store, lease_key(Post(0, 0))) or "", time.monotonic()
        if lease != self._leader_lease:
            self._leader_lease, self._leader_seen = lease, now
        elif self._leader is None and now - self._leader_seen > _LEADER_PATIENCE * self._lease.seconds:
            raise LeaderLostError
