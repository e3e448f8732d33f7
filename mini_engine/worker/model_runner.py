"""One rank's part of a step: from the engine core's `Step` to its `StepResult`.

Every rank of an engine executes the same steps in the same order; rank 0 samples and hands the tokens to the others.
This file knows nothing of sockets or processes, and decides nothing: what runs in a step was decided by the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from mini_engine.failpoints import reach_failpoint
from mini_engine.kernels.staging import HostCopy, to_device
from mini_engine.messages import Chunk, EncodeItem, MediaItem, SampledToken, Step, StepResult, StoreHandle, TensorHandle
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.rope import Grid
from mini_engine.model.text import MediaRows
from mini_engine.model.towers.vision import last_of
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.transport.cuda_memory import wait_for
from mini_engine.worker.attention.recurrence import Recurrence, StepHook
from mini_engine.worker.attention.recurrent_states import RecurrentStates
from mini_engine.worker.attention.sdpa import AttentionBackend
from mini_engine.worker.batch import DecodeBatch, FlatBatch, SequenceState, build_batch
from mini_engine.worker.media_inputs import MediaInputs
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.prompt_outputs import list_prompts, pool_prompts
from mini_engine.worker.sampling import sampler
from mini_engine.worker.sampling.grammar import Grammars, Masks
from mini_engine.worker.sampling.penalties import LogitsProcessors

if TYPE_CHECKING:
    from mini_engine.worker.attention.decode_graphs import DecodeGraphs  # imports Triton


class PendingTokens:
    """The tokens of a step, in transfer to the host.

    Args:
        tokens: int64, those of `batch.sampled`, in order.
        sampled: with their logprobs; None on a rank that reports nothing.
    """

    def __init__(self, tokens: Tensor, batch: FlatBatch, sampled: sampler.Sampled | None) -> None:
        self._tokens, self._sequences, self._sampled = HostCopy(tokens), batch.sampled, sampled
        self._stops: list[int] = batch.stops.tolist()  # now: a decode batch is advanced in place
        self._result: list[SampledToken] | None = None

    def result(self) -> list[SampledToken]:
        """Waits for the tokens, and at the first call enters them into the sequences."""
        if self._result is None:
            self._result, tokens = [], self._tokens.values()
            reports = self._sampled.logprobs() if self._sampled is not None else {}
            for i, (sequence, stop) in enumerate(zip(self._sequences, self._stops, strict=True)):
                sequence.tokens[stop] = tokens[i]
                if self._sampled is not None:
                    token = SampledToken(sequence.request_id, tokens[i], reports.get(i, []), sequence.problem)
                    self._result.append(token)
        return self._result


class Launched:
    """A step that the host has launched. `result` lacks the fields in `pending`, each with a function that waits for
    it."""

    def __init__(self, result: StepResult, pending: Mapping[str, Callable[[], Any]], device: torch.device) -> None:
        self._result, self._pending = result, pending
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()

    def wait(self) -> None:
        """Until the device has completed it, without holding the interpreter's lock. For any thread."""
        if self._done is not None:
            wait_for(self._done)

    def result(self) -> StepResult:
        """Waits for the device."""
        result = msgspec.structs.replace(self._result, **{name: wait() for name, wait in self._pending.items()})
        if self._done is not None:
            self._done.synchronize()
        return result


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
        self._model, self._attention, self._media, self._normalise, self._tp = model, attention, media, normalise, tp
        self._cache = cache = attention.cache
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.num_states = cache.states.num_states if cache.states is not None else 0
        self.device, self.dtype = cache.storage.device, cache.storage.dtype
        self.graphs = graphs
        self.grammars: Grammars | None = None  # rank 0 has them
        self._to_device = to_device or partial(Tensor.to, device=self.device)
        self._sequences: dict[str, SequenceState] = {}
        self._kept: dict[bytes, Tensor] = {}  # copies of patches for later requests, by media hash
        # Rows of the vision tower `[num_tokens, row_size]`, by media hash, for every sequence that has the item. The
        # core keeps the budget of both, and lets no chunk read an item before its last part is encoded.
        self._encoded: dict[bytes, Tensor] = {}
        self._unfinished: dict[bytes, Iterator[Tensor]] = {}  # the tower's blocks on one grid of an item, by its hash
        self._decode_batch: DecodeBatch | None = None  # the last step's, if it was one
        self._processors: LogitsProcessors | None = None  # the last step's, as long as its batch continues
        self._pending: PendingTokens | None = None  # the last step's, until they are in the sequences
        # Processor time of the model in the last step with masks: the next ones may take as long beside it.
        self._model_seconds = 0.0

    def execute(self, step: Step) -> StepResult:
        """Execute the step and wait for it; only rank 0's result has tokens. Raises any error: a rank that failed in
        the middle of a step cannot continue."""
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Execute the fields of the step in order; what the device computes may complete later.

        A step that continues the decoding of the one before does not wait for it; any other does. A sampled token is
        the next decoding's input on the device (`DecodeBatch.feed`); it enters its sequence in `PendingTokens.result`.
        """
        self._media.check()  # in an empty step, too: a rank that receives nothing answers no ping
        if self.grammars is not None:
            finished = [(self._sequences[name].sampling.params.grammar, name) for name in step.finished]
            self.grammars.update(step.grammars, step.unused_grammars, finished)
        if step.finished:
            self._enter_tokens()
            # They may be in the batch, which would keep them alive; and the next of that name is another.
            self._decode_batch = self._processors = None
            for request_id in step.finished:
                del self._sequences[request_id]
        self._update_media(step)
        for new in step.started:
            self._sequences[new.request_id] = SequenceState(new, self._model.config.vision, self.block_size)
        if self._cache.states is not None:
            for start in step.states:
                self._sequences[start.request_id].state_index = start.state_index
            self._cache.states.start(step.states)
        if step.encode:
            self._encode(step.encode)
        pending = self._compute(step.chunks) if step.chunks else {}
        self._media.release(step.release)
        for incarnation in step.drop_senders:
            self._media.drop_sender(incarnation)
        return Launched(StepResult(step.number, rank=self._tp.rank), pending, self.device)

    def _update_media(self, step: Step) -> None:
        """Drop and keep embeddings and patches; pin the media store."""
        for media_hash in step.evict:
            if self._unfinished.pop(media_hash, None) is None or media_hash in self._encoded:
                del self._encoded[media_hash]
        if step.high_water_mark is not None:
            self._media.pin_store(step.high_water_mark)
        for media_hash in step.drop:
            del self._kept[media_hash]
        for kept in step.keep:  # what was received is the sender's again once its message is released
            received = self._media.rows(kept.patches, 0, kept.patches.shape[0])
            moved = self._to_device(received)
            self._kept[kept.media_hash] = received.clone() if moved is received else moved

    @torch.inference_mode()
    def encode_patches(self, raw: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Raw uint8 patches of each item, and its (t, h, w) in patches -> its rows `[num_tokens, row_size]`. The
        patches are only read, and may be on the CPU. A collective: every rank makes the same call."""
        return self._model.encode_vision(self._tower_input(raw, grids), grids)

    def _tower_input(self, raw: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        # Joined while a value is one byte. Normalising copies, so shared memory is not written to.
        moved = [self._to_device(patches) for patches in self._model.own_patches(raw, grids)]
        return self._normalise(moved[0] if len(moved) == 1 else torch.cat(moved), self.dtype)

    def _encode(self, parts: Sequence[EncodeItem]) -> None:
        """Encode slices of some blocks of the vision tower, then all others of the step in one call of it."""
        if any(part.first for part in parts):
            reach_failpoint("encoding")  # in the middle of an item
        whole: list[tuple[EncodeItem, MediaItem]] = []
        for part in parts:
            item = self._sequences[part.request_id].media[part.index]
            if part.begin or part.end is not None:
                self._encode_blocks(part, item)
            else:
                whole.append((part, item))
        if whole:
            raw, grids = zip(*(self._slice(part, item) for part, item in whole), strict=True)
            encoded = self._model.encode_vision(self._tower_input(raw, grids), grids)
            for (part, item), rows in zip(whole, encoded, strict=True):
                keep_rows(self._encoded, item, part.first * item.num_tokens // item.grid_thw[0], rows)

    def _encode_blocks(self, part: EncodeItem, item: MediaItem) -> None:
        """Go on with a temporal grid, or begin it."""
        if part.begin == 0:
            raw, grid = self._slice(part, item)
            self._unfinished[item.media_hash] = self._model.encode_blocks(self._tower_input([raw], [grid]), grid)
        blocks = self._unfinished[item.media_hash]
        if part.end is not None:
            for _ in range(part.begin, part.end):
                next(blocks)
        else:
            rows = last_of(blocks)
            del self._unfinished[item.media_hash]
            keep_rows(self._encoded, item, part.first * item.num_tokens // item.grid_thw[0], rows)

    def _slice(self, part: EncodeItem, item: MediaItem) -> tuple[Tensor, Grid]:
        """The patches of a slice, uint8, only to be read: a view, or a copy of what lies in several extents of the
        media store; and their grid."""
        _, h, w = item.grid_thw
        first, stop, source = part.first * h * w, (part.first + part.count) * h * w, item.patches
        if isinstance(source, StoreHandle):
            assert self._media.store is not None
            patches = self._media.store.rows(source.extents, source.shape, first, stop)
        elif isinstance(source, TensorHandle) and item.media_hash not in self._kept:
            patches = self._media.rows(source, first, stop)
        else:
            patches = self._kept[item.media_hash][first:stop]  # on the device already
        return patches, (part.count, h, w)

    def _enter_tokens(self) -> None:
        """Enter the tokens of the step before into the sequences, once; waits for them."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _compute(self, chunks: Sequence[Chunk]) -> dict[str, Callable[[], Any]]:
        """Lay the chunks out, or advance the last step's batch to them, and run the model. Returns what is pending, see
        `Launched`."""
        for chunk in chunks:
            if chunk.block_ids or chunk.restart:
                self._sequences[chunk.request_id].add_blocks(chunk)
        if self._decode_batch is None or not self._decode_batch.advance(chunks):
            self._enter_tokens()
            self._decode_batch = self._processors = None
            if any(chunk.start and not chunk.samples for chunk in chunks):
                reach_failpoint("prefilling")  # in the middle of a prompt
            batch = build_batch([(chunk, self._sequences[chunk.request_id]) for chunk in chunks], self.block_size)
            attend = self._attention.step(to_device(batch.cache_indices, self.device), batch.spans)
            if batch.decodes:
                self._decode_batch = DecodeBatch(chunks, batch, attend, self._attention)
        if self._decode_batch is not None:
            batch, attend = self._decode_batch.batch, self._decode_batch.attend
        token_ids, positions = to_device(batch.token_ids, self.device), to_device(batch.positions, self.device)
        # Masks are made while the model runs. Requesting them waits for the tokens of the step before: so on a device
        # that follows the launch of the model, in `_receive_masks`.
        requests_masks = batch.constrained and self.device.type == "cpu"
        if requests_masks:
            self._request_masks(batch)
        begun = time.thread_time()
        states = self._cache.states
        hook = StepHook(attend, Recurrence.of(states, batch.parts) if states is not None else None)
        if self.graphs is not None and self._decode_batch is not None:
            hidden = self.graphs.run(token_ids, positions, hook)
        else:
            media = [
                MediaRows(part.first + token - part.chunk.start, rows)
                for part in batch.in_prompt
                for token, rows in part.sequence.embeddings_within(part.chunk.start, part.stop, self._encoded)
            ]
            hidden = self._model(self._model.embed(token_ids, media), positions, hook, media)
        if states is not None:
            self._snapshot_single_tokens(states, chunks)
        if requests_masks:
            self._model_seconds = time.thread_time() - begun
        return self._sample_and_report(hidden, batch)

    def _snapshot_single_tokens(self, states: RecurrentStates, chunks: Sequence[Chunk]) -> None:
        """Once all layers have run; the snapshots of longer chunks are `Recurrence`'s."""
        for chunk in chunks:
            if chunk.num_tokens == 1:
                for _, snapshot in chunk.snapshots:
                    states.copy(self._sequences[chunk.request_id].state_index, snapshot)

    def _sample_and_report(self, hidden: Tensor, batch: FlatBatch) -> dict[str, Callable[[], Any]]:
        """Sample the next token of every chunk that ends its sequence, and compute what requests ask of their prompts.
        All ranks keep the tokens; rank 0 reports the rest, too."""
        pending: dict[str, Callable[[], Any]] = {}
        if batch.listed:
            pending["prompt_logprobs"] = list_prompts(self._model, hidden, batch.listed)
        if batch.pooled:
            pending["pooled"] = pool_prompts(self._model, hidden, batch.pooled)
        tokens, sampled = torch.empty(0, dtype=torch.int64), None
        if batch.sampled:
            tokens, sampled = self._sample(hidden, batch)
        self._enter_tokens()  # of the step before, in order
        if self._decode_batch is not None:
            self._decode_batch.feed(tokens)
        self._pending = PendingTokens(tokens, batch, sampled)
        return {"tokens": self._pending.result} | ({} if self._tp.rank else pending)

    def _sample(self, hidden: Tensor, batch: FlatBatch) -> tuple[Tensor, sampler.Sampled | None]:
        """int64 `[s]`, the tokens of `batch.sampled`; on rank 0 with what it reports of them."""
        if len(batch.sampled) != len(hidden):
            hidden = hidden.index_select(0, to_device(batch.last_rows, self.device))
        logits = self._model.logits(hidden)
        sampled = None if logits is None else self._choose_tokens(logits, batch)
        own = torch.empty(len(hidden), dtype=torch.int64, device=self.device) if sampled is None else sampled.tokens
        return self._tp.broadcast(own), sampled

    def _choose_tokens(self, logits: Tensor, batch: FlatBatch) -> sampler.Sampled:
        if batch.greedy:
            return sampler.Sampled(sampler.largest(logits))
        stops: list[int] = batch.stops.tolist()
        mask = self._receive_masks(batch) if batch.constrained else None
        if batch.adjusts and self._processors is None:
            self._processors = LogitsProcessors(batch.sampled, stops, logits.shape[1], self.device)

        def process(logits: Tensor) -> Tensor:
            if self._processors is not None:
                logits = self._processors.apply(logits)
            return logits if mask is None else mask.apply(logits)

        output_indices = [stop - sequence.prompt_length for sequence, stop in zip(batch.sampled, stops, strict=True)]
        sampled = sampler.sample(logits, [sequence.sampling for sequence in batch.sampled], output_indices, process)
        if self._processors is not None:
            self._processors.count(sampled.tokens)
        return sampled

    def _request_masks(self, batch: FlatBatch) -> None:
        """For the rows whose grammar has not ended. Waits for the tokens of the step before."""
        if self.grammars is not None:
            self._enter_tokens()
            rows = {i: sequence.grammar_row(int(batch.stops[i])) for i, sequence in enumerate(batch.sampled)}
            following = {i: row for i, row in rows.items() if row is not None}
            self.grammars.request_masks(following, self._model_seconds)

    def _receive_masks(self, batch: FlatBatch) -> Masks | None:
        if self.grammars is None:
            return None
        if self.device.type != "cpu":  # see `_compute`
            self._request_masks(batch)
        masks, problems = self.grammars.receive_masks(self.device)
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
