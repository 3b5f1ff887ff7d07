"""Which rows a rank finishes and where shares lie, for the exchange through the memory of peers."""

import pytest

from ntp.peer_exchange import PeerExchange, _chunk


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
