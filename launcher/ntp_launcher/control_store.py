"""The control store of a job: where it is, how to serve one, how to reach it.

It is a c10d TCPStore of its own, apart from the rendezvous, and outlives every worker. Each job has a prefix
in it, so that one store on a quiet host can serve many jobs, one after another or at once. A lost store shows
as RuntimeError in whoever uses it.
"""

import json
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

_REACH_S = 20.0  # a refused connection shows at once; a host under load takes its time


@dataclass(frozen=True, slots=True)
class Address:
    """Where a job's control store is. Keys begin with `ntp/<run_id>/`."""

    host: str
    port: int
    run_id: str

    def to_json(self) -> str:
        """For other agents and late ones; `from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def serve(host: str, port: int = 0) -> TCPStore:
    """A server that lives as long as the returned object. Raises RuntimeError where the port is taken."""
    return TCPStore(host, port, is_master=True, wait_for_workers=False)


def connect(address: Address, timeout_s: float = 60.0) -> Store:
    """A connection of one's own; a thread that may block needs one. Raises RuntimeError."""
    return PrefixStore(f"ntp/{address.run_id}", _client(address.host, address.port, timeout_s))


def publish(endpoint: str, job: str, address: Address) -> None:
    """Leaves the address where late agents of the job look, on the c10d store at `endpoint` (HOST:PORT)."""
    host, port = split(endpoint)
    _client(host, port, _REACH_S).set(_notice(job), address.to_json())


def look_up(endpoint: str, job: str) -> Address | None:
    """What has been published for the job at `endpoint`; None if there is no store or no such notice."""
    host, port = split(endpoint)
    if not _is_open(host, port):
        return None
    try:
        store = _client(host, port, _REACH_S)
        return Address.from_json(store.get(_notice(job))) if store.check([_notice(job)]) else None
    except DistError:
        return None


def split(endpoint: str, default_port: int = 29400) -> tuple[str, int]:
    """Host and port of HOST[:PORT]."""
    host, colon, port = endpoint.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdecimal() else (endpoint, default_port)


def _client(host: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except OSError:
        return False
    return True


def _notice(job: str) -> str:
    return f"ntp/control/{job}"
