"""The objects that the routes of the HTTP application share. Each route gets them by `context_of`."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request

from mini_engine.config import EngineConfig
from mini_engine.engine_client.engines import EngineClient
from mini_engine.http.admission import Budget, Places, body_budget, media_budget
from mini_engine.media.loader import MediaLoader, start_thread_pool
from mini_engine.media.settings import MediaSettingsResolver
from mini_engine.messages import EngineLimits
from mini_engine.prompt.detokenizer import Vocabulary
from mini_engine.prompt.pooling_prompts import Task
from mini_engine.prompt.renderer import ChatRenderer
from mini_engine.prompt.sampling_params import SamplingDefaults, SamplingResolver

TEXT_THREADS = 2  # most of what they do needs the interpreter, which the event loop waits for: more are no faster


@dataclass(frozen=True)
class ModelFront:
    """What an API server loads of the model, while the engines start."""

    renderer: ChatRenderer
    vocabulary: Vocabulary
    vocab_size: int  # of the model's logits; its tokenizer may have fewer tokens
    media_settings: MediaSettingsResolver
    media: MediaLoader
    defaults: SamplingDefaults
    task: Task


@dataclass(frozen=True)
class AppContext(ModelFront):
    """The parts of an API server that the routes use."""

    config: EngineConfig
    engines: EngineClient
    limits: EngineLimits
    sampling: SamplingResolver
    requests: Budget  # choices of unfinished ones for text
    bodies: Budget  # bytes of all requests, while they are received
    media_bytes: Budget
    places: Places
    text_threads: ThreadPoolExecutor  # decode bodies, and render and tokenise texts, that are large

    @classmethod
    def of(
        cls, front: ModelFront, config: EngineConfig, engines: EngineClient, limits: EngineLimits, incarnation: int
    ) -> Self:
        """Of the process `incarnation`, whose engines have these `limits`."""
        return cls(
            **vars(front),
            config=config,
            engines=engines,
            limits=limits,
            sampling=SamplingResolver(front.defaults, limits.max_model_len, front.vocab_size, config.seed, incarnation),
            requests=Budget(config.max_num_queued_reqs, "--max-num-queued-reqs", "queued_requests", "choice(s)"),
            bodies=body_budget(config),
            media_bytes=media_budget(config),
            places=Places(config.maximum_concurrent_videos),
            text_threads=start_thread_pool(TEXT_THREADS, "text"),
        )


def context_of(request: Request) -> AppContext:
    return request.app.state.context
