"""A cluster in simulated time, without Ray: 100 hosts, 10,000 videos whose popularity is Zipf's, four routing policies.

`python -m tests.cluster.simulation` prints the results and draws docs/plots/cluster-routing.png.
"""

import dataclasses
import heapq
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

from mini_engine.cluster.routing import preference, ranked
from mini_engine.core.caches.recent import Recent

PLOT = Path(__file__).parents[2] / "docs" / "plots" / "cluster-routing.png"
HOSTS, VIDEOS, REQUESTS = 100, 10_000, 30_000
CACHED_VIDEOS = 300  # that a host holds
DECODE_SECONDS, ANSWER_SECONDS = 1.5, 0.5
RATE = 1000.0  # requests per second: without decodes five in flight on each host
WARM = REQUESTS // 4  # after which loads are recorded
Loads = dict[str, int]
Policy = Callable[[str, Loads], str]


def names(count: int) -> list[str]:
    return [f"host-{number}" for number in range(count)]


def policies(random_: random.Random) -> dict[str, Policy]:
    """Each gives the host of a key. One that hashes without a bound is there to show what the bound is for."""
    turns = itertools.cycle(names(HOSTS))

    def power_of_two(_: str, loads: Loads) -> str:
        return min(random_.sample(list(loads), 2), key=loads.__getitem__)

    return {
        "round robin": lambda *_: next(turns),
        "power of two": power_of_two,
        "rendezvous": lambda key, loads: preference(key, loads)[0],
        "rendezvous, bounded load": lambda key, loads: ranked(key, loads)[0],
    }


@dataclasses.dataclass
class Result:
    """What one policy did with all requests."""

    decodes: int
    least_decodes: int  # with one cache for all: one per distinct video
    imbalance: float  # requests in flight of the busiest host, as a multiple of the mean; mean over the arrivals


class Host:
    """An LRU cache of videos."""

    def __init__(self) -> None:
        self.videos = Recent[int, bool](CACHED_VIDEOS)
        self.decodes = 0

    def serve(self, video: int) -> float:
        """Seconds for a request about this video."""
        if self.videos.get(video):
            return ANSWER_SECONDS
        self.videos.put(video, True)
        self.decodes += 1
        return ANSWER_SECONDS + DECODE_SECONDS


def simulate(name: str) -> Result:
    """All requests under one policy; the same requests for each."""
    random_ = random.Random(1)
    videos = random_.choices(range(VIDEOS), [1 / rank for rank in range(1, VIDEOS + 1)], k=REQUESTS)
    arrivals = list(itertools.accumulate(random_.expovariate(RATE) for _ in videos))
    choose = policies(random_)[name]
    hosts = {host: Host() for host in names(HOSTS)}
    loads = dict.fromkeys(hosts, 0)
    in_flight: list[tuple[float, str]] = []
    imbalances = []
    for number, (now, video) in enumerate(zip(arrivals, videos, strict=True)):
        while in_flight and in_flight[0][0] <= now:
            loads[heapq.heappop(in_flight)[1]] -= 1
        host = choose(f"video {video}", loads)
        loads[host] += 1
        heapq.heappush(in_flight, (now + hosts[host].serve(video), host))
        if number >= WARM:
            imbalances.append(max(loads.values()) * HOSTS / sum(loads.values()))
    decodes = sum(host.decodes for host in hosts.values())
    return Result(decodes, len(set(videos)), sum(imbalances) / len(imbalances))


def moved(before: int, after: int) -> float:
    """The share of keys that prefer another host when there are `after` hosts in place of `before`."""
    keys = [f"video {number}" for number in range(VIDEOS)]
    old, new = names(before), names(after)
    return sum(preference(key, old)[0] != preference(key, new)[0] for key in keys) / len(keys)


def draw(results: dict[str, Result]) -> None:
    """The picture of docs/cluster.md."""
    from matplotlib.figure import Figure

    figure = Figure((9, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    decodes = left.barh(list(results), [result.decodes for result in results.values()], color="0.55")
    left.axvline(next(iter(results.values())).least_decodes, color="black", linewidth=1, linestyle="--")
    left.bar_label(decodes, fmt="{:,.0f}", padding=3)
    left.set(xlabel=f"decodes of {REQUESTS:,} requests; dashed: distinct videos")
    busiest = right.barh(list(results), [result.imbalance for result in results.values()], color="0.55")
    right.bar_label(busiest, fmt="{:.1f}", padding=3)
    right.set(xlabel="requests in flight, busiest host / mean")
    for axis in (left, right):
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PLOT, dpi=80)


if __name__ == "__main__":
    results = {name: simulate(name) for name in policies(random.Random())}
    draw(results)
    moves = {"a host leaves": moved(HOSTS, HOSTS - 1), "a host joins": moved(HOSTS, HOSTS + 1)}
    print(json.dumps({name: dataclasses.asdict(result) for name, result in results.items()} | moves, indent=2))
