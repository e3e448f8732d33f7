import time
from typing import Any

from mini_engine.media.hashing import media_hash, settings_key
from mini_engine.media.processor import MediaProcessor
from mini_engine.media.sampling import VideoSampling


def key(**changed: Any) -> bytes:
    settings: dict[str, Any] = {
        "modality": "video",
        "sampling": VideoSampling(num_frames=8),
        "processor_kwargs": {"max_pixels": 10, "min_pixels": 1},
        "model": ("a", None),
    }
    return settings_key(**settings | changed)


def test_equal_bytes_under_equal_settings() -> None:
    assert media_hash(b"abc", key()) == media_hash(b"abc", key())
    assert len(media_hash(b"abc", key())) == 16
    assert media_hash(b"abc", key()) != media_hash(b"abd", key())
    assert key(processor_kwargs={"min_pixels": 1, "max_pixels": 10}) == key()
    assert key(sampling=VideoSampling(fps=2)) == key(sampling=VideoSampling(fps=2.0))


def test_whatever_changes_the_patches_changes_the_hash() -> None:
    keys = [
        key(),
        key(modality="image"),
        key(sampling=None),
        key(sampling=VideoSampling(num_frames=9)),
        key(sampling=VideoSampling(fps=8)),
        key(sampling=VideoSampling(num_frames=8, start=1.0)),
        key(sampling=VideoSampling(num_frames=8, end=1.0)),
        key(processor_kwargs={"size": {"longest_edge": 10}}),
        key(processor_kwargs={}),
        key(processor_kwargs={"max_pixels": 11, "min_pixels": 1}),
        key(model=("b", None)),
        key(model=("a", "main")),
        key(model=("a", "None")),
    ]
    assert len({media_hash(b"abc", one) for one in keys}) == len(keys)


def test_a_requests_own_settings_have_their_own_hash(processor: MediaProcessor) -> None:
    server = processor.settings(VideoSampling(num_frames=8))

    def of(video_io: dict[str, Any], kwargs: dict[str, Any]) -> bytes:
        settings = processor.narrowed(server, video_io, kwargs, 100)
        return key(sampling=settings.sampling, processor_kwargs=settings.processor_kwargs)

    plain = key(sampling=server.sampling, processor_kwargs=server.processor_kwargs)
    assert of({}, {}) == of({"num_frames": 8}, {}) == of({}, {"num_frames": 8}) == plain
    others = [of({"num_frames": 4}, {}), of({"start": 1}, {}), of({}, {"max_pixels": 784}), of({}, {"min_pixels": 784})]
    assert len({plain, *others}) == 5
    started = time.thread_time()
    for _ in range(200):
        of({"num_frames": 4, "start": 1.5}, {"size": {"longest_edge": 3136}})
    assert (time.thread_time() - started) / 200 < 0.002  # seconds of work: little beside one request


def test_settings_that_read_alike_when_strung_together() -> None:
    assert key(model=("ab", "c")) != key(model=("a", "bc"))
    assert key(model=('a", "b', "c")) != key(model=("a", 'b", "c'))
