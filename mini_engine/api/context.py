"""The objects that the routes of the HTTP application share. Each route gets it by `context_of`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from mini_engine.api.admission import ByteBudget, MediaAdmission, RequestAdmission
from mini_engine.api.chat import ChatRenderer
from mini_engine.api.detokenizer import Vocabulary
from mini_engine.api.engine_client import EngineClient
from mini_engine.api.media_loader import MediaLoader
from mini_engine.api.media_settings import MediaSettingsResolver
from mini_engine.api.sampling import SamplingResolver
from mini_engine.config import EngineConfig
from mini_engine.messages import EngineLimits


@dataclass(frozen=True)
class AppContext:
    """The parts of an API server that the routes use."""

    config: EngineConfig
    renderer: ChatRenderer
    tokenizer: Any  # Hugging Face's
    vocabulary: Vocabulary
    bodies: ByteBudget  # of all requests, while they are received
    requests: RequestAdmission
    admission: MediaAdmission
    media_settings: MediaSettingsResolver
    media: MediaLoader
    sampling: SamplingResolver
    engines: EngineClient
    limits: EngineLimits


def context_of(request: Request) -> AppContext:
    """The context of the application that serves `request`."""
    return request.app.state.context
