"""A line in the log with the figures of the whole server, every ten seconds in which something ran.

The API server in the first slot writes it, from the files by which `/metrics` sums over all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from mini_engine import metrics

if TYPE_CHECKING:
    from mini_engine.api.engine_client import EngineClient

logger = logging.getLogger(__name__)

SECONDS = 10.0


class Stats:
    """What has happened between one look at the figures and the next."""

    def __init__(self) -> None:
        self._before = metrics.samples()
        self._looked_at = time.monotonic()

    def line(self) -> str | None:
        """Throughputs and hit rates since the last look, and how full the engines are; None when nothing ran."""
        before, self._before = self._before, metrics.samples()
        begun, self._looked_at = self._looked_at, time.monotonic()
        seconds = self._looked_at - begun

        def since(name: str) -> float:
            return sum(self._before.get(name, ())) - sum(before.get(name, ()))

        def rate(kind: str) -> str:
            queries = since(f"{kind}_queries_total")
            return f"{since(f'{kind}_hits_total') / queries:.0%}" if queries else "-"

        prompt, generated = since("prompt_tokens_total"), since("generation_tokens_total")
        running, waiting = (sum(self._before.get(f"num_requests_{state}", ())) for state in ("running", "waiting"))
        if not (prompt or generated or running or waiting):
            return None
        usage = self._before.get("kv_cache_usage_perc") or [0.0]
        return (
            f"prompts {prompt / seconds:.1f} tokens/s, answers {generated / seconds:.1f} tokens/s, "
            f"{running:.0f} running, {waiting:.0f} waiting, KV cache {sum(usage) / len(usage):.1%} in use; "
            f"hits: prefix cache {rate('prefix_cache')}, media cache {rate('mm_cache')}, "
            f"encoder cache {rate('encoder_cache')}"
        )


async def log_stats(engines: EngineClient) -> None:
    """Log the lines until cancelled."""
    stats: Stats | None = None
    while True:
        try:
            if stats is None:
                stats = Stats()  # at once: what runs from now on is in the first line
            elif (line := await asyncio.to_thread(stats.line)) is not None:
                logger.info("%s", line)
        except OSError as error:  # no descriptor is free: the next line counts it all
            logger.debug("the figures cannot be read now: %s", error)
        await asyncio.sleep(SECONDS)
        await engines.refresh_figures()
