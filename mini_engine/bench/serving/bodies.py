"""From prompts to the bytes of requests, made before any clock runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mini_engine.bench.datasets.sample import Link, Message, Part, Sample, draws
from mini_engine.bench.serving.client import Request
from mini_engine.bench.serving.media import MediaPlace
from mini_engine.bench.serving.settings import Settings
from mini_engine.bench.serving.target import Target
from mini_engine.config import ConfigError

MOST_CHUNKS_BEFORE_CANCEL = 8


def requests_of(
    samples: Sequence[Sample], settings: Settings, target: Target, place: MediaPlace, cancel: bool = True
) -> list[Request]:
    """A request for each sample. Media that do not travel inside must be in their place; `cancel`: as the settings say.

    Raises:
        ConfigError: a sample holds what the backend cannot take.
    """
    # Where the answer is known it may be of one token, whatever the most is.
    lengths = [1 if sample.answer and not settings.ignore_eos else sample.output_tokens for sample in samples]
    cancels = cancel_plan(lengths, settings.cancel_rate if cancel else 0.0, settings.data.seed)
    common: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **settings.sampling,
    }
    if settings.logprobs is not None:
        chat = {"logprobs": True, "top_logprobs": settings.logprobs}
        common |= chat if settings.backend == "openai-chat" else {"logprobs": settings.logprobs}
    if settings.ignore_eos:
        common["ignore_eos"] = True
    if target.timings:
        common["return_timings"] = True
    requests = []
    for number, sample in enumerate(samples):
        body = {**_prompt(sample, settings.backend, place), **common, **settings.extra_body}
        answer = None if settings.ignore_eos else sample.answer  # which would go on after its end
        requests.append(Request(number, json.dumps(body).encode(), answer, cancels[number]))
    return requests


def cancel_plan(lengths: Sequence[int], rate: float, seed: int) -> list[int | None]:
    """After how many chunks each stream is closed, None for those that are read to their end.

    round(rate * number) of them are closed, drawn from `seed`, each after 1 to 8 chunks, or fewer if its length, as far
    as it is known, is less.
    """
    rng = draws(seed, "cancelled streams")
    closed = set(rng.sample(range(len(lengths)), round(rate * len(lengths))))
    return [
        rng.randint(1, min(MOST_CHUNKS_BEFORE_CANCEL, length)) if number in closed else None
        for number, length in enumerate(lengths)
    ]


def _prompt(sample: Sample, backend: str, place: MediaPlace) -> dict[str, Any]:
    if backend == "openai":
        if sample.shown or len(sample.messages) > 1:
            raise ConfigError("--backend openai takes one text per prompt; use --backend openai-chat for conversations")
        return {"prompt": sample.messages[0].text, "max_tokens": sample.output_tokens}
    messages = [{"role": message.role, "content": _content(message, place)} for message in sample.messages]
    return {"messages": messages, "max_completion_tokens": sample.output_tokens}


def _content(message: Message, place: MediaPlace) -> str | list[dict[str, Any]]:
    if all(isinstance(part, str) for part in message.parts):
        return message.text
    return [_part(part, place) for part in message.parts]


def _part(part: Part, place: MediaPlace) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = f"{part.kind}_url"
    return {"type": kind, kind: {"url": part.url if isinstance(part, Link) else place.url(part)}}
