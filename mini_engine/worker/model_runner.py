"""One rank's part of a step: from the engine core's `Step` to its `StepResult`.

Every rank of an engine executes the same steps in the same order; rank 0 samples and hands the tokens to the others.
This file knows nothing of sockets or processes, and decides nothing: what runs in a step was decided by the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_engine.messages import (
    Chunk,
    EncodeItem,
    MessageId,
    NewSequence,
    Step,
    StepResult,
    TensorHandle,
)
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.rope import Grid
from mini_engine.model.text import MediaRows
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.transport.arena import ReadableMemory
from mini_engine.worker import sampler
from mini_engine.worker.attention import AttentionBackend, StepAttention
from mini_engine.worker.batch import FlatBatch, build_batch
from mini_engine.worker.decode_batch import DecodeBatch
from mini_engine.worker.encoder_cache import EncoderCache
from mini_engine.worker.launched import Launched, Sampling
from mini_engine.worker.media_store import MediaStore
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.sequences import SequenceState
from mini_engine.worker.staging import HostCopy, to_device
from mini_engine.worker.token_counts import TokenCounts

NO_TOKENS = np.empty(0, dtype=np.int64)


class Media(Protocol):
    """Where received tensors lie; `media_inputs.py` has the real one."""

    store: ReadableMemory | None  # the engine's media store

    def check(self) -> None:
        """Raise a RuntimeError if nothing is received any more."""

    def rows(self, handle: TensorHandle, first: int, stop: int) -> Tensor:
        """Rows of the tensor that `handle` stands for: uint8, valid until its message is released."""

    def release(self, messages: list[MessageId]) -> None:
        """Drop these messages, which were reported."""

    def register_store(self, nbytes: int) -> None:
        """So many bytes of the store, from its start, are in use or soon will be."""

    def drop_sender(self, incarnation: int) -> None:
        """Drop all messages of an incarnation, received or yet to come."""


class DecodeSteps(Protocol):
    """What computes steps of single tokens faster; `decode_graphs.py` has the real one."""

    def __len__(self) -> int:
        """How many sizes of batches there are."""

    def capture(self) -> None:
        """Record all sizes, once. A collective. Before that steps are computed operator by operator."""

    def run(self, token_ids: Tensor, positions: Tensor, slots: Tensor, attend: StepAttention) -> Tensor:
        """The hidden states of a step for which `attend` was made; valid until the next. All on the device."""


class ModelRunner:
    """Executes steps on one rank. Not thread-safe.

    Args:
        model: this rank's part of the weights; its parameters' device and dtype are those of the computation.
        attention: over this rank's KV cache, of the same device and dtype.
        media: the tensors that the API servers sent.
        normalise: what turns raw patches into the vision tower's input.
        tp: this rank's place among those that share the model.
        to_device: brings patches to the device of the computation; None is torch's own way.
        graphs: what computes steps that are all decode, recorded or not; None computes them as any other.
        counts: what adjusts all rows of logits at once, so that no step waits for the tokens of the one before. None
            makes one, but on a CPU, where adjusting row by row from the sequences' tokens takes less.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        attention: AttentionBackend,
        media: Media,
        normalise: Normalisation,
        tp: TensorParallel,
        to_device: Callable[[Tensor], Tensor] | None = None,
        graphs: DecodeSteps | None = None,
        counts: TokenCounts | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._cache = cache = attention.cache
        self.graphs = graphs
        self._media = media
        self._normalise = normalise
        self._tp = tp
        self._device = cache.storage.device
        self._counts = TokenCounts(self._device) if counts is None and self._device.type != "cpu" else counts
        self._dtype = cache.storage.dtype
        self._to_device = to_device or partial(Tensor.to, device=self._device)
        self._sequences: dict[str, SequenceState] = {}
        self._encoded = EncoderCache()
        self._store = MediaStore(media.rows, media.store)
        self._decode: DecodeBatch | None = None  # the last step's, if it was one
        self._sampling: Sampling | None = None  # the last step's, as long as its tokens are not taken

    @property
    def device(self) -> torch.device:
        """Where the computation runs."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the computation."""
        return self._dtype

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._cache.block_size

    def execute(self, step: Step) -> StepResult:
        """Do what the step says, and wait for it; tokens in the result of rank 0 only.

        Raises whatever goes wrong: a rank that failed in the middle of a step cannot go on.
        """
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Do what the step says, field by field, but for what the device has still to do when all is said to it.

        A step that goes on with the decoding of the one before does not wait for it; any other does. A sampled token is
        the next decoding's input on the device (`DecodeBatch.feed`); it enters its sequence in `Sampling.result`, or,
        where all chunks decode, in `DecodeBatch.settle`.
        """
        self._media.check()  # in an empty step, too: a rank that receives nothing answers no ping
        self._forget(step.finished)
        self._encoded.evict(step.evict)
        if step.media_mark is not None:
            self._media.register_store(step.media_mark)
        self._store.drop(step.drop)
        self._store.keep(step.keep)
        self._begin(step.started)
        self._encode(step.encode)
        sampling = self._compute(step.chunks)
        self._media.release(step.release)
        for incarnation in step.drop_senders:
            self._media.drop_sender(incarnation)
        return Launched(StepResult(step.number, rank=self._tp.rank), sampling, self._device)

    @torch.inference_mode()
    def encode_patches(self, raw: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Raw uint8 patches of each item, and its (t, h, w) in patches -> its rows `[num_tokens, row_size]`.

        The patches are only read; they may lie on the CPU. A collective: every rank makes the same call.
        """
        # Joined while a value is one byte. Normalising copies, so shared memory is not written to.
        moved = [self._to_device(patches) for patches in raw]
        joined = moved[0] if len(moved) == 1 else torch.cat(moved)
        return self._model.encode_vision(self._normalise(joined, self._dtype), grids)

    def _forget(self, finished: Sequence[str]) -> None:
        if finished:
            self._take_tokens()
            # They may be in the batch, which would keep them alive; and the next of that name is another.
            self._end_decode()
            if self._counts is not None:
                self._counts.forget(finished)
        for request_id in finished:
            del self._sequences[request_id]

    def _end_decode(self) -> None:
        """The last step's batch is not carried on; its sequences get their tokens."""
        if self._decode is not None:
            self._decode.settle()
            self._decode = None

    def _begin(self, started: Sequence[NewSequence]) -> None:
        for new in started:
            self._sequences[new.request_id] = SequenceState(new, self._model.config)

    def _encode(self, items: Sequence[EncodeItem]) -> None:
        """All slices of the step through the vision tower in one call."""
        if not items:
            return
        media = [self._sequences[item.request_id].media[item.index] for item in items]
        raw: list[Tensor] = []
        grids: list[Grid] = []
        for item, entry in zip(items, media, strict=True):
            _, h, w = entry.grid_thw
            raw.append(self._store.patches(entry, item.first * h * w, (item.first + item.count) * h * w))
            grids.append((item.count, h, w))
        for item, entry, rows in zip(items, media, self.encode_patches(raw, grids), strict=True):
            per_grid = entry.num_tokens // entry.grid_thw[0]
            self._encoded.add(entry.media_hash, item.first * per_grid, entry.num_tokens, rows)

    def _take_tokens(self) -> None:
        """Wait for the tokens of the step before, if nobody has, and put them where the sequences are."""
        if self._sampling is not None:
            self._sampling.result()
            self._sampling = None

    def _compute(self, chunks: Sequence[Chunk]) -> Sampling | None:
        if not chunks:
            return None
        self._take_blocks(chunks)
        if self._decode is None or not self._decode.advance(chunks):
            self._take_tokens()
            self._end_decode()
            return self._compute_anew(chunks)
        return self._run(self._decode.batch, self._decode.attend)

    def _compute_anew(self, chunks: Sequence[Chunk]) -> Sampling | None:
        size = self._cache.block_size
        batch, spans = build_batch([(chunk, self._sequences[chunk.request_id]) for chunk in chunks], size)
        attend = self._attention.step(to_device(batch.slots, self._device), spans)
        if batch.decodes:
            self._decode = DecodeBatch(chunks, batch, attend, self._attention)
            batch = self._decode.batch
        return self._run(batch, attend)

    def _take_blocks(self, chunks: Sequence[Chunk]) -> None:
        """Extend the block tables."""
        unwritten: list[int] = []
        for chunk in chunks:
            if chunk.block_ids or chunk.restart:
                unwritten += self._sequences[chunk.request_id].take_blocks(chunk, self._cache.block_size)
        if self._attention.reads_masked:
            self._cache.clear(unwritten)

    def _run(self, batch: FlatBatch, attend: StepAttention) -> Sampling | None:
        token_ids, positions = to_device(batch.token_ids, self._device), to_device(batch.positions, self._device)
        if self.graphs is not None and self._decode is not None:
            hidden = self.graphs.run(token_ids, positions, to_device(batch.slots, self._device), attend)
        else:
            media = self._media_rows(batch)
            hidden = self._model(self._model.embed(token_ids, media), positions, attend, media)
        return self._sample(hidden, batch) if batch.sampled else None

    def _media_rows(self, batch: FlatBatch) -> list[MediaRows]:
        """What of the batch is media."""
        return [
            MediaRows(part.first + token - part.chunk.start, rows)
            for part in batch.in_prompt
            for token, rows in part.sequence.embeddings_within(part.chunk.start, part.stop, self._encoded)
        ]

    def _sample(self, hidden: Tensor, batch: FlatBatch) -> Sampling:
        """The next token of every chunk that samples, kept on every rank, reported by rank 0."""
        if len(batch.sampled) == len(hidden):
            last = hidden
        else:
            last = hidden.index_select(0, to_device(batch.last_rows, self._device))
        logits = self._model.logits(last)
        if self._tp.rank != 0:
            sampled = sampler.Sampled(torch.empty(len(batch.sampled), dtype=torch.int64, device=self._device))
        elif batch.greedy:
            sampled = sampler.sample_plain(logits)
        elif self._counts is not None and batch.adjusts:
            adjustments = self._counts.adjustments(batch, logits.shape[1])
            rows = list(map(_row_without_tokens, batch.sampled, batch.stops.tolist()))
            sampled = sampler.sample(logits, rows, adjustments.apply)
            adjustments.count(sampled.tokens)
        else:
            if self._decode is not None and batch.adjusts:
                self._take_tokens()
                self._decode.settle()
            sampled = sampler.sample(logits, list(map(_sampler_row, batch.sampled, batch.stops.tolist())))
        chosen = self._tp.broadcast(sampled.tokens)
        self._take_tokens()  # of the step before, in order
        if self._decode is not None:
            self._decode.feed(chosen)
        self._sampling = Sampling(HostCopy(chosen), batch, self._decode, sampled if self._tp.rank == 0 else None)
        return self._sampling


def _row_without_tokens(sequence: SequenceState, stop: int) -> sampler.Row:
    return sampler.Row(sequence.recipe, stop - sequence.prompt_length, NO_TOKENS)


def _sampler_row(sequence: SequenceState, stop: int) -> sampler.Row:
    # Without tokens of before a restart, which are about to be sampled again.
    tokens = sequence.tokens.array[:stop] if sequence.recipe.adjusts else NO_TOKENS
    return sampler.Row(sequence.recipe, stop - sequence.prompt_length, tokens)
