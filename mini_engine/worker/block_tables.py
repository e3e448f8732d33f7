"""The block tables of a step as kernels read them: one row of block ids for each chunk, on the device.

Knows nothing of sequences or of attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_engine.worker.paged_attention import Span
from mini_engine.worker.staging import to_device

# Columns come in such numbers, so that a kernel which is compiled for an even stride is not compiled again.
COLUMNS = 16


class BlockTables:
    """`tables`: int32 `[chunks, columns]`, what lies past a chunk's last block is 0. `contexts`: int32 `[chunks]`."""

    def __init__(self, spans: Sequence[Span], block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        used = [-(-span.context // block_size) for span in spans]
        self._host = np.zeros((len(spans), columns_of(max(used))), dtype=np.int32)
        for row, (span, length) in enumerate(zip(spans, used, strict=True)):
            self._host[row, :length] = span.blocks[:length]
        contexts = np.array([span.context for span in spans], dtype=np.int32)
        self.contexts = to_device(torch.from_numpy(contexts), device)
        self._send()

    def advance(self, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> None:
        """Every chunk is one token longer; see `attention.StepAttention`."""
        for row, block in entered:
            column = (contexts.item(row) - 1) // self._block_size
            if column >= self._host.shape[1]:
                more = np.zeros((len(self._host), columns_of(2 * self._host.shape[1])), dtype=np.int32)
                more[:, : self._host.shape[1]] = self._host
                self._host = more
            self._host[row, column] = block
        if entered:
            self._send()
        self.contexts += 1

    def _send(self) -> None:
        # A copy, even on the CPU: a step that is still running reads the last one.
        self.tables: Tensor = to_device(torch.from_numpy(self._host.copy()), self._device)


def columns_of(least: int) -> int:
    """Columns of a table for `least` blocks."""
    return -(-least // COLUMNS) * COLUMNS
