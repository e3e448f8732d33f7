"""Where a request's time goes. Each moment of it belongs to one stage, so that the stages add up to the whole:

    arrival ► fetch ► admission ► media_decode ► process ► transport ► queue ► encode ► prefill ► generation ► end

and what lies between and beside them is `other`: reading the body, the chat template, text. The API server's part is
measured as it happens; the engine reports its part as times of the clock that all processes of a host share. Knows
nothing of HTTP or media.
"""

import time
from collections import Counter
from typing import Literal

from mini_engine import metrics
from mini_engine.messages import EngineTimes, FinishReason

Stage = Literal["admission", "fetch", "media_decode", "process", "transport", "other"]


class RequestClock:
    """One request's times and its end, counted once however it ends. Made when the request arrives. Belongs to the
    request's own task: it is at one stage at a time."""

    def __init__(self) -> None:
        self.failed = False  # an error was sent to the client, perhaps in a stream whose status was 200
        self.arrived = self._entered = time.monotonic()
        self.max_tokens = 0  # that each choice may have
        self._prompt = 0  # tokens
        self._generated: Counter[int] = Counter()  # tokens, by choice
        self._gaps, self._gap_seconds = 0, 0.0  # between tokens of one choice, of all choices
        self._last_token: dict[int, float] = {}  # when it arrived, by choice
        self._ended = False
        self._stage: Stage = "other"
        self._spent = dict.fromkeys((*metrics.stage_seconds, "other"), 0.0)

    def enter(self, stage: Stage) -> None:
        """From now on the request's time is spent at `stage`."""
        now = time.monotonic()
        self._spent[self._stage] += now - self._entered
        self._stage, self._entered = stage, now

    def move(self, seconds: float, source: Stage, target: Stage) -> None:
        """Count so much of `source` as `target`."""
        self._spent[source] -= seconds
        self._spent[target] += seconds

    def count_tokens(self, prompt: int, generated: int, index: int) -> None:
        """`generated` more tokens of choice `index`, of a prompt of so many, were delivered."""
        self._prompt = prompt
        if not generated:
            return
        now = time.monotonic()
        before, self._last_token[index] = self._last_token.get(index), now
        if before is not None:
            for _ in range(generated):
                metrics.inter_token_latency_seconds.observe((now - before) / generated)
            self._gaps += generated
            self._gap_seconds += now - before
        if not self._generated:
            metrics.time_to_first_token_seconds.observe(now - self.arrived)
        self._generated[index] += generated

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt, once there is something of the answer, and of all choices so far."""
        return self._prompt, self._generated.total()

    def end(self, reason: FinishReason | None, times: EngineTimes | None = None) -> None:
        """The request is finished; with `times` if there is something of an answer. Without a reason it is refused,
        which is not counted. Calls after the first have no effect."""
        if self._ended:
            return
        self._ended = True
        if reason is None:
            return
        metrics.request_success_total.labels(reason).inc()
        if times is None:
            return
        # Transport has lasted until the engine had accepted the request; since then the time is the engine's.
        now, spent = time.monotonic(), self._spent
        spent["transport"] += times.accepted - self._entered
        spent["queue"] = times.scheduled - times.accepted
        spent["encode"] = times.encoded - times.scheduled
        spent["prefill"] = times.first_token - times.encoded
        spent["generation"] = times.last_token - times.first_token
        spent["other"] += now - times.last_token
        if reason in ("abort", "error"):  # the metrics are of successful requests
            return
        metrics.e2e_request_latency_seconds.observe(now - self.arrived)
        metrics.request_prompt_tokens.observe(self._prompt)
        if self._generated:  # not an embedding or a score
            metrics.request_generation_tokens.observe(self._generated.total())
            metrics.request_max_num_generation_tokens.observe(max(self._generated.values()))
            metrics.request_params_max_tokens.observe(self.max_tokens)
        if self._gaps:
            metrics.request_time_per_output_token_seconds.observe(self._gap_seconds / self._gaps)
        for stage, histogram in metrics.stage_seconds.items():
            histogram.observe(spent[stage])

    def timings(self) -> dict[str, float]:
        """The seconds of each stage, to the microsecond, of a request that has ended with an answer."""
        return {stage: round(seconds, 6) for stage, seconds in self._spent.items()}

    def stages(self, whole: float) -> dict[str, float]:
        """The stages of a request of `whole` seconds that took a millisecond or more, the one in which it ended
        included; `rest` is the time after the last of them: until the response was sent, or, of a request that the
        engine had, without an answer."""
        last = "rest" if self._stage == "other" else self._stage
        stages = self._spent | {"rest": 0.0}
        stages[last] += whole - sum(self._spent.values())
        return {stage: round(seconds, 3) for stage, seconds in stages.items() if seconds >= 0.001}
