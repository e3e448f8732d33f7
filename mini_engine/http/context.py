"""The objects that the routes of the HTTP application share. Each route gets them by `context_of`."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import State
from starlette.requests import Request

from mini_engine.config import EngineConfig
from mini_engine.engine_client.engines import EngineClient
from mini_engine.fair_semaphore import FairSemaphore
from mini_engine.http.admission import Budget, BudgetShare, MediaPermits, body_budget, media_budget
from mini_engine.media.loader import MediaLoader, start_thread_pool
from mini_engine.media.settings import MediaSettingsResolver
from mini_engine.messages import EngineLimits
from mini_engine.prompt.detokenizer import Vocabulary
from mini_engine.prompt.pooling_prompts import Task
from mini_engine.prompt.renderer import ChatRenderer
from mini_engine.prompt.sampling_params import SamplingDefaults, SamplingResolver
from mini_engine.protocol.request_clock import RequestClock

T = TypeVar("T")

TEXT_THREADS = 2  # most of what they do needs the interpreter, which the event loop waits for: more are no faster
INLINE_CHARACTERS = 4096  # of text to tokenise


@dataclass
class ModelAssets:
    """What an API server loads of the model, while the engines start."""

    renderer: ChatRenderer
    vocabulary: Vocabulary
    vocab_size: int  # of the model's logits; its tokenizer may have fewer tokens
    media_settings: MediaSettingsResolver
    media_loader: MediaLoader
    defaults: SamplingDefaults
    task: Task


class AppContext(ModelAssets):
    """The parts of an API server that the routes use."""

    def __init__(
        self, assets: ModelAssets, config: EngineConfig, engines: EngineClient, limits: EngineLimits, incarnation: int
    ):
        """Of the process `incarnation`, whose engines have these `limits`."""
        super().__init__(**vars(assets))
        self.config, self.engines, self.limits = config, engines, limits
        self.sampling = SamplingResolver(
            assets.defaults, limits.max_model_len, assets.vocab_size, config.seed, incarnation
        )
        # Choices of unfinished requests for text.
        self.requests = Budget(config.max_num_queued_reqs, "--max-num-queued-reqs", "queued_requests", "choice(s)")
        self.bodies = body_budget(config)  # bytes of all requests, while they are received
        self.media_bytes = media_budget(config)
        self.media_permits = MediaPermits(config.maximum_concurrent_videos)
        # They decode bodies, and render and tokenise texts, that are large.
        self.text_threads = start_thread_pool(TEXT_THREADS, "text")
        self.text_permits = FairSemaphore(TEXT_THREADS, slow_limit=0)  # one for each of these threads

    async def run_sized(self, work: Callable[[], T], size: int, client: bytes, inline: int = INLINE_CHARACTERS) -> T:
        """The result of `work`. Where the `size` of its input is at most `inline`, it runs on the event loop, for some
        milliseconds at most, since many requests may be due at once; else in one of the `text_threads`, which are
        shared fairly between clients."""
        if size <= inline:
            return work()
        permit = await self.text_permits.acquire(client)
        running = asyncio.get_running_loop().run_in_executor(self.text_threads, work)
        running.add_done_callback(lambda _: permit.release())
        try:
            return await asyncio.shield(running)  # a thread goes on, with its permit, when its request is cancelled
        finally:
            del running  # an error has this frame: with the future in it they would be a cycle, which keeps the body


class RequestState(State):
    """What a route finds of its request, by `state_of`: a view of `scope["state"]`, which the middleware fills."""

    request_id: str
    caller: dict[str, Any]  # of log lines, see `caller_of`
    client: bytes  # opaque; clients take turns
    clock: RequestClock
    clocks: list[RequestClock]  # this one, and those of further prompts
    cleanup: contextlib.ExitStack  # closed at the end of the request, however it ends
    end: Callable[[Exception], None]  # cancels the request; when it has cleaned up, the exception becomes the response
    model: str  # that the client asked for; set by `read_body`
    # Of requests to an engine alone:
    choices: BudgetShare  # of `AppContext.requests`, with the first choice
    name_scope: bytes  # see `Access.name_scope`


def context_of(request: Request) -> AppContext:
    return request.app.state.context


def state_of(request: Request, number: int = 0) -> RequestState:
    """That of a request's prompt `number`, each of which has an id and a clock of its own."""
    state = RequestState(request.scope["state"])
    if not number:
        return state
    state.clocks.append(clock := RequestClock())
    own: dict[str, Any] = {"request_id": f"{state.request_id}-prompt{number}", "clock": clock}
    return RequestState(request.scope["state"] | own)
