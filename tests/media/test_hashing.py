from typing import Any

from mini_engine.media.hashing import media_hash, settings_key
from mini_engine.media.sampling import VideoSampling

KWARGS = {"max_pixels": 10, "min_pixels": 1}


def key(sampling: Any = 8, kwargs: Any = KWARGS, model: Any = ("a", None), modality: Any = "video") -> bytes:
    sampling = VideoSampling(num_frames=sampling) if isinstance(sampling, int) else sampling
    return settings_key(modality, sampling, kwargs, model)


def test_equal_bytes_and_settings_have_the_same_hash() -> None:
    assert media_hash(b"abc", key()) == media_hash(b"abc", key(kwargs=dict(reversed(KWARGS.items()))))


def test_bytes_and_every_setting_change_the_hash() -> None:
    samplings = [None, VideoSampling(fps=8), *(VideoSampling(num_frames=8, **{name: 1.0}) for name in ("start", "end"))]
    models = [("b", None), ("a", "main"), ("a", "None"), ("ab", "c"), ("a", "bc"), ('a", "b', "c"), ("a", 'b", "c')]
    keys = [key(), key(9), key(modality="image"), *map(key, samplings), *(key(model=model) for model in models)]
    keys += [key(kwargs=kwargs) for kwargs in ({}, {"size": {"longest_edge": 10}}, KWARGS | {"max_pixels": 11})]
    hashes = {media_hash(b"abc", one) for one in keys} | {media_hash(b"abd", key())}
    assert len(hashes) == len(keys) + 1 and {len(one) for one in hashes} == {16}
