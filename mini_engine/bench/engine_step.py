"""The engine's own share of a decode step: what a step takes beyond the model's own time.

The regime. Batches of 1, 8, 32 and 64 sequences decode on the bundled model, T = 1, one torch thread, no API server.
    step      wall time of a step as the running engine achieves it: real core and worker processes (`engine_alone.py`)
              are sent text prompts of 16 tokens, and while all sequences decode, the time between two arrivals of
              tokens is divided by the tokens of one sequence between them. With --async-scheduling and without.
    forward   the model's part of those same steps: embedding, layers, attention over the paged cache, logits. A
              stopwatch inside the engine's worker tells it (`timed_child.py`).
    alone     the same batch at the same lengths in the benchmark's process, one-core work without any message
              (`worker_alone.py`): the model's part, also called forward, and the worker's whole part, execute: that
              and the layout of the batch, sampling, tokens to Python.
Each is measured in turn, five times over, and the medians count; so drift of the machine hits all alike. Step minus
the forward inside the engine is the engine's own share. Alone, execute minus forward is how much of it is the
worker's; the rest is messages, scheduling and waking up. CPU time of the core's and the worker's main threads, a step,
comes from the kernel, and so does the time for which they were ready to run but had no core: where that is much, the
machine was busy with something else.

What it should cost. The bundled model reads 0.9 M weights a step (4 MB) and does 1.8 MFLOP a token: batch 1 is ruled by
some 100 operators of 5 us each, 0.6 ms; batch 32 by 60 MFLOP plus attention, 1.5 to 2 ms. The worker's own part is a
few arrays and one argmax, 0.1 ms and 1 us a sequence. Sync adds two hops over a unix socket with a wake-up each (0.1
ms a hop) and the scheduler, 2 us a sequence: 0.3 to 0.5 ms in all. Async hides both behind the running step: step is
at most 1.1 forward at batch 32, if the worker's own part is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Any

from mini_engine import cli
from mini_engine.bench.engine_alone import Arrival, EngineAlone
from mini_engine.bench.report import BenchError, say, table
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.messages import NewRequest, SamplingParams
from mini_engine.model.config import ModelConfig

PROMPT_TOKENS = 16
WARM_UP_STEPS = 10
MODES = ("sync", "async")
TARGET_BATCH, TARGET_RATIO = 32, 1.1


@dataclasses.dataclass
class Samples:
    """Milliseconds of each figure, one for each repeat."""

    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.values.setdefault(name, []).append(1000 * seconds)

    def median(self, name: str) -> float:
        return round(statistics.median(self.values[name]), 4)

    def extremes(self, name: str) -> list[float]:
        return [round(min(self.values[name]), 4), round(max(self.values[name]), 4)]


def measure(flags: Sequence[str], batches: Sequence[int], steps: int, repeats: int) -> dict[str, Any]:
    """Start both engines, measure all batches, stop; returns the figures.

    Raises:
        ConfigError: flags that do not fit this regime.
    """
    config = engine_config(flags, max(batches))
    from mini_engine.bench.worker_alone import WorkerAlone  # imports torch

    say("starting the engines", "core step")
    worker = WorkerAlone(config)
    samples = {batch: Samples() for batch in batches}
    with contextlib.ExitStack() as stack:
        engines = {
            mode: stack.enter_context(EngineAlone(dataclasses.replace(config, async_scheduling=mode == "async")))
            for mode in MODES
        }
        requests = Requests(config)
        for repeat, batch in itertools.product(range(repeats), batches):
            say(f"repeat {repeat + 1} of {repeats}, batch {batch}", "core step")
            alone = worker.decode(requests.make(batch, steps), WARM_UP_STEPS, steps)
            for name, seconds in dataclasses.asdict(alone).items():
                samples[batch].add(name, seconds)
            for mode, engine in engines.items():
                _measure_engine(engine, mode, requests.make(batch, steps), samples[batch])
    return {
        "steps": steps,
        "repeats": repeats,
        "prompt_tokens": PROMPT_TOKENS,
        "batches": [_figures(batch, samples[batch]) for batch in batches],
        "target": {"batch": TARGET_BATCH, "async_over_forward": TARGET_RATIO},
    }


def engine_config(flags: Sequence[str], largest: int) -> EngineConfig:
    """The configuration for flags of `serve.py`.

    Raises:
        ConfigError: more than one worker, or batches that the flags do not allow.
    """
    config = cli.parse(flags)
    if config.tensor_parallel_size != 1 or config.data_parallel_size != 1:
        raise ConfigError("core --part step measures one worker: leave out -tp and -dp")
    if config.max_num_seqs < largest:
        raise ConfigError(f"--batches {largest} needs --launch '--max-num-seqs {largest}' or more")
    return config


class Requests:
    """Makes prompts, no two alike, so that no prefix cache helps; every one decodes to its full length."""

    def __init__(self, config: EngineConfig):
        from mini_engine.host import resolve_model

        self._vocabulary = min(ModelConfig.from_dir(resolve_model(config)).text.vocab_size, 256)
        self._random = random.Random(0)
        self._numbers = itertools.count()

    def make(self, batch: int, steps: int) -> list[NewRequest]:
        """`batch` requests that decode together for at least `steps` steps after `WARM_UP_STEPS`."""
        # The engine may start them one step after the other: the first must not end before the last is warm.
        sampling = SamplingParams(max_tokens=steps + 2 * WARM_UP_STEPS, seed=0, temperature=0.0)
        return [
            NewRequest(f"bench-{next(self._numbers)}", self._random.choices(range(self._vocabulary), k=PROMPT_TOKENS),
                       sampling)
            for _ in range(batch)
        ]  # fmt: skip


def _measure_engine(engine: EngineAlone, mode: str, requests: Sequence[NewRequest], samples: Samples) -> None:
    generation = engine.generate(requests, WARM_UP_STEPS)
    samples.add(mode, step_seconds(generation.arrivals, len(requests)))
    steps = generation.steps_after_warm(len(requests))
    samples.add(f"{mode} forward", generation.model_seconds / steps)
    for name, kind in (("core 0", "core"), ("worker 0.0", "worker")):
        samples.add(f"{mode} {kind} cpu", generation.after_warm[name].cpu / steps)
        samples.add(f"{mode} {kind} wait", generation.after_warm[name].wait / steps)


def step_seconds(arrivals: Sequence[Arrival], batch: int) -> float:
    """Seconds for one token of every sequence, from the arrival at which all were warm to the last before the first
    of them ended.

    Raises:
        BenchError: there are no two such arrivals.
    """
    produced: dict[str, int] = {}
    marks: list[tuple[float, int]] = []  # when, and all tokens so far
    for when, outputs in arrivals:
        for output in outputs.outputs:
            produced[output.request_id] = produced.get(output.request_id, 0) + len(output.token_ids)
        if any(output.finish_reason is not None for output in outputs.outputs):
            break
        if len(produced) == batch and min(produced.values()) > WARM_UP_STEPS:
            marks.append((when, sum(produced.values())))
    if len(marks) < 2:
        raise BenchError(f"the {batch} sequences never decoded together; raise --steps")
    (begun, first), (ended, last) = marks[0], marks[-1]
    return (ended - begun) / ((last - first) / batch)


def _figures(batch: int, samples: Samples) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "batch": batch,
        "forward_ms": samples.median("forward"),
        "execute_ms": samples.median("execute"),
        "forward_cpu_ms": samples.median("forward_cpu"),
        "execute_cpu_ms": samples.median("execute_cpu"),
        "forward_range_ms": samples.extremes("forward"),
    }
    for mode in MODES:
        pairs = zip(samples.values[mode], samples.values[f"{mode} forward"], strict=True)
        cpu_ratio = samples.median(f"{mode} worker cpu") / samples.median("forward_cpu")
        figures[mode] = {
            "step_ms": samples.median(mode),
            "step_range_ms": samples.extremes(mode),
            "forward_ms": samples.median(f"{mode} forward"),
            "own_ms": round(samples.median(mode) - samples.median(f"{mode} forward"), 4),
            "worker_cpu_over_forward_cpu": round(cpu_ratio, 3),
            "over_forward": round(statistics.median(step / model for step, model in pairs), 3),
            **{
                f"{kind}_{what}_ms": samples.median(f"{mode} {kind} {what}")
                for kind in ("core", "worker") for what in ("cpu", "wait")
            },
        }  # fmt: skip
    return figures


def describe(figures: dict[str, Any]) -> str:
    """The table for people."""
    times = [
        [row["batch"], mode, row["forward_ms"], row["execute_ms"],
         *(row[mode][name] for name in ("forward_ms", "step_ms", "own_ms", "over_forward"))]
        for row in figures["batches"] for mode in MODES
    ]  # fmt: skip
    spent = [
        [row["batch"], mode, row["forward_cpu_ms"], row["execute_cpu_ms"],
         *(row[mode][name] for name in ("worker_cpu_ms", "worker_wait_ms", "core_cpu_ms", "core_wait_ms",
                                         "worker_cpu_over_forward_cpu"))]
        for row in figures["batches"] for mode in MODES
    ]  # fmt: skip
    found = [row["async"]["over_forward"] for row in figures["batches"] if row["batch"] == TARGET_BATCH]
    return "\n".join(
        [
            "",
            "core step: the engine's own share of a decode step, T = 1, one torch thread, no API server",
            f"Milliseconds a step, medians of {figures['repeats']} times {figures['steps']} steps.",
            "alone: the model, and the worker's part of a step, by themselves in the benchmark's process;",
            "in the engine: the model's time (forward) and the wall time of a step as the engine runs;",
            "own: step - forward; ratio: step / forward in the engine, median of each time's.",
            "",
            table(["batch", "mode", "alone: forward", "execute", "engine: forward", "step", "own", "ratio"], times),
            "",
            "The same in time on a CPU. wait: ready to run, but another program had the CPU; where that is not near 0,",
            "the wall times above are too long, and worker/forward is what async step/forward would be without.",
            "",
            table(["batch", "mode", "forward", "execute", "worker", "wait", "core", "wait", "worker/forward"], spent),
            "",
            *(f"async step / forward at batch {TARGET_BATCH}: {ratio:.3f} (target: at most {TARGET_RATIO})"
              for ratio in found),
        ]
    )  # fmt: skip
