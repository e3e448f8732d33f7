"""Sampling parameters of a request: its own, over the defaults of the server and the model."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from mini_engine import demo
from mini_engine.config import ConfigError
from mini_engine.messages import ChildRequest
from mini_engine.prompt.renderer import Prompt
from mini_engine.prompt.sampling_params import MOST_LISTED, SamplingDefaults, SamplingResolver
from mini_engine.protocol.api_errors import ApiError
from mini_engine.protocol.bodies import ChatRequest, CompletionRequest


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def resolver(defaults: SamplingDefaults | None = None, seed: int = 0, incarnation: int = 1) -> SamplingResolver:
    return SamplingResolver(defaults or SamplingDefaults(eos_token_id=[7]), 100, 50, seed, incarnation)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    own = {"temperature": 0.5, "top_k": 20, "top_p": None, "min_p": 0.05, "max_new_tokens": 9, "eos_token_id": [5, 6]}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 5}}))
    return tmp_path


def test_defaults_of_the_model(model_dir: Path) -> None:
    defaults = SamplingDefaults.load(str(model_dir), "auto")
    assert defaults == SamplingDefaults(0.5, 1.0, 20, 0.05, 1.0, 9, [5, 6, 7])
    assert SamplingDefaults.load(str(model_dir), "vllm") == SamplingDefaults(eos_token_id=[5, 6, 7])


def test_defaults_of_another_directory(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(ConfigError, match="--generation-config"):
        SamplingDefaults.load(str(model_dir), str(other))
    (other / "generation_config.json").write_text('{"top_p": 0.25}')
    assert SamplingDefaults.load(str(model_dir), str(other)).top_p == 0.25


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "is not JSON"), ("[1]", "is not a JSON object; download it again")]
)
def test_defaults_that_cannot_be_read_are_named(text: str, problem: str, model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"generation_config.json {problem}"):
        SamplingDefaults.load(str(model_dir), "auto")


def test_the_request_goes_over_the_defaults() -> None:
    defaults = SamplingDefaults(0.5, 0.9, 20, 0.05, 1.2, 9, (7,))
    params = resolver(defaults).resolve(chat(), 10)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.5, 0.9, 20, 1.2)
    assert (params.min_p, params.max_tokens, params.stop_token_ids) == (0.05, 9, [7])
    given = chat(temperature=1.5, top_p=0.1, top_k=-1, min_p=0, repetition_penalty=1, max_completion_tokens=3, seed=4)
    params = resolver(defaults).resolve(given, 10)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.5, 0.1, 0, 1)
    assert (params.min_p, params.max_tokens, params.seed) == (0, 3, 4)


@pytest.mark.parametrize("fields", [{"temperature": 1e-6, "top_p": 0.5, "top_k": 3}, {"temperature": 1, "top_p": 0}])
def test_temperature_or_top_p_near_zero_is_greedy(fields: dict[str, Any]) -> None:
    params = resolver(SamplingDefaults(min_p=0.05)).resolve(chat(**fields), 10)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_stop_tokens_are_those_of_the_request_and_the_ends_that_the_model_can_sample() -> None:
    """A rank has no logits to bar others by before `min_tokens`: they ended the engine."""
    assert resolver().resolve(chat(stop_token_ids=[9, 7]), 1).stop_token_ids == [7, 9]
    ends = resolver(SamplingDefaults(eos_token_id=[-1, 7, 49, 50, 10**9]))
    assert ends.resolve(chat(min_tokens=5), 1).stop_token_ids == [7, 49]


def test_prompt_with_a_token_that_only_the_tokenizer_has_is_a_400() -> None:
    assert resolver().new_request(Prompt(chat(), [0, 49]), "r").prompt_token_ids == [0, 49]
    with pytest.raises(ApiError, match="Invalid 'messages': token id 50 out of range") as caught:
        resolver().new_request(Prompt(chat(), [0, 50]), "r")
    assert (caught.value.status, caught.value.body.param) == (400, "messages")


BIRDS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BIRDS}}}, '{"n": 3}', "{}"),
        ({"response_format": {"type": "json_object"}}, '{"a": [1,2]}', "[1]"),
        ({"response_format": {"type": "json_object", "schema": {"enum": ["a"]}}}, '"a"', '{"a": 1}'),
        ({"structured_outputs": {"json": BIRDS}, "response_format": {"type": "text"}}, '{"n":0}', '{"n":  0}'),
        ({"structured_outputs": {"regex": "a+|b"}}, "aaa", "ab"),
        ({"structured_outputs": {"choice": ['say "é"', ""]}}, 'say "é"', "say"),
        ({"structured_outputs": {"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]+/'}}, "x12", "12"),
    ],
)
def test_structured_output_becomes_a_grammar_that_an_end_completes(fields: Any, good: str, bad: str) -> None:
    request = chat(**fields, ignore_eos=True)
    resolver().check(request)
    new = resolver().new_request(Prompt(request, [0]), "r")
    tokenizer = LLTokenizer(str(Path(demo.__file__).parent / "weights" / "tokenizer.json"))
    for text in (good, bad):
        matcher, tokens = LLMatcher(tokenizer, new.grammar), tokenizer.tokenize_str(text)
        assert (matcher.consume_tokens(tokens) and matcher.is_accepting()) == (text == good)
    assert new.sampling.grammar and new.sampling.stop_token_ids == [7]


@pytest.mark.parametrize(
    ("fields", "most", "least"),
    [
        ({}, 9, 0),
        ({"max_tokens": 10}, 10, 0),
        ({"max_completion_tokens": 1_000_000}, 10, 0),
        ({"max_tokens": 65_536, "min_tokens": 11}, 10, 10),
        ({"min_tokens": 10}, 10, 10),  # a default limits no request that asks for more
    ],
)
def test_length_of_the_answer_is_at_most_the_room_that_the_prompt_leaves(fields: Any, most: int, least: int) -> None:
    params = resolver(SamplingDefaults(max_new_tokens=9)).resolve(chat(**fields), 90)
    assert (params.max_tokens, params.min_tokens) == (most, least)
    with pytest.raises(ApiError, match="the prompt has 100 tokens"):
        resolver().resolve(chat(**fields), 100)


def test_log_probabilities_of_all_choices_together_are_bounded() -> None:
    large = SamplingResolver(SamplingDefaults(), 10**7, 50, 0, 1)
    listed = {"logprobs": True, "top_logprobs": 20}
    assert large.max_tokens(chat(**listed), 1) * 21 <= MOST_LISTED < (large.max_tokens(chat(**listed), 1) + 1) * 21
    assert large.max_tokens(chat(**listed, n=128, max_tokens=10**6), 1) == MOST_LISTED // (21 * 128)
    assert large.max_tokens(chat(**listed, n=128, max_tokens=5), 1) == 5


def test_log_probabilities_of_prompts_count_too() -> None:
    large = SamplingResolver(SamplingDefaults(), 10**7, 50, 0, 1)
    echo = msgspec.convert({"prompt": ["x", "y"], "echo": True, "logprobs": 4, "max_tokens": 10**7}, CompletionRequest)
    assert large.max_tokens(echo, 1000, other_tokens=1000) == MOST_LISTED // (5 * 2) - 1000
    for tokens in (1, MOST_LISTED // (5 * 2), MOST_LISTED // 5 - 1):  # a short prompt leaves room for a long one
        others = MOST_LISTED // 5 - tokens
        assert large.max_tokens(echo, tokens, other_tokens=others) == 1
        with pytest.raises(ApiError, match="more than 1500000, all choices together"):
            large.max_tokens(echo, tokens, other_tokens=others + 1)
    with pytest.raises(ApiError, match="more than 1500000"):
        large.max_tokens(chat(prompt_logprobs=20), MOST_LISTED // 21 + 1)
    assert large.max_tokens(chat(prompt_logprobs=20, n=128), MOST_LISTED // 21) > 1, "a chat's prompt is listed once"
    assert large.resolve(chat(prompt_logprobs=20), 1).prompt_logprobs == 20
    assert SamplingResolver(SamplingDefaults(), 100, 5, 0, 1).resolve(chat(prompt_logprobs=20), 1).prompt_logprobs == 5
    assert large.resolve(chat(logprobs=True), 1).prompt_logprobs is None


def test_prompt_alone_may_be_as_long_as_the_model() -> None:
    """The engine samples one token, which the response does not have."""
    alone = msgspec.convert({"prompt": "x", "echo": True, "max_tokens": 0}, CompletionRequest)
    assert (resolver().resolve(alone, 100).max_tokens, resolver().resolve(alone, 5).max_tokens) == (1, 1)
    with pytest.raises(ApiError, match="the prompt has 101 tokens"):
        resolver().resolve(alone, 101)


def test_seeds_are_drawn_by_server_seed_and_incarnation() -> None:
    def seeds(**settings: int) -> list[int]:
        sampling = resolver(**settings)
        return [sampling.resolve(chat(), 1).seed for _ in range(3)]

    assert seeds() == seeds()
    assert len({*seeds(), *seeds(incarnation=2), *seeds(seed=1)}) == 9
    request = resolver().new_request(Prompt(chat(seed=2**63 - 2, n=3), [0]), "r")
    assert request.children == [ChildRequest("r-1", 2**63 - 1), ChildRequest("r-2", 0)]
    assert resolver().resolve(chat(seed=-1), 1).seed == 2**63 - 1
