"""Which rows a rank finishes and where shares lie, for the exchange through the memory of peers."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ntp import peer_exchange, peer_memory
from ntp.peer_exchange import PeerExchange, _chunk
from ntp.peer_memory import PeerMemory


class _Group:
    def __init__(self, size):
        self.size = size


def parts_of(tokens, size):
    exchange = object.__new__(PeerExchange)  # its constructor needs a GPU
    exchange._group = _Group(size)
    return exchange.parts(tokens)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("tokens", [1, 127, 1024, 2048, 3000, 4096, 8192, 32768])
def test_every_row_has_one_owner_and_shares_never_overlap(tokens, size):
    rows, places = [], []
    for part in parts_of(tokens, size):
        chunks = [_chunk(part, owner, size) for owner in range(size)]
        room = chunks[0][1]
        for chunk, same in chunks:
            assert same == room >= chunk.stop - chunk.start
            rows += range(chunk.start, chunk.stop)
        places += range(part.start, part.start + size * room)
    assert rows == list(range(tokens))
    assert len(set(places)) == len(places)
    assert max(places) < tokens + 128 * size


@pytest.fixture
def calls(monkeypatch):
    """What the driver is asked to do."""
    calls = []
    driver = SimpleNamespace(
        cuIpcCloseMemHandle=lambda base: calls.append(f"close {base}") or 0,
        cuStreamWriteValue32_v2=lambda *_: calls.append("set") or 0,
        cuCtxSetCurrent=lambda _: 0,
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(peer_memory, "_driver", lambda: driver)
    monkeypatch.setattr(peer_memory, "_releasing_stream", lambda: 0)
    monkeypatch.setattr(peer_memory, "_retired", [])
    return calls


@pytest.fixture
def memory(calls):
    memory = object.__new__(PeerMemory)
    memory.rank, memory.others, memory._bases = 1, (2, 0), [10, 11, 12]
    memory._device, memory._words, memory._context = torch.device("cpu"), 2, 0
    memory._closed, memory._releasing = threading.Event(), threading.Lock()
    return memory


def test_memory_is_given_up_once_the_device_is_done_and_sets_no_signal(calls, memory):
    """A set signal would end the waits that are still under way, before what they wait for has come."""
    memory.close()
    memory.close()  # as where a peer has died while its memory was being replaced
    assert calls == ["wait", "wait", "close 12", "close 10"]
    assert peer_memory._retired == [11]


def test_what_ends_waits_writes_no_more_once_the_memory_is_closed(calls, memory, monkeypatch):
    """It may belong to somebody else by then."""
    monkeypatch.setattr(peer_memory, "_RELEASE_EVERY_S", 0.0)
    for _ in range(100):
        memory._closed.clear()
        memory.release()
        while "set" not in calls:
            time.sleep(0)
        memory.close()
        calls.clear()
        time.sleep(0.001)
        assert calls == []


def test_growing_closes_the_old_memory_and_tells_those_who_hold_addresses(monkeypatch):
    closed = []

    class Units:
        def __init__(self, group, capacity, device):
            self.capacity, self.memory = capacity, SimpleNamespace(close=lambda: closed.append(capacity))

        def gather(self, local, total_units, first_unit, region):
            return region

    monkeypatch.setattr(peer_exchange, "_Units", Units)
    exchange = object.__new__(PeerExchange)
    exchange._group, exchange._units, exchange._check, exchange.places = None, None, lambda: None, 0
    assert exchange.gather(torch.zeros(2, 8), 4, 0, slice(0, 8)) == 0
    assert exchange.gather(torch.zeros(2, 8), 4, 0, slice(8, 16)) == 1
    assert exchange.gather(torch.zeros(2, 3), 4, 0) == 2
    assert (exchange.places, closed) == (1, [])
    exchange.gather(torch.zeros(2, 8), 5, 0, slice(0, 8))
    assert (exchange.places, closed) == (2, [32])
