"""Loads the prompts of a data set; each family of them has a file of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from mini_engine.bench.datasets import synthetic
from mini_engine.bench.datasets.records import Reader
from mini_engine.bench.datasets.sample import DataSettings, Prompts, Sample, repeat_order
from mini_engine.bench.datasets.sources import hf_records, read_json, shuffled

MAKERS: dict[str, Callable[[DataSettings, list[int]], list[Sample]]] = {
    "synthetic-video": lambda settings, order: synthetic.questions_about("video", settings, order),
    "synthetic-image": lambda settings, order: synthetic.questions_about("image", settings, order),
    "random-mm": synthetic.of_sizes,
    "text": synthetic.texts,
}


def load(settings: DataSettings) -> Prompts:
    """All prompts, and those to warm up with, whose media none of the others has where there are enough.

    Raises:
        ConfigError: something that was asked for cannot be used.
        BenchError: the data are not to be had.
    """
    each = settings.items_per_prompt
    order = repeat_order(settings.count * each, settings.unique_ratio, random.Random(settings.seed))
    order += range(max(order) + 1, max(order) + 1 + settings.warm_ups * each)
    notes: list[str] = []
    if settings.name in MAKERS:
        samples = MAKERS[settings.name](settings, order)
    else:
        found, notes = _read(settings, max(order) + 1)
        if len(found) <= max(order):
            notes.append(f"{len(found)} prompts are there and {max(order) + 1} were asked for: some are sent again")
        samples = [found[number % len(found)] for number in order]
    return Prompts(samples[: settings.count], samples[settings.count :], notes)


def _read(settings: DataSettings, wanted: int) -> tuple[list[Sample], list[str]]:
    path = str(settings.path)
    seed = settings.seed if settings.shuffle else None
    flag = {"sharegpt": "--sharegpt-output-len", "hf": "--hf-output-len"}.get(settings.name, "--output-len")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    reader = Reader(folder, settings.output_tokens, settings.tokenizer, flag)
    if settings.name == "hf":
        return reader.samples(hf_records(path, settings.split, seed), wanted)
    return reader.samples(shuffled(read_json(Path(path)), seed), wanted)
