"""Memory that the GPUs of one host can address in each other, and signals that order its use.

A signal is a word in the receiver's memory: a kernel of the sender sets it, a kernel of the receiver waits
for it and clears it. The sender may set it again only after something that the receiver did later has reached
it. Nothing is counted, so that a captured graph can be replayed. A stream's own operations on words would
take no kernel, but its waits do not promise that what peers wrote before is visible.

The handles of memory go through the group, not through torch's own rendezvous: that numbers its exchanges per
process (torch 2.11), and a process that has just joined would wait for ever.
"""

import ctypes
import struct
import threading
import uuid
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from ntp_kernels import remote
from torch import Tensor

if TYPE_CHECKING:
    from ntp.collectives import Group

_PAGE = 4096
_HANDLE_BYTES = 64
_RELEASE_EVERY_S = 0.002
_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: an address says which device it is of."""

_NO_ROOM = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""

_retired: list[int] = []
"""Own memory that is used no more. Peers may write to it until they close theirs, which all of them have done
when they give away the handles of the next."""


_allocated: dict[int, int] = {}
"""Bytes of own memory by address."""


def allocated_bytes() -> int:
    """What this process holds for its peers to address; PyTorch's figures leave it out."""
    return sum(_allocated.values())


class DeviceStream:
    """Operations of the CUDA driver in a stream; each takes the host about a microsecond."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self._handle = stream.cuda_stream

    def copy(self, target: int, source: int, count: int) -> None:
        """Copy bytes between addresses, each here or at a peer."""
        if count:
            _succeed(_driver().cuMemcpyAsync(target, source, count, self._handle))

    def copy_rows(self, target: int, source: Tensor) -> None:
        """Copy [rows, columns], whose columns are adjacent, to adjacent rows at an address."""
        rows, columns = source.shape
        assert columns == 1 or source.stride(1) == 1
        width, pitch = (count * source.element_size() for count in (columns, source.stride(0)))
        if rows == 1 or width == pitch:
            self.copy(target, source.data_ptr(), rows * width)
        elif rows * width:
            copy = _Copy2D(
                srcMemoryType=_UNIFIED, srcDevice=source.data_ptr(), srcPitch=pitch,
                dstMemoryType=_UNIFIED, dstDevice=target, dstPitch=width, WidthInBytes=width, Height=rows,
            )  # fmt: skip
            _succeed(_driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), self._handle))


class PeerMemory:
    """The same regions in the memory of every rank of a group; made by all of them at once.

    Args:
        sizes: bytes of each region.
        signals: kinds of signals.

    Attributes:
        others: the other ranks of the group, beginning with this one's neighbour, so that no two ranks
            begin with the same one.
    """

    def __init__(self, group: "Group", sizes: Sequence[int], signals: int, device: torch.device):
        self.rank, self.size = group.rank, group.size
        self.others = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self._device, self._words = device, signals * self.size
        self._offsets = [0]
        for size in (4 * self._words, *sizes):
            self._offsets.append(self._offsets[-1] + -(-size // _PAGE) * _PAGE)
        own = _allocate(self._offsets[-1], device)
        self._context = _context()
        _releasing_stream()  # none can be made while a kernel waits
        self._bases = [own] * self.size
        try:
            handle = _export(own)
            handles = group.all_gather(handle.to(device).unsqueeze(0), [1] * self.size).cpu()
            group.confirm()
            free_retired()
            for rank in self.others:
                mirrors = torch.equal(handles[rank], handle)  # see `ntp.mirror`
                self._bases[rank] = own if mirrors else _open(handles[rank])
        except RuntimeError as error:
            self._close_others()
            _retired.append(own)
            raise _lost(error) from error
        kinds = range(signals)
        theirs = [[self._theirs(rank, signal) for rank in self.others] for signal in kinds]
        mine = [[self._mine(rank, signal) for rank in self.others] for signal in kinds]
        self._raised, self._awaited = torch.tensor(theirs, device=device), torch.tensor(mine, device=device)
        self._closed = threading.Event()
        self._releasing = threading.Lock()

    def view(self, region: int, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """A region in the memory of `rank`."""
        count = torch.Size(shape).numel() * dtype.itemsize
        address = self.address(rank, region)
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, count)  # type: ignore[attr-defined]
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return empty.set_(storage, 0, tuple(shape))  # type: ignore[call-overload]

    def address(self, rank: int, region: int) -> int:
        """Where a region of `rank` begins."""
        return self._bases[rank] + self._offsets[region + 1]

    def signal(self, signal: int, place: int | None = None) -> None:
        """Tell the rank at `place` of `others`, or all, behind the work in the current stream."""
        words = self._raised[signal]
        remote.raise_words(words if place is None else words[place : place + 1])

    def await_signals(self, signal: int) -> None:
        """Hold the current stream until all others have told."""
        remote.await_words(self._awaited[signal])

    def release(self) -> None:
        """End all waiting on this rank until `close`: peers will never signal."""
        threading.Thread(target=self._release, name="release", daemon=True).start()

    def close(self) -> None:
        """Use it no more, once the device has done so. Where peers may be lost, `release` it before."""
        if self._closed.is_set():
            return
        torch.cuda.synchronize(self._device)
        with self._releasing:
            self._closed.set()
        torch.cuda.synchronize(self._device)  # of the last release: the memory may soon be another's
        self._close_others()
        _retired.append(self._bases[self.rank])

    def _close_others(self) -> None:
        own = self._bases[self.rank]
        for rank in self.others:
            if self._bases[rank] != own:
                _driver().cuIpcCloseMemHandle(self._bases[rank])  # of one that has died it may fail

    def _release(self) -> None:
        # A thread begins without a context, and PyTorch sets none where the device is the first one.
        _succeed(_driver().cuCtxSetCurrent(self._context))
        while not self._closed.wait(_RELEASE_EVERY_S):
            with self._releasing:
                if not self._closed.is_set():
                    self._set_all()

    def _set_all(self) -> None:
        for word in range(self._words):
            address = self._bases[self.rank] + 4 * word
            _succeed(_driver().cuStreamWriteValue32_v2(_releasing_stream(), address, 1, 0))

    def _theirs(self, rank: int, signal: int) -> int:
        """Address of the word by which this rank tells `rank`; a mirrored one is this rank itself."""
        if self._bases[rank] == self._bases[self.rank]:
            return self._mine(rank, signal)
        return self._bases[rank] + 4 * (signal * self.size + self.rank)

    def _mine(self, rank: int, signal: int) -> int:
        """Address of the word by which `rank` tells this one."""
        return self._bases[self.rank] + 4 * (signal * self.size + rank)


def free_retired() -> None:
    """Give up own memory that is used no more; all peers have left the generation, or closed theirs."""
    while _retired:
        address = _retired.pop()
        del _allocated[address]
        _succeed(_driver().cuMemFree_v2(address))


@cache
def _releasing_stream() -> int:
    """A stream that nothing else is in, nor in what the hardware makes of streams of other priorities.

    PyTorch's are 32, given out by turns: one might hold what waits.
    """
    stream, not_blocking, first = ctypes.c_void_p(), 1, -128  # taken for the highest priority that there is
    _succeed(_driver().cuStreamCreateWithPriority(ctypes.byref(stream), not_blocking, first))
    assert stream.value is not None
    return stream.value


def all_reach_all(group: "Group") -> bool:
    """Whether every GPU of the group can address the memory of all others; collective over it."""
    device = group.device
    visible = {_identity(index): index for index in range(torch.cuda.device_count())}
    mine = torch.tensor([_identity(device.index)], device=device)
    everyone = group.all_gather(mine, [1] * group.size).tolist()
    indices = [visible.get(tuple(identity)) for identity in everyone]
    fails = torch.tensor([not all(_reaches(device.index, index) for index in indices)], device=device).int()
    group.all_reduce(fails, "max")
    found = not fails.item()
    group.confirm()
    return found


def _identity(index: int) -> tuple[int, int]:
    """A GPU's UUID as two i64: no other GPU of any host has it."""
    first, second = struct.unpack("<qq", uuid.UUID(str(torch.cuda.get_device_properties(index).uuid)).bytes)
    return first, second


def _reaches(mine: int, theirs: int | None) -> bool:
    return theirs is not None and (theirs == mine or torch.cuda.can_device_access_peer(mine, theirs))


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def _context() -> int:
    """What the driver's calls of this thread work in."""
    context = ctypes.c_void_p()
    _succeed(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    assert context.value is not None
    return context.value


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _ends = (
        ("XInBytes", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("MemoryType", ctypes.c_uint),
        ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
        ("Pitch", ctypes.c_size_t),
    )  # fmt: skip
    _fields_ = (
        *(("src" + name, kind) for name, kind in _ends),
        *(("dst" + name, kind) for name, kind in _ends),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


def _allocate(count: int, device: torch.device) -> int:
    """Zeroed memory that can be exported."""
    address = ctypes.c_uint64()
    torch.cuda.synchronize(device)  # makes the context current
    if _driver().cuMemAlloc_v2(ctypes.byref(address), count) != 0:
        torch.cuda.empty_cache()  # PyTorch keeps what it has freed
        _succeed(_driver().cuMemAlloc_v2(ctypes.byref(address), count))
    _allocated[address.value] = count
    _succeed(_driver().cuMemsetD8_v2(address, 0, count))
    torch.cuda.synchronize(device)
    return address.value


def _export(address: int) -> Tensor:
    """The handle u8 [64] of memory."""
    handle = _IpcHandle()
    _succeed(_driver().cuIpcGetMemHandle(ctypes.byref(handle), address))
    return torch.frombuffer(bytearray(handle), dtype=torch.uint8)


def _open(handle: Tensor) -> int:
    """The address of a peer's memory."""
    address, enable_peer_access = ctypes.c_uint64(), 1
    opened = _IpcHandle.from_buffer_copy(handle.numpy().tobytes())
    _succeed(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, enable_peer_access))
    return address.value


def _lost(error: RuntimeError) -> RuntimeError:
    """What a failure means while ranks give each other their memory: one of them has gone."""
    from ntp.collectives import MembershipChangedError, PeerLostError

    return error if isinstance(error, MembershipChangedError | PeerLostError) else PeerLostError(str(error))


def _succeed(code: int) -> None:
    if code == _NO_ROOM:
        raise torch.OutOfMemoryError("the device has no room for memory that peers address")
    if code != 0:
        raise RuntimeError(f"a call of the CUDA driver failed with error {code}")


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    address, stream, word, count = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t
    driver.cuCtxGetCurrent.argtypes = [ctypes.POINTER(stream)]
    driver.cuCtxSetCurrent.argtypes = [stream]
    driver.cuMemcpyAsync.argtypes = [address, address, count, stream]
    driver.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Copy2D), stream]
    driver.cuStreamWriteValue32_v2.argtypes = [stream, address, word, ctypes.c_uint]
    driver.cuStreamCreateWithPriority.argtypes = [ctypes.POINTER(stream), ctypes.c_uint, ctypes.c_int]
    driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), count]
    driver.cuMemsetD8_v2.argtypes = [address, ctypes.c_ubyte, count]
    driver.cuMemFree_v2.argtypes = [address]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_IpcHandle), address]
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _IpcHandle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [address]
    return driver
