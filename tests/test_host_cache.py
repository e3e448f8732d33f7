"""How much of the host's memory the media cache gets."""

import pytest

from mini_engine import host
from mini_engine.config import ConfigError, EngineConfig
from mini_engine.core.media_store import media_directory
from mini_engine.messages import CachedMedia, Init

SMALLEST = host.SMALLEST_MEDIA_CACHE / (1 << 30)  # GiB


@pytest.mark.parametrize(("kind", "count"), [("shm", {"data_parallel_size": 3}), ("lru", {"tensor_parallel_size": 1})])
def test_a_cache_that_passes_the_plan_can_be_started(kind, count) -> None:
    holders = count.get("data_parallel_size", 1)
    config = EngineConfig(mm_processor_cache_type=kind, mm_processor_cache_gb=holders * SMALLEST, **count)
    plan = host.plan_media_cache(config)
    assert plan.kind == kind and plan.nbytes == host.SMALLEST_MEDIA_CACHE
    media = media_directory(Init(config, "", "", [], [], [], plan), 1024, "cpu")
    facts = CachedMedia(bytes(16), "image", 1, (1, 1, 1), None)
    assert kind == "lru" or media.reserve((1, "r"), facts).outcome == "reserved"
    too_small = EngineConfig(mm_processor_cache_type=kind, mm_processor_cache_gb=holders * 0.9 * SMALLEST, **count)
    with pytest.raises(ConfigError, match="--mm-processor-cache-gb: .* too few, each needs 262144; raise it"):
        host.plan_media_cache(too_small)
