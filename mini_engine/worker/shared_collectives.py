"""Collectives of the ranks of one engine on one host: memory that all of them map, and a socket between each two.

Each rank writes its part into its area, notifies the others with one byte, waits for theirs, and reads all areas. Two
sets of areas alternate: a rank that has all bytes of one exchange knows that the others completed the previous one.
All ranks add the same numbers in the same order, so their sums are bitwise equal.

A collective costs a copy into the area, a read of all areas, and one wake-up of each rank. Gloo uses TCP and a separate
thread, with several wake-ups each; on a busy machine that takes tens of times as long.

Waiting ranks sleep in `recv`. A rank that exits closes its sockets, which the others detect at once.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.model.parallel import Collectives
from mini_engine.transport import shared_memory as memory
from mini_engine.transport.codec import TransportError
from mini_engine.transport.stream_frames import connect_stream

PIECE_BYTES = 1 << 20  # larger tensors go in pieces; a piece stays in a core's cache between writing and reading
_SETS = 2
_READY = b"r"


class RankLost(RuntimeError):
    """Another rank did not join a collective; the text says which."""


class RankEnded(RankLost):
    """It exited, or is about to."""


class SharedMemoryCollectives(Collectives):
    """One rank's end. `links` are connected stream sockets, one to each other rank; `fd` is memory that all ranks have,
    two areas of PIECE_BYTES for each. Takes both over. Tensors are on the CPU.

    Each method raises RankLost: another rank exited (RankEnded), or did not respond within `timeout` seconds.
    """

    def __init__(self, rank: int, links: dict[int, socket.socket], fd: int, timeout: float):
        self._rank, self._timeout = rank, timeout
        self._links = links
        seconds = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        for link in self._links.values():
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        mapping = memory.map_sparse(fd)
        memory.populate_for_writing(mapping, 0, len(mapping))
        os.close(fd)
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8).view(_SETS, len(links) + 1, PIECE_BYTES)
        self._sets: dict[torch.dtype, tuple[Tensor, ...]] = {}  # views of it
        self._turn = 0

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Collectives`. Sums of more than two halves are taken in float32."""
        for piece in _pieces(tensor):
            parts = self._exchange(piece)
            if len(parts) == 2:
                torch.add(parts[0], parts[1], out=piece)
            else:
                torch.sum(parts, 0, out=piece)

    def all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        self.gather(gathered, tensor)

    def gather(self, gathered: Tensor | None, tensor: Tensor) -> None:
        begin = 0
        for piece in _pieces(tensor):
            parts, end = self._exchange(piece), begin + piece.numel()
            if gathered is not None:
                gathered.view(len(gathered), -1)[:, begin:end] = parts
            begin = end

    def broadcast(self, tensor: Tensor) -> None:
        for piece in _pieces(tensor):
            piece.copy_(self._exchange(piece)[0])

    def close(self) -> None:
        """Disconnect: the other ranks' collectives raise from now on."""
        for link in self._links.values():
            link.close()

    def _exchange(self, piece: Tensor) -> Tensor:
        """All ranks' pieces, `[size, numel]`: views of the areas, to be read before the next exchange but one."""
        if piece.dtype not in self._sets:
            self._sets[piece.dtype] = self._memory.view(piece.dtype).unbind()
        areas = self._sets[piece.dtype][self._turn][:, : piece.numel()]
        self._turn = (self._turn + 1) % _SETS
        areas[self._rank] = piece
        for other, link in self._links.items():
            try:
                link.send(_READY)
            except ConnectionError:
                raise RankEnded(f"rank {other} exited") from None
        for other, link in self._links.items():
            _receive_ready(other, link, self._timeout)
        return areas


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in order, as views that fit an area."""
    yield from tensor.view(-1).split(PIECE_BYTES // tensor.element_size())


def _receive_ready(rank: int, link: socket.socket, timeout: float, descriptors: int = 0) -> list[int]:
    """Wait for the byte of rank `rank`, and up to `descriptors` descriptors with it."""
    try:
        byte, received = socket.recv_fds(link, 1, descriptors)[:2] if descriptors else (link.recv(1), [])
    except (BlockingIOError, TimeoutError):
        raise RankLost(f"timed out waiting for rank {rank} ({timeout:g} s, --collective-timeout)") from None
    except ConnectionError:
        byte, received = b"", []
    if not byte:
        raise RankEnded(f"rank {rank} exited")
    return received


def meet(path: Path, rank: int, size: int, patience: float, timeout: float) -> SharedMemoryCollectives:
    """Connect the ranks: each listens at `path` and its own number, and connects to those before it. Rank 0 makes the
    memory and passes it to the others.

    They have `patience` seconds to connect, since starting takes a while; `timeout` is that of each collective.

    Raises:
        RankLost: not all connected in time, or one exited.
        OSError: no memory or no descriptors.
    """
    until = time.monotonic() + patience
    links: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as opened, socket.socket(socket.AF_UNIX) as listener:
        own = Path(f"{path}.{rank}")
        own.unlink(missing_ok=True)  # of a rank that was killed while it waited here
        listener.bind(str(own))
        listener.listen(size)
        for other in range(rank):
            try:
                links[other] = opened.enter_context(connect_stream(f"{path}.{other}", until))
            except TransportError:
                raise RankLost(f"timed out waiting for rank {other} ({patience:g} s)") from None
            links[other].send(bytes([rank]))
        listener.settimeout(patience)
        for _ in range(rank + 1, size):
            try:
                link, _ = listener.accept()
            except TimeoutError:
                raise RankLost(f"timed out waiting for {size - 1 - len(links)} ranks ({patience:g} s)") from None
            opened.enter_context(link)
            (other,) = link.recv(1) or [0]
            if not other:
                raise RankEnded("a rank exited")
            links[other] = link
        own.unlink()
        if rank == 0:
            fd = memory.create_sparse(_SETS * size * PIECE_BYTES, allocate=True)
            opened.callback(os.close, fd)
            for link in links.values():
                socket.send_fds(link, [_READY], [fd])
        else:
            links[0].settimeout(patience)
            (fd,) = _receive_ready(0, links[0], patience, 1)
        opened.pop_all()  # the links and the descriptor are the result's
    return SharedMemoryCollectives(rank, links, fd, timeout)
