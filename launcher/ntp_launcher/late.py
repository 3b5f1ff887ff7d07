"""A late agent's way into a running job: it asks the leader for the place of a lost node.

To torch.distributed.elastic this is a rendezvous like others, of which the store is the job's control store
and the rank the node that was given.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ntp.elastic_config import ElasticConfig
from ntp_launcher.control_store import Address, connect, look_up
from ntp_launcher.flags import LaunchError, Nodes
from ntp_launcher.job import Job
from ntp_launcher.lease import PATIENCE
from ntp_launcher.mail import END, HELLOS, Post, lease_key, peek, read_json

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Place:
    """What the leader has given a late agent; `attempt` counts the restarts of all workers so far."""

    node: int
    session: int
    run_dir: str
    attempt: int


class EndedError(Exception):
    """The job ended while this agent waited for a place, with this exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"the job ended without this node{': ' * bool(reason)}{reason}")
        self.code = code


class LateRendezvous(RendezvousHandler):
    """Waits for a place in the job at `address`."""

    def __init__(self, address: Address, job: Job, nodes: Nodes) -> None:
        self.address = address
        self.place: Place | None = None
        self._job, self._nodes = job, nodes

    def get_backend(self) -> str:
        """A name for torch's log."""
        return "ntp-late"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store that is there."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises LaunchError when the leader refuses or has no place in time, EndedError at the job's end."""
        store = connect(self.address)
        self.place = _ask(store, self._job, self._nodes.node_rank)
        info = RendezvousStoreInfo(self.address.host, self.address.port)
        return RendezvousInfo(store, self.place.node, self._nodes.nnodes, info)

    def is_closed(self) -> bool:
        """It never is: `next_rendezvous` raises instead."""
        return False

    def set_closed(self) -> None:
        """Nothing to close: the job is not this agent's."""

    def num_nodes_waiting(self) -> int:
        """None: others ask the leader on their own."""
        return 0

    def get_run_id(self) -> str:
        """That of the running job."""
        return self.address.run_id

    def shutdown(self) -> bool:
        """True: there is nothing that would have to end."""
        return True


def running_job(endpoint: str, nodes: Nodes, limits: ElasticConfig) -> Address | None:
    """Where the job of these nodes is already running; None if it is not, and has to be begun."""
    address = look_up(endpoint, nodes.rdzv_id)
    if address is None:
        return None
    try:
        store = connect(address)
        return address if not store.check([END]) and _is_led(store, limits) else None
    except RuntimeError:
        return None


def _is_led(store: Store, limits: ElasticConfig) -> bool:
    """Whether the leader renews its lease; an old notice may have outlived its job."""
    key = lease_key(Post(0, 0))
    first = peek(store, key)
    deadline = time.monotonic() + PATIENCE * limits.lease_s
    while time.monotonic() < deadline:
        if peek(store, key) != first:
            return True
        time.sleep(_POLL_S)
    return False


def _ask(store: Store, job: Job, node: int | None) -> Place:
    number = store.add(HELLOS, 1) - 1
    store.set(f"hello/{number}", json.dumps({"node": node, "job": job.fingerprint()}))
    deadline = time.monotonic() + job.config.elastic.agent_timeout_s
    while time.monotonic() < deadline:
        answer: dict[str, Any] | None = read_json(store, f"welcome/{number}")
        if answer is not None:
            if "refused" in answer:
                raise LaunchError(answer["refused"])
            return Place(**answer)
        end = read_json(store, END)
        if end is not None:
            raise EndedError(end["code"], end["reason"])
        time.sleep(_POLL_S)
    raise LaunchError("the running job has had no place for this node")
