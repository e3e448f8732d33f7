"""Limits of an engine, and invalid requests: each fails alone, before any rank receives it."""

from __future__ import annotations

import msgspec
import pytest

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.core.request_limits import engine_limits, problem_with
from mini_engine.messages import MessageId, NewRequest, PoolingParams, SamplingParams
from tests.support.simulated_core import API, MODEL, TIMED, World, item

MESSAGE = MessageId(API[1], 1)
VIDEO = MODEL.video_token_id
replace = msgspec.structs.replace


def request(media, tokens=None, max_tokens=4) -> NewRequest:
    return NewRequest("r", tokens or [20, VIDEO, VIDEO, 21, 22, 23], SamplingParams(max_tokens, 1), media)


def barring(**fields) -> NewRequest:
    return NewRequest("r", [5, 6], SamplingParams(4, 1, min_tokens=2, **fields), [])


GOOD = item(MESSAGE, 1, 2, media_hash=b"x")

BAD = {
    "a grid of another size than the patches": request([replace(GOOD, grid_thw=(1, 2, 8), num_tokens=4)]),
    "a grid that cannot be merged": request([replace(GOOD, grid_thw=(1, 1, 8))]),
    "an empty grid": request([replace(GOOD, grid_thw=(0, 2, 4), num_tokens=0)]),
    "another number of tokens than the grid has": request([replace(GOOD, num_tokens=1)]),
    "patches of another width": request([replace(GOOD, patches=replace(GOOD.patches, shape=(8, 12)))]),
    "patches of another dtype": request([replace(GOOD, patches=replace(GOOD.patches, dtype="float32"))]),
    "beside its placeholders": request([replace(GOOD, offsets=[2])]),
    "past the end of the prompt": request([replace(GOOD, offsets=[5])]),
    "of the other modality": request([replace(GOOD, modality="image")]),
    "in more runs than it is placed in": request([replace(GOOD, offsets=[1, 2])]),
    "two on the same placeholders": request([GOOD, GOOD]),
    "placeholders without media": request([]),
    "a token outside of the vocabulary": request([], [5, MODEL.text.vocab_size]),
    "a negative token": request([], [5, -1]),
    "an end outside of the vocabulary": barring(stop_token_ids=[MODEL.text.vocab_size]),
    "a negative end": barring(stop_token_ids=[-1]),
    "a bias on what is outside of the vocabulary": barring(logit_bias={MODEL.text.vocab_size: 1.0}),
    "no token": NewRequest("r", [], SamplingParams(4, 1)),
    "no answer wanted": request([], [5, 6], max_tokens=0),
    "longer than the model": request([], [5] * 200, max_tokens=100),
    "a pooled prompt longer than the model": NewRequest("r", [5] * 257, pooling=PoolingParams()),
    "several outputs of a pooled prompt": NewRequest("r", [5], SamplingParams(2, 1), pooling=PoolingParams()),
    "a logit of a token outside of the vocabulary": NewRequest("r", [5], pooling=PoolingParams([-1])),
    "more logits than a step has memory for": NewRequest("r", [5], pooling=PoolingParams([5] * 17)),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_request_fails_alone(case):
    world = World()
    world.request("good", max_tokens=3)
    world.receive(BAD[case])
    world.media_ready(MESSAGE)
    world.run()
    assert world.ends == {"r": ["error"], "good": ["length"]}
    assert world.errors["r"]
    assert "r" not in world.links.started
    if BAD[case].media:
        assert world.consumed == [MESSAGE]
        world.assert_at_rest()


def test_a_video_in_runs_has_one_for_each_temporal_grid():
    limits = engine_limits(World().core.config, TIMED, 64, "cpu")
    tokens = [20, VIDEO, VIDEO, 21, 22, VIDEO, VIDEO, 23]
    good = item(MESSAGE, 1, 4, grids=2, gap=2)
    assert problem_with(request([good], tokens), TIMED, limits) is None
    wrong = {
        "1 runs of placeholders, not 2": replace(good, offsets=[1]),
        "3 runs of placeholders, not 2": replace(good, offsets=[1, 5, 6]),
        "item 1 does not match its placeholders": replace(good, offsets=[1, 4]),
        "does not match its placeholders": replace(good, offsets=[5, 1]),
    }
    for problem, media in wrong.items():
        assert problem in problem_with(request([media], tokens), TIMED, limits)


def test_max_model_len_beyond_the_kv_cache_is_an_error_if_set_else_reduced(caplog):
    assert engine_limits(EngineConfig(max_model_len=64), MODEL, num_blocks=4, device="cpu").max_model_len == 64
    assert not caplog.text
    assert engine_limits(EngineConfig(), MODEL, num_blocks=4, device="cuda").max_model_len == 64
    assert "limited to that instead of 65536" in caplog.text
    with pytest.raises(ConfigError, match="--max-model-len: the KV cache holds 64 tokens, not 65; raise .* or lower"):
        engine_limits(EngineConfig(max_model_len=65), MODEL, num_blocks=4, device="cpu")
