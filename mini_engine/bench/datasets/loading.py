"""Loads the prompts of a data set; each family of them has a file of its own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from mini_engine.bench.datasets import synthetic
from mini_engine.bench.datasets.records import Reader
from mini_engine.bench.datasets.sample import DataSettings, Prompts, Sample, draws, repeat_order
from mini_engine.bench.datasets.sources import hf_records, read_json, shuffled

MAKERS: dict[str, Callable[[DataSettings, list[int]], list[Sample]]] = {
    "synthetic-video": lambda settings, order: synthetic.questions_about("video", settings, order),
    "synthetic-image": lambda settings, order: synthetic.questions_about("image", settings, order),
    "random-mm": synthetic.of_sizes,
    "random": synthetic.texts,
    "text": synthetic.texts,
}


def load(settings: DataSettings) -> Prompts:
    """All prompts, and those to warm up with, whose media none of the others has.

    Raises:
        ConfigError: something that was asked for cannot be used.
        BenchError: the data are not to be had.
    """
    each = settings.items_per_prompt
    order = repeat_order(settings.count * each, settings.unique_ratio, draws(settings.seed, "repeats"))
    unique = max(order) + 1
    if settings.name in MAKERS:
        samples = MAKERS[settings.name](settings, [*order, *range(unique, unique + settings.warm_ups * each)])
        return Prompts(samples[: settings.count], samples[settings.count :], [])
    found, notes = _read(settings, unique + settings.warm_ups)
    if len(found) < unique and not settings.oversample:
        notes.append(f"{len(found)} prompts are there and {unique} were asked for: each is sent once")
        order = list(range(len(found)))
    elif len(found) < unique:
        notes.append(f"{len(found)} prompts are there and {unique} were asked for: some are sent again")
    samples = [found[number % min(unique, len(found))] for number in order]
    warm_ups = _with_other_media(found[unique:], samples)
    if missing := settings.warm_ups - len(warm_ups):
        made = _made_like(samples[0], settings, missing)
        notes.append(
            f"no other records are left to warm up with: {missing} of {settings.warm_ups} warm-ups are made here"
        )
        warm_ups += made
    return Prompts(samples, warm_ups, notes)


def _with_other_media(found: list[Sample], samples: list[Sample]) -> list[Sample]:
    """Those of `found` that show nothing of what `samples` show."""
    shown = {part for sample in samples for part in sample.shown}
    return [sample for sample in found if shown.isdisjoint(sample.shown)]


def _made_like(sample: Sample, settings: DataSettings, count: int) -> list[Sample]:
    """Prompts made here, with a medium of the kind that `sample` shows, or with none if it shows none."""
    name = f"synthetic-{sample.shown[0].kind}" if sample.shown else "text"
    return MAKERS[name](dataclasses.replace(settings, output_tokens=sample.output_tokens), list(range(count)))


def _read(settings: DataSettings, wanted: int) -> tuple[list[Sample], list[str]]:
    path = str(settings.path)
    seed = settings.seed if settings.shuffle else None
    flag = {"sharegpt": "--sharegpt-output-len", "hf": "--hf-output-len"}.get(settings.name, "--output-len")
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    reader = Reader(folder, settings.output_tokens, settings.tokenizer, flag)
    if settings.name == "hf":
        return reader.samples(hf_records(path, settings.subset, settings.split, seed), wanted)
    return reader.samples(shuffled(read_json(Path(path)), seed), wanted)
