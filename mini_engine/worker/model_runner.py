"""One rank's part of a step: from the engine core's `Step` to its `StepResult`.

Every rank of an engine executes the same steps in the same order; rank 0 samples and hands the tokens to the others.
This file knows nothing of sockets or processes, and decides nothing: what runs in a step was decided by the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from mini_engine.failpoints import reach_failpoint
from mini_engine.kernels.staging import HostCopy, to_device
from mini_engine.messages import Chunk, EncodeItem, MediaItem, SampledToken, Step, StepResult, StoreHandle, TensorHandle
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.rope import Grid
from mini_engine.model.text import MediaRows
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.attention.recurrence import Recurrence, StepHook
from mini_engine.worker.attention.sdpa import AttentionBackend, StepAttention
from mini_engine.worker.batch import DecodeBatch, FlatBatch, SequenceState, build_batch
from mini_engine.worker.media_inputs import MediaInputs
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.sampling import sampler
from mini_engine.worker.sampling.grammar import Grammars, Masks
from mini_engine.worker.sampling.penalties import Adjustments

if TYPE_CHECKING:
    from mini_engine.worker.attention.decode_graphs import DecodeGraphs  # imports Triton


class Sampling:
    """The tokens of a step, in transfer to the host.

    Args:
        tokens: int64, those of `batch.sampled`, in order.
        sampled: what is said of them; None on a rank that reports nothing.
    """

    def __init__(self, tokens: Tensor, batch: FlatBatch, sampled: sampler.Sampled | None) -> None:
        self._tokens, self._sequences, self._sampled = HostCopy(tokens), batch.sampled, sampled
        self._stops: list[int] = batch.stops.tolist()  # now: a decode batch is advanced in place
        self._result: list[SampledToken] | None = None

    def result(self) -> list[SampledToken]:
        """Waits for the tokens, and at the first call puts them where the sequences are."""
        if self._result is None:
            tokens = self._tokens.values()
            for sequence, stop, token in zip(self._sequences, self._stops, tokens, strict=True):
                sequence.tokens[stop] = token
            self._result = []
            if self._sampled is not None:
                reports = self._sampled.logprobs
                self._result = [
                    SampledToken(one.request_id, token, reports.get(i, []), one.problem)
                    for i, (one, token) in enumerate(zip(self._sequences, tokens, strict=True))
                ]
        return self._result


class Launched:
    """A step that the host has launched. `done`: when the device has; None where none is to wait for.

    `result` lacks the tokens, which are those of `sampling`.
    """

    def __init__(self, result: StepResult, sampling: Sampling | None, device: torch.device) -> None:
        self._result, self._sampling = result, sampling
        self.done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.done = torch.cuda.Event(blocking=True)
            self.done.record()

    def result(self) -> StepResult:
        """Waits for the device."""
        tokens = self._sampling.result() if self._sampling is not None else []
        if self.done is not None:
            self.done.synchronize()
        return msgspec.structs.replace(self._result, tokens=tokens)


class ModelRunner:
    """Executes steps on one rank. Not thread-safe.

    Args:
        model: this rank's part of the weights; its parameters' device and dtype are those of the computation.
        attention: over this rank's KV cache and recurrent states, of the same device and dtype.
        media: the tensors that the API servers sent.
        normalise: what turns raw patches into the vision tower's input.
        tp: this rank's place among those that share the model.
        to_device: copies patches to the device of the computation; None: by torch.
        graphs: what computes steps that are all decode, recorded or not; None computes them as any other.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        attention: AttentionBackend,
        media: MediaInputs,
        normalise: Normalisation,
        tp: TensorParallel,
        to_device: Callable[[Tensor], Tensor] | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._cache = cache = attention.cache
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.num_states = cache.states.num_slots if cache.states is not None else 0
        self.graphs = graphs
        self._beside = ThreadPoolExecutor(1, "masks")
        self.grammars: Grammars | None = None  # rank 0 has them
        self._media = media
        self._normalise = normalise
        self._tp = tp
        self.device = cache.storage.device
        self.dtype = cache.storage.dtype
        self._to_device = to_device or partial(Tensor.to, device=self.device)
        self._sequences: dict[str, SequenceState] = {}
        self._kept: dict[bytes, Tensor] = {}  # copies of patches for later requests, by media hash
        # Rows of the vision tower `[num_tokens, row_size]`, by media hash, for every sequence that has the item. The
        # core keeps the budget of both, and lets no chunk read an item before its last part is encoded.
        self._encoded: dict[bytes, Tensor] = {}
        self._decode: DecodeBatch | None = None  # the last step's, if it was one
        self._adjustments: Adjustments | None = None  # the last step's logits', as long as its batch continues
        self._sampling: Sampling | None = None  # the last step's, as long as its tokens are not taken
        self._model_seconds = 0.0  # that the last step took beside which masks were made

    def execute(self, step: Step) -> StepResult:
        """Execute the step and wait for it; only rank 0's result has tokens.

        Raises any error: a rank that failed in the middle of a step cannot continue.
        """
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Do what the step says, field by field, but for what the device has still to do when all is said to it.

        A step that continues the decoding of the one before does not wait for it; any other does. A sampled token is
        the next decoding's input on the device (`DecodeBatch.feed`); it enters its sequence in `Sampling.result`.
        """
        self._media.check()  # in an empty step, too: a rank that receives nothing answers no ping
        if self.grammars is not None:
            finished = [(self._sequences[name].recipe.params.grammar, name) for name in step.finished]
            self.grammars.update(step.grammars, step.unused_grammars, finished)
        self._forget(step.finished)
        for media_hash in step.evict:
            del self._encoded[media_hash]
        if step.media_mark is not None:
            self._media.register_store(step.media_mark)
        for media_hash in step.drop:
            del self._kept[media_hash]
        for kept in step.keep:  # what was received is the sender's again once its message is released
            received = self._media.rows(kept.patches, 0, kept.patches.shape[0])
            moved = self._to_device(received)
            self._kept[kept.media_hash] = received.clone() if moved is received else moved
        for new in step.started:
            self._sequences[new.request_id] = SequenceState(new, self._model.config.vision, self.block_size)
        if self._cache.states is not None:
            for start in step.states:
                self._sequences[start.request_id].state = start.slot
            self._cache.states.start(step.states)
        self._encode(step.encode)
        sampling = self._compute(step.chunks)
        self._media.release(step.release)
        for incarnation in step.drop_senders:
            self._media.drop_sender(incarnation)
        return Launched(StepResult(step.number, rank=self._tp.rank), sampling, self.device)

    @torch.inference_mode()
    def encode_patches(self, raw: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Raw uint8 patches of each item, and its (t, h, w) in patches -> its rows `[num_tokens, row_size]`.

        The patches are only read; they may lie on the CPU. A collective: every rank makes the same call.
        """
        # Joined while a value is one byte. Normalising copies, so shared memory is not written to.
        moved = [self._to_device(patches) for patches in self._model.own_patches(raw, grids)]
        joined = moved[0] if len(moved) == 1 else torch.cat(moved)
        return self._model.encode_vision(self._normalise(joined, self.dtype), grids)

    def _forget(self, finished: Sequence[str]) -> None:
        if finished:
            self._take_tokens()
            # They may be in the batch, which would keep them alive; and the next of that name is another.
            self._decode = self._adjustments = None
        for request_id in finished:
            del self._sequences[request_id]

    def _encode(self, items: Sequence[EncodeItem]) -> None:
        """Encode all slices of the step in one call of the vision tower."""
        if not items:
            return
        if any(item.first for item in items):
            reach_failpoint("encoding")  # in the middle of an item
        media = [self._sequences[item.request_id].media[item.index] for item in items]
        raw: list[Tensor] = []
        grids: list[Grid] = []
        for item, entry in zip(items, media, strict=True):
            _, h, w = entry.grid_thw
            raw.append(self._patches(entry, item.first * h * w, (item.first + item.count) * h * w))
            grids.append((item.count, h, w))
        for item, entry, rows in zip(items, media, self.encode_patches(raw, grids), strict=True):
            per_grid = entry.num_tokens // entry.grid_thw[0]
            keep_rows(self._encoded, entry, item.first * per_grid, rows)

    def _patches(self, item: MediaItem, first: int, stop: int) -> Tensor:
        """Rows `first .. stop` of an item's patches, uint8, only to be read: a view, or a copy of what lies in several
        extents of the media store."""
        if isinstance(item.patches, StoreHandle):
            assert self._media.store is not None
            return self._media.store.rows(item.patches.extents, item.patches.shape, "uint8", first, stop)
        if isinstance(item.patches, TensorHandle) and item.media_hash not in self._kept:
            return self._media.rows(item.patches, first, stop)
        return self._kept[item.media_hash][first:stop]  # on the device already

    def _take_tokens(self) -> None:
        """Wait for the tokens of the step before, unless they are there, and put them where the sequences are."""
        if self._sampling is not None:
            self._sampling.result()
            self._sampling = None

    def _compute(self, chunks: Sequence[Chunk]) -> Sampling | None:
        if not chunks:
            return None
        for chunk in chunks:
            if chunk.block_ids or chunk.restart:
                self._sequences[chunk.request_id].take_blocks(chunk)
        if self._decode is not None and self._decode.advance(chunks):
            return self._run(self._decode.batch, self._decode.attend, chunks)
        self._take_tokens()
        self._decode = self._adjustments = None
        if any(chunk.start and not chunk.samples for chunk in chunks):
            reach_failpoint("prefilling")  # in the middle of a prompt
        work = [(chunk, self._sequences[chunk.request_id]) for chunk in chunks]
        batch, spans = build_batch(work, self._cache.block_size)
        attend = self._attention.step(to_device(batch.slots, self.device), spans)
        if batch.decodes:
            self._decode = DecodeBatch(chunks, batch, attend, self._attention)
            batch = self._decode.batch
        return self._run(batch, attend, chunks)

    def _run(self, batch: FlatBatch, attend: StepAttention, chunks: Sequence[Chunk]) -> Sampling | None:
        token_ids, positions = to_device(batch.token_ids, self.device), to_device(batch.positions, self.device)
        # Beside the model. A device computes it by itself, and what it has sampled before would have to be waited for.
        is_beside = batch.constrained and self.device.type == "cpu"
        masks, begun = self._beside.submit(self._masks, batch) if is_beside else None, time.monotonic()
        hook = StepHook(attend, self._recurrence(batch, chunks))
        if self.graphs is not None and self._decode is not None:
            hidden = self.graphs.run(token_ids, positions, hook)
        else:
            media = self._media_rows(batch)
            hidden = self._model(self._model.embed(token_ids, media), positions, hook, media)
        if hook.recurrence is not None:
            hook.recurrence.finish()
        if is_beside:
            self._model_seconds = time.monotonic() - begun
        return self._sample(hidden, batch, masks) if batch.sampled else None

    def _recurrence(self, batch: FlatBatch, chunks: Sequence[Chunk]) -> Recurrence | None:
        if self._cache.states is None:
            return None
        copies = [
            (self._sequences[chunk.request_id].state, slot)
            for chunk in chunks
            if chunk.num_tokens == 1
            for _, slot in chunk.snapshots
        ]
        return Recurrence.of(self._cache.states, batch.parts, copies)

    def _media_rows(self, batch: FlatBatch) -> list[MediaRows]:
        return [
            MediaRows(part.first + token - part.chunk.start, rows)
            for part in batch.in_prompt
            for token, rows in part.sequence.embeddings_within(part.chunk.start, part.stop, self._encoded)
        ]

    def _sample(self, hidden: Tensor, batch: FlatBatch, masks: Future[Masks | None] | None) -> Sampling:
        """The next token of every chunk that samples, kept on every rank, reported by rank 0."""
        if len(batch.sampled) == len(hidden):
            last = hidden
        else:
            last = hidden.index_select(0, to_device(batch.last_rows, self.device))
        logits = self._model.logits(last)
        if self._tp.rank == 0:
            sampled = self._choose(logits, batch, masks)
        else:
            sampled = sampler.Sampled(torch.empty(len(batch.sampled), dtype=torch.int64, device=self.device))
        chosen = self._tp.broadcast(sampled.tokens)
        self._take_tokens()  # of the step before, in order
        if self._decode is not None:
            self._decode.feed(chosen)
        self._sampling = Sampling(chosen, batch, sampled if self._tp.rank == 0 else None)
        return self._sampling

    def _choose(self, logits: Tensor, batch: FlatBatch, masks: Future[Masks | None] | None) -> sampler.Sampled:
        if batch.greedy:
            return sampler.sample_plain(logits)
        stops: list[int] = batch.stops.tolist()
        rows = [
            sampler.Row(sequence.recipe, stop - sequence.prompt_length)
            for sequence, stop in zip(batch.sampled, stops, strict=True)
        ]
        mask = masks.result() if masks else self._masks(batch) if batch.constrained else None
        if batch.adjusts and self._adjustments is None:
            self._adjustments = Adjustments(batch.sampled, stops, logits.shape[1], self.device)

        def adjust(logits: Tensor) -> Tensor:
            if self._adjustments is not None:
                logits = self._adjustments.apply(logits)
            return logits if mask is None else mask.apply(logits)

        sampled = sampler.sample(logits, rows, adjust)
        if self._adjustments is not None:
            self._adjustments.count(sampled.tokens)
        return sampled

    def _masks(self, batch: FlatBatch) -> Masks | None:
        """Of the rows with a grammar that goes on. Waits for the tokens of the step before; a device may compute this
        one meanwhile."""
        if self.grammars is None:
            return None
        self._take_tokens()
        stops = batch.stops.tolist()
        rows = {i: row for i, one in enumerate(batch.sampled) if (row := one.row(stops[i])) is not None}
        masks, problems = self.grammars.follow(rows, self._model_seconds, self.device)
        for i, problem in problems.items():
            batch.sampled[i].problem = problem
        return masks


def keep_rows(encoded: dict[bytes, Tensor], item: MediaItem, first: int, rows: Tensor) -> None:
    """Put rows `first` and following of an item into `encoded`, in memory of the item's own: what was encoded together
    is views of one tensor, which would live as long as the last of the items."""
    if first == 0:
        if len(rows) == item.num_tokens and rows.untyped_storage().nbytes() == rows.nbytes:
            encoded[item.media_hash] = rows
            return
        encoded[item.media_hash] = rows.new_empty(item.num_tokens, rows.shape[1])
    encoded[item.media_hash][first : first + len(rows)] = rows
