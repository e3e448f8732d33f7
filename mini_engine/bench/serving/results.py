"""What a run leaves in files: one JSON object by vLLM's keys, and a line of JSON for each request."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from mini_engine.bench.files import write_text
from mini_engine.bench.report import surroundings
from mini_engine.bench.serving.client import Outcome
from mini_engine.bench.serving.figures import tokens_by_second
from mini_engine.bench.serving.load import Run
from mini_engine.bench.serving.measure import Measured
from mini_engine.bench.serving.settings import Settings


def save(settings: Settings, measured: Measured, config: dict[str, Any], part: str = "") -> list[Path]:
    """Write the files that were asked for; returns them. `config` are the flags as given; `part` tells one of several
    runs from the others, in the files' names.
    """
    path = settings.output.result_dir / (settings.output.result_filename or _filename(settings, measured.model))
    if part:
        path = path.with_stem(f"{path.stem}-{part}")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = as_result(settings, measured, config)
    if not settings.output.save_detailed:
        write_text(path, json.dumps(result) + "\n")
        return [path]
    write_text(path, json.dumps(result | details(measured.run)) + "\n")
    lines = path.with_suffix(".jsonl")
    write_text(lines, "".join(json.dumps(request_line(one, measured.run)) + "\n" for one in measured.run.outcomes))
    return [path, lines]


def as_result(settings: Settings, measured: Measured, config: dict[str, Any]) -> dict[str, Any]:
    """The figures, under vLLM's names where it has them, and what was measured on what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": settings.backend,
        "endpoint_type": settings.backend,
        "label": settings.output.label,
        "model_id": measured.model,
        "tokenizer_id": settings.tokenizer or measured.model,
        "num_prompts": settings.data.count,
        **settings.output.metadata,
        "burstiness": settings.burstiness,
        **measured.figures,
        "config": config,
        **surroundings(settings.launch is not None),
    }


def details(run: Run) -> dict[str, Any]:
    """Each request's part, in lists in the order of the prompts; times in seconds."""
    outcomes = run.outcomes
    return {
        "input_lens": [one.prompt_tokens for one in outcomes],
        "output_lens": [one.output_tokens for one in outcomes],
        "start_times": [one.begun - run.begun for one in outcomes],
        "ttfts": [one.ttft if one.chunks else 0.0 for one in outcomes],
        "itls": [one.itls for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [one.error or "" for one in outcomes],
        "output_tokens_by_second": tokens_by_second(run),
    }


def request_line(one: Outcome, run: Run) -> dict[str, Any]:
    """One request for the JSONL file; times in seconds, None for what it has not come to."""
    return {
        "number": one.number,
        "start": one.begun - run.begun,
        "end": one.ended - run.begun,
        "ttft": one.ttft if one.chunks else None,
        "tpot": one.tpot if one.ok else None,
        "e2el": one.e2el if one.ok else None,
        "itls": one.itls,
        "input_tokens": one.prompt_tokens,
        "output_tokens": one.output_tokens,
        "text": one.text,
        "right": one.right,
        "stages": one.stages,
        "cancelled": one.cancelled,
        "error": one.error,
    }


def _filename(settings: Settings, model: str) -> str:
    rate = f"{settings.request_rate:g}qps"
    limit = f"-concurrency{settings.max_concurrency}" if settings.max_concurrency else ""
    when = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{settings.output.label or settings.backend}-{rate}{limit}-{Path(model).name}-{when}.json"
