"""Grammars on rank 0: which tokens may continue the outputs of a step, by the processes of `grammar_process.py`.

Knows nothing of sequences, steps or llguidance.
"""

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels import ops
from mini_engine.messages import Grammar, GrammarReady, Problem
from mini_engine.worker.sampling import grammar_process
from mini_engine.worker.sampling.grammar_process import ManagerRequest, ManagerSpec, MaskAnswer
from mini_engine.worker.sampling.matchers import Row

CPU = torch.device("cpu")
_decoder = msgspec.msgpack.Decoder(MaskAnswer)


class Masks(NamedTuple):
    """What the rows `rows` of a step's logits may not have. A token that only the logits have is never chosen."""

    rows: list[int]
    bars: Tensor  # see `ops.mask_tokens`

    def apply(self, logits: Tensor) -> Tensor:
        """`[n, vocab_size]`, changed in place, or a float32 copy, changed. Does not wait for the device."""
        scores = logits.float()
        ops.mask_tokens(scores, self.rows, self.bars)
        return scores


class Grammars:
    """Has grammars compiled and followed. All methods but `close` are called by one thread at a time.

    Args:
        tokenizer: the model's tokenizer.json.
        max_rows: at most in a step; and grammars of a client at once; of all clients four times as many.
        name: this rank's, for the title of the process.
        report: called in a thread of its own, once for each grammar of `update`.
    """

    def __init__(self, tokenizer: Path, max_rows: int, name: str, report: Callable[[GrammarReady], None]) -> None:
        """Start the manager, which loads the tokenizer meanwhile. Raises OSError."""
        self._max_rows, self._report = max_rows, report
        self._memory = os.memfd_create("mini-engine")
        self._masks: mmap.mmap | None = None
        self._step, self._rows = 0, dict[int, Row]()
        (requests, self._requests), (self._reports, reports) = Pipe(duplex=False), Pipe(duplex=False)
        self._answers, answers = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._answers.settimeout(grammar_process.STALLED_SECONDS)
        self._answer = memoryview(bytearray(grammar_process.ANSWER_BYTES))
        descriptors = (requests.fileno(), reports.fileno(), answers.fileno(), self._memory)
        spec = ManagerSpec(os.getpid(), f"mini-engine: grammars of {name}", str(tokenizer), max_rows, *descriptors)
        with requests, reports, answers:
            self.manager = subprocess.Popen(
                [sys.executable, "-m", grammar_process.__name__, msgspec.json.encode(spec).decode()],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        self._thread = threading.Thread(target=self._forward, name="grammar reports", daemon=True)
        self._thread.start()

    def update(
        self, grammars: Sequence[Grammar], unused: Sequence[bytes], finished: Sequence[tuple[bytes, str]] = ()
    ) -> None:
        """Have these grammars compiled; forget the `unused` digests, and outputs that are `finished`, by the digests of
        their grammars, if any, and their names. Raises RuntimeError: the manager exited."""
        if not self._thread.is_alive():
            raise RuntimeError("the grammar manager exited")
        followed = [output for output in finished if output[0]]
        if grammars or unused or followed:
            self._send(ManagerRequest([*grammars], [*unused], followed))

    def request_masks(self, rows: Mapping[int, Row], seconds: float = 0.0) -> None:
        """Have the masks of a step's `rows` filled while the model takes `seconds` for it. `receive_masks` must follow.
        Raises RuntimeError: the manager exited."""
        self._step, self._rows = self._step + 1, {**rows}
        if rows:
            self._send(ManagerRequest(step=self._step, rows=[*rows.values()], seconds=seconds))

    def receive_masks(self, device: torch.device = CPU) -> tuple[Masks | None, dict[int, Problem]]:
        """The masks for the model on `device`; and for each row that has none why its output can be followed no
        further. Waits for them, mostly less than 0.1 s. Raises RuntimeError: the manager exited."""
        if not self._rows:
            return None, {}
        problems: dict[int, Problem | None] = {}  # by the index of the mask
        while len(problems) < len(self._rows):
            try:
                size = self._answers.recv_into(self._answer)
            except TimeoutError:
                rows = enumerate(self._rows.values())
                stalled = {row.digest for index, row in rows if index not in problems}
                self._send(ManagerRequest(stalled=[*stalled]))
                continue
            if not size:
                raise RuntimeError("the grammar manager exited")
            answer = _decoder.decode(self._answer[:size])
            if answer.step == self._step:
                problems |= dict.fromkeys(answer.masks, answer.problem)
        if self._masks is None:  # the manager gave it its size before it compiled the first grammar
            self._masks = mmap.mmap(self._memory, 0)
        filled = [index for index in range(len(problems)) if not problems[index]]
        bars = bars_of(self._masks, self._max_rows, filled, packed=ops.triton_obstacle(device) is None)
        by_row = {row: problems[index] for index, row in enumerate(self._rows)}
        masks = Masks([row for row, problem in by_row.items() if not problem], bars)
        return masks, {row: problem for row, problem in by_row.items() if problem}

    def close(self) -> None:
        """Kill all processes, wait for the manager, and close the descriptors."""
        self.manager.kill()
        self.manager.wait()
        self._thread.join()
        self._requests.close()
        self._reports.close()
        self._answers.close()
        os.close(self._memory)
        self._masks = None  # the mapping holds a descriptor

    def _send(self, request: ManagerRequest) -> None:
        try:
            self._requests.send_bytes(msgspec.msgpack.encode(request))
        except ConnectionError as error:
            raise RuntimeError("the grammar manager exited") from error

    def _forward(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._report(msgspec.msgpack.decode(self._reports.recv_bytes(), type=GrammarReady))


def bars_of(masks: memoryview | mmap.mmap, num_masks: int, indices: Sequence[int], packed: bool = False) -> Tensor:
    """`Masks.bars` of some of the masks that `matchers.py` has filled; `packed` for logits that are `ops.fused`."""
    bars = ~np.frombuffer(masks, np.int32).reshape(num_masks, -1)[indices]
    return torch.from_numpy(bars if packed else np.unpackbits(bars.view(np.uint8), axis=1, bitorder="little"))
