"""Rendezvous over etcd, where a server and torch's client for it (python-etcd) are installed."""

import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_launcher_agent import free_port, two_agents, wait

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None or importlib.util.find_spec("etcd") is None,
    reason="no etcd server or no python-etcd",
)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    options = {
        "data-dir": tmp_path / "etcd",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    with subprocess.Popen(["etcd", "--enable-v2", *words], stderr=subprocess.DEVNULL) as server:
        wait(lambda: is_healthy(client), seconds=30)
        yield client.removeprefix("http://")
        server.terminate()


def is_healthy(client: str) -> bool:
    try:
        with urllib.request.urlopen(f"{client}/health") as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_two_agents_meet_over_etcd(tmp_path: Path, endpoint: str, backend: str) -> None:
    where = ("--rdzv-backend", backend, "--rdzv-endpoint", endpoint)
    path = os.pathsep.join(sys.path)
    ends = two_agents(tmp_path / "run", *((*where, "--node-rank", node) for node in "01"), PYTHONPATH=path)
    assert [code for code, _, _ in ends] == [0, 0]
