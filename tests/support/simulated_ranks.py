"""Ranks without a model: they run steps in order, keep the state of a real rank, and check each step against it.

A cache index of the KV cache holds the content it stands for: the tokens up to its position and the media among them.
So a block used twice, a wrong prefix hit, or a token computed against foreign keys is seen at once. The token sampled
at output index i of a request is a number made from both, so outputs can be compared. A recurrent state is such a
content as well.
"""

import zlib
from collections import deque

from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.messages import (
    EncodeItem,
    Envelope,
    MediaItem,
    MessageId,
    NewSequence,
    SampledToken,
    Step,
    StepResult,
    StoreHandle,
)
from mini_engine.model.config import ModelConfig

DEPTH = ModelConfig.from_dir(BUNDLED_MODEL).vision.depth


def token_of(request_id: str, index: int) -> int:
    return 10 + zlib.crc32(f"{request_id}/{index}".encode()) % 300


def places_of(item: MediaItem) -> list[int]:
    """The index of each of its placeholders."""
    return [offset + i for offset in item.offsets for i in range(item.run_length)]


class Sequence:
    """What a rank keeps of a sequence; `contents[i]` names the tokens `0 .. i` and the media among them."""

    def __init__(self, new: NewSequence):
        self.new = new
        self.table: list[int] = []
        self.state: int | None = None  # index
        self.num_sampled = 0
        self.num_listed = 0  # tokens of the prompt whose log probabilities are reported
        self.contents: list[int] = []
        media = {at: (item.media_hash, i) for item in new.media for i, at in enumerate(places_of(item))}
        for position, token in enumerate(new.prompt_token_ids):
            self.append(token, media.get(position))

    def append(self, token: int, media: object = None) -> None:
        self.contents.append(hash((self.contents[-1] if self.contents else None, token, media)))


class SimulatedLinks:
    """In the place of `links.Links`: the test decides which messages arrive and when the ranks run."""

    def __init__(self, config: EngineConfig, seconds: tuple[float, float, float]):
        self.config, self.block_size, self.num_ranks = config, config.block_size, config.tensor_parallel_size
        self.inbox: list[Envelope] = []
        self.sent: list[object] = []
        self.gone: set[int] = set()
        self.steps: deque[Step] = deque()
        self.keys: dict[int, int] = {}  # by cache index
        self.states: dict[int, int | None] = {}
        self.sequences: dict[str, Sequence] = {}
        self.started: dict[str, Sequence] = {}  # the ended ones too
        self.encoded: dict[bytes, int] = {}  # hash -> tokens
        self.num_grids: dict[bytes, int] = {}  # hash -> temporal grids encoded so far
        self.num_blocks: dict[bytes, int] = {}  # hash -> blocks of the tower that have run on the grid after these
        self.num_encoded = 0  # items
        self.num_computed = 0
        self.released: list[MessageId] = []
        self.reported: set[tuple[int, MessageId]] = set()  # by a rank; the report may still be on its way
        self.kept: set[bytes] = set()
        self.memory: dict[int, bytes] = {}  # of the media store: the hash of what was written to each page
        self.grammars: dict[bytes, int] = {}  # numbers of the orders
        self.compiled: set[bytes] = set()  # of these
        self.now = 0.0  # by the clock of the simulation
        self.seconds = seconds  # of a decode step, and for a token of a prompt and a media token beside it

    # --- what EngineCore calls
    def receive(self):
        envelopes, self.inbox = self.inbox, []
        return envelopes

    def forget(self, incarnation: int) -> None:
        self.gone.add(incarnation)

    def send_step(self, step: Step) -> None:
        self.steps.append(step)

    def send(self, incarnation: int, body) -> None:
        if incarnation not in self.gone:
            self.sent.append(body)

    # --- what the test calls
    def run_step(self) -> None:
        """All ranks run the oldest dispatched step and report it."""
        step = self.steps.popleft()
        result = self._execute(step)
        for rank in range(self.num_ranks):
            own = StepResult(step.number, rank=rank) if rank else result
            self.inbox.append(Envelope(100 + rank, own))

    def _seconds(self, step: Step) -> float:
        decode, token, media = self.seconds
        num_prefill = sum(chunk.num_tokens for chunk in step.chunks if chunk.num_tokens > 1)
        return decode + token * num_prefill + media * sum(map(self._media_tokens, step.encode))

    def _media_tokens(self, encode: EncodeItem) -> float:
        item = self.started[encode.request_id].new.media[encode.index]
        end = DEPTH if encode.end is None else encode.end
        return item.num_tokens // item.grid_thw[0] * encode.count * (end - encode.begin) / DEPTH

    def _execute(self, step: Step) -> StepResult:
        """What rank 0 reports."""
        for request_id in step.finished:
            del self.sequences[request_id]
        for media_hash in step.evict:
            assert media_hash in self.num_grids or media_hash in self.num_blocks
            for kept in (self.num_grids, self.num_blocks, self.encoded):
                kept.pop(media_hash, None)
        for media_hash in step.drop:
            self.kept.remove(media_hash)
        for keep in step.keep:
            assert keep.media_hash not in self.kept, "kept twice"
            assert keep.patches.message not in self.released, "kept after its release"
            self.kept.add(keep.media_hash)
        for digest in step.unused_grammars:
            del self.grammars[digest]
            self.compiled.discard(digest)
        for grammar in step.grammars:
            assert grammar.text and grammar.digest not in self.grammars
            self.grammars[grammar.digest] = grammar.number
        for new in step.started:
            assert new.request_id not in self.sequences
            self.sequences[new.request_id] = self.started[new.request_id] = Sequence(new)
        for start in step.states:
            self.sequences[start.request_id].state = start.state_index
            self.states[start.state_index] = None if start.source is None else self.states[start.source]
        num_tokens = sum(self._encode(item) for item in step.encode)
        is_one_grid = [encode.count for encode in step.encode] == [1]
        assert is_one_grid or num_tokens <= self.config.step_media_tokens("cpu"), "more media than a step's budget"
        assert sum(self.encoded.values()) <= self.config.encoder_tokens(1 << 20)
        assert sum(chunk.num_tokens for chunk in step.chunks) <= self.config.step_tokens("cpu")
        assert len({chunk.request_id for chunk in step.chunks}) == len(step.chunks) <= self.config.max_num_seqs
        result = StepResult(step.number)
        for chunk in step.chunks:
            self._run_chunk(chunk, result)
        for message in step.release:
            assert all((rank, message) in self.reported for rank in range(self.num_ranks)), "a rank does not have it"
            assert message not in self.released, "released twice"
            self.released.append(message)
        self.now += self._seconds(step)
        return result

    def _encode(self, encode) -> float:
        """Returns the number of tokens encoded."""
        item = self.sequences[encode.request_id].new.media[encode.index]
        done = self.num_grids.get(item.media_hash, 0)
        assert encode.first == done and encode.count > 0, "a temporal grid is encoded twice, or left out"
        if item.patches is None:
            assert item.media_hash in self.kept, "encoded after it was dropped"
        elif isinstance(item.patches, StoreHandle):
            assert self.memory[item.patches.extents[0][0]] == item.media_hash, "another item has these pages"
        else:
            assert item.patches.message not in self.released, "encoded after its release"
        assert encode.begin == self.num_blocks.pop(item.media_hash, 0), "a block is run twice, or left out"
        if encode.end is not None:
            assert encode.count == 1 and encode.begin < encode.end < DEPTH
            self.num_blocks[item.media_hash] = encode.end
            return self._media_tokens(encode)
        self.num_grids[item.media_hash] = done + encode.count
        assert done + encode.count <= item.grid_thw[0]
        if done + encode.count == item.grid_thw[0]:
            self.encoded[item.media_hash] = item.num_tokens
            self.num_encoded += 1
        return self._media_tokens(encode)

    def _run_chunk(self, chunk, result: StepResult) -> None:
        sequence = self.sequences[chunk.request_id]
        sequence.table = ([] if chunk.restart else sequence.table) + chunk.block_ids
        end, known = chunk.start + chunk.num_tokens, len(sequence.contents)
        digest = sequence.new.sampling.grammar
        assert not digest or digest in self.compiled, "run before its grammar was compiled"
        assert chunk.num_tokens > 0 and end <= known, "a token that does not exist yet"
        assert len(sequence.table) == -(-end // self.block_size), "block table does not fit the tokens"
        for item in sequence.new.media:
            needed = any(chunk.start <= place < end for place in places_of(item))
            assert not needed or item.media_hash in self.encoded, "media needed and not encoded"
        indices = [block * self.block_size + i for block in sequence.table for i in range(self.block_size)][:end]
        self.keys.update(zip(indices[chunk.start :], sequence.contents[chunk.start : end], strict=True))
        assert [self.keys[index] for index in indices] == sequence.contents[:end], "foreign keys"
        if sequence.state is not None:
            before = sequence.contents[chunk.start - 1] if chunk.start else None
            assert self.states[sequence.state] == before, "foreign state"
            self.states[sequence.state] = sequence.contents[end - 1]
        for place, index in chunk.snapshots:
            assert chunk.start < place <= end, "a state outside of the chunk"
            self.states[index] = sequence.contents[place - 1]
        self.num_computed += chunk.num_tokens
        prompt = sequence.new.prompt_token_ids
        if sequence.new.sampling.prompt_logprobs is not None and sequence.num_listed < min(end, len(prompt) - 1):
            assert chunk.start <= sequence.num_listed, "tokens whose log probabilities are not reported were cached"
            first, sequence.num_listed = sequence.num_listed, min(end, len(prompt) - 1)
            rows = prompt[first + 1 : sequence.num_listed + 1]
            result.prompt_logprobs[chunk.request_id] = b"".join(token.to_bytes(4) for token in rows)
        assert chunk.samples == (end == known)
        if chunk.samples and sequence.new.pooling is not None:
            assert end == len(sequence.new.prompt_token_ids), "pooled past the end of the prompt"
            result.pooled[chunk.request_id] = chunk.request_id.encode()
        elif chunk.samples:
            token = token_of(chunk.request_id, sequence.num_sampled)
            sequence.append(token)
            sequence.num_sampled += 1
            result.tokens.append(SampledToken(chunk.request_id, token))
