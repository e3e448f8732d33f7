"""The other ends of an API server, for its tests: an engine core that answers by script, and no ranks.

The core is a real ZMQ peer that speaks `messages.py`; it echoes no model, only what a test tells it to say.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import zmq.asyncio
from msgspec.structs import replace

from mini_engine import messages
from mini_engine.messages import NewRequest
from mini_engine.transport import sockets
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.support.patience import eventually


def make_queue(nbytes: int = 16 << 20) -> TensorIpcSender:
    """A real tensor queue, with an arena of so many bytes, to an engine without ranks."""
    return TensorIpcSender(Encoder("api 0", 7), [], Arena(nbytes, lambda: 1 << 40))


class ScriptedCore:
    """An engine core of one API server that keeps the contract: one final output for each request; it reports consumed
    tensors.

    `script` gives the token lists that a request is answered with; then it ends with "length", unless `hold` is set:
    then it runs until its `Finish`. Siblings are answered too, in turns; `script` sees each as a request of its own.

    `kept` is its directory, for `Lookup`: what it has accepted with patches. It has `held` of these items; `names` are
    its bindings. Requests are accepted at once, unless `accepts` is off: then when the test calls `accept`, if it does
    not `turn_down`.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str):
        self.script: Callable[[NewRequest], list[list[int]]] = lambda request: []
        self.hold = False
        self.cached = 0  # tokens that each prompt finds in the prefix cache
        self.pool: Callable[[NewRequest], list[float]] = lambda request: []  # what a request with `pooling` is for
        self.stats = messages.EngineStats()
        self.accepts = True
        self.kept: dict[bytes, messages.ItemFacts] = {}
        self.held: Literal["patches", "embeddings", "facts"] = "patches"
        self.names: dict[bytes, messages.NamedMedia] = {}
        self.num_resolved = 0  # how often it was asked for names
        self.look_ups: list[messages.Lookup] = []
        self.sent: set[str] = set()  # ids of samples, but for those that it has turned down
        self.unreserved: list[str] = []  # requests that were not sent, and will not be
        self.replies_to = {"look_up", "ping", "stats", "reset_caches"}
        self.controls: dict[str, list[int]] = {action: [] for action in self.replies_to}  # numbers of requests
        self.requests: list[NewRequest] = []
        self.finishes: list[messages.Finish] = []
        self.running: dict[str, NewRequest] = {}
        self.times: dict[str, messages.EngineTimes] = {}  # as last sent, of requests; not of their children
        self._encoder = Encoder("core 0", 2)
        self._socket = sockets.bind_router(context, endpoint)
        self._peer = b""

    async def run(self) -> None:
        while True:
            self._peer, frame = await self._socket.recv_multipart()
            match decode(frame).body:
                case messages.Lookup() as look_up:
                    await self._look_up(look_up)
                case messages.BindName(key=key, media=media):
                    self.names[key] = media
                case NewRequest() as request:
                    self.requests.append(request)
                    self.running |= {sample.request_id: sample for sample in (request, *as_requests(request))}
                    self.sent |= self.running.keys()
                    if self.accepts:
                        await self.accept(request)
                case messages.Finish(request_id=request_id) if request_id not in self.sent:
                    self.unreserved.append(request_id)
                case messages.Finish(request_id=request_id, reason=reason) as finish:
                    self.finishes.append(finish)
                    if request_id in self.running:
                        await self.end(self.running[request_id], reason)
                case messages.ControlRequest(number=number, action=action):
                    self.controls[action].append(number)
                    if action in self.replies_to:
                        await self.send(messages.ControlReply(number, self.stats if action == "stats" else None))

    async def _look_up(self, look_up: messages.Lookup) -> None:
        self.num_resolved += bool(look_up.names)
        self.look_ups += [look_up] if look_up.hashes else []
        if look_up.names or "look_up" in self.replies_to:
            known = [media_hash for media_hash in look_up.hashes if media_hash in self.kept]
            found = [messages.FoundMedia(self.kept[each], self.held) for each in known]
            named = {key: media for key, media in self.names.items() if key in look_up.names}
            await self.send(messages.Found(look_up.request_id, found, named))

    async def turn_down(self, request: NewRequest, arrival: int | None = None) -> None:
        """Its tensors cannot be used, or have not come in time; with `arrival`: embeddings have been evicted."""
        for sample in (request, *as_requests(request)):
            self.running.pop(sample.request_id, None)
            self.sent.discard(sample.request_id)
        await self.send(messages.MediaMiss(request.request_id, arrival))
        await self._consumed(request)

    async def accept(self, request: NewRequest) -> None:
        """Take a request, and answer it by the script."""
        samples = [request, *as_requests(request)]
        self.times[request.request_id] = messages.EngineTimes(*[time.monotonic()] * 2, 0, 0, 0)
        self.kept |= {item.media_hash: messages.ItemFacts.of(item) for item in request.media if item.patches}
        if (likeliest := request.sampling.prompt_logprobs) is not None:
            rows = [prompt_row(index, token, likeliest) for index, token in enumerate(request.prompt_token_ids)][1:]
            for part in (rows[:2], rows[2:]):  # as of two chunks
                output = messages.RequestOutput(request.request_id, [], prompt_logprobs=b"".join(part))
                await self.send(messages.Outputs(outputs=[output]))
        if request.pooling is not None and not self.hold:
            pooled, times = np.array(self.pool(request), "<f4").tobytes(), self._times_of(request)
            self.running.pop(request.request_id)
            output = messages.RequestOutput(request.request_id, [], "stop", None, [], self.cached, times, pooled)
            await self.send(messages.Outputs(outputs=[output]))
            return await self._consumed(request)
        for turn in itertools.zip_longest(*map(self.script, samples)):
            for sample, tokens in zip(samples, turn, strict=True):
                if tokens is not None:
                    await self.output(sample, tokens)
        if not self.hold:
            for sample in samples:
                await self.end(sample, "length")

    async def output(self, request: NewRequest, tokens: list[int]) -> None:
        logprobs = []
        if (likeliest := request.sampling.logprobs) is not None:
            ranks = [messages.TokenLogprob(65 + rank, -1.0 - rank) for rank in range(likeliest)]
            logprobs = [[messages.TokenLogprob(token, -0.25), *ranks] for token in tokens]
        before = self.times.get(request.request_id)
        times = None if before and before.first_token else self._times_of(request)
        output = messages.RequestOutput(request.request_id, tokens, None, None, logprobs, self.cached, times)
        await self.send(messages.Outputs(outputs=[output]))

    async def end(
        self, request: NewRequest, reason: Any, error: messages.Problem | None = None, tokens: list[int] | None = None
    ) -> None:
        del self.running[request.request_id]
        times = self._times_of(request) if reason in ("stop", "length") else None
        output = messages.RequestOutput(request.request_id, tokens or [], reason, error, times=times)
        await self.send(messages.Outputs(outputs=[output]))
        if request in self.requests:
            await self._consumed(request)

    async def has_requests(self, count: int = 1) -> NewRequest:
        """The last of so many requests in all, once they have come."""
        await eventually(lambda: len(self.requests) == count)
        return self.requests[-1]

    async def has_aborted(self, *request_ids: str) -> None:
        """Every sample of these requests was to be ended as aborted, and nothing else was."""
        await eventually(lambda: len(self.finishes) >= len(request_ids))
        assert sorted(one.request_id for one in self.finishes) == sorted(request_ids)
        assert {one.reason for one in self.finishes} == {"abort"}

    async def send(self, body: messages.AnyMessage) -> None:
        await self._socket.send_multipart([self._peer, self._encoder.encode(body)])

    def close(self) -> None:
        self._socket.close()

    def _times_of(self, request: NewRequest) -> messages.EngineTimes | None:
        """All up to now; nothing takes it any time but to be queued and to generate."""
        times, now = self.times.get(request.request_id), time.monotonic()
        if times is not None:
            first = times.first_token or now
            times = self.times[request.request_id] = messages.EngineTimes(times.accepted, first, first, first, now)
        return times

    async def _consumed(self, request: NewRequest) -> None:
        consumed = list({item.patches.message: None for item in request.media if item.patches is not None})
        if consumed:
            await self.send(messages.Outputs(consumed=consumed))


def prompt_row(index: int, token: int, likeliest: int) -> bytes:
    """See `RequestOutput.prompt_logprobs`."""
    logprobs = np.array([-0.5 - index, *(-1.0 - rank for rank in range(likeliest))], "<f4").tobytes()
    return np.array([7, token, *(65 + rank for rank in range(likeliest))], "<i4").tobytes() + logprobs


def as_requests(request: NewRequest) -> list[NewRequest]:
    """The children of a request as requests of their own."""
    seeded = [(child.request_id, replace(request.sampling, seed=child.seed)) for child in request.children]
    return [replace(request, request_id=name, sampling=sampling, children=[]) for name, sampling in seeded]
