"""Sampling parameters: the request's own values, else the model's defaults, else the server's.

The defaults come from the model's `generation_config.json`, as in vLLM: temperature, top_p, top_k, min_p,
repetition_penalty and max_new_tokens apply, `do_sample` does not. Knows nothing of HTTP or of the sampler.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from mini_engine.config import ConfigError, read_json_object
from mini_engine.messages import ChildRequest, MediaItem, NewRequest, SamplingParams
from mini_engine.prompt.renderer import Prompt
from mini_engine.protocol.api_errors import bad_request, prompt_too_long
from mini_engine.protocol.bodies import CompletionRequest, GenerationRequest

MOST_LISTED = 1_500_000  # logprobs of a response, all choices together: 105 MB as JSON
GREEDY_BELOW = 1e-5  # temperatures below it are greedy, as in vLLM: dividing logits by less would overflow
GENERATION_CONFIG = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The values of parameters that a request leaves out. Fields are those of generation_config.json."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0  # -1 and 0 are off
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None  # None: as many as fit into the model's length
    eos_token_id: list[int] = []

    @classmethod
    def load(cls, model_dir: str, source: str) -> Self:
        """`source` is `--generation-config`: `auto`, `vllm`, or a directory.

        The end-of-sequence tokens are the model's own whatever `source` says. Raises ConfigError: the directory holds
        no readable generation_config.json, or one with an invalid value.
        """
        own, config = _read(Path(model_dir) / GENERATION_CONFIG), _read(Path(model_dir) / "config.json")
        chosen = {} if source == "vllm" else own
        if source not in ("auto", "vllm"):
            path = Path(source) / GENERATION_CONFIG
            if not path.is_file():
                problem = f"{source} is not auto, vllm or a directory with {GENERATION_CONFIG}"
                raise ConfigError(f"--generation-config: {problem}")
            chosen = _read(path)
        ends: list[Any] = []
        for file in (own, chosen, config, config.get("text_config", {})):
            end = file.get("eos_token_id")
            ends += end if isinstance(end, list) else [] if end is None else [end]
        try:
            return msgspec.convert({**chosen, "eos_token_id": list(dict.fromkeys(ends))}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{GENERATION_CONFIG}: {error}") from None


class SamplingResolver:
    """Makes the engine's request of each client's; draws the seeds of requests without one."""

    def __init__(self, defaults: SamplingDefaults, max_model_len: int, vocab_size: int, seed: int, incarnation: int):
        self.defaults = defaults
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        # The incarnation makes API servers, and a server's replacement, draw different seeds.
        self._random = random.Random(f"{seed}/{incarnation}")
        # Others in the model's files are never sampled, and a worker has no logits for them to bar before `min_tokens`.
        self._ends = [token for token in defaults.eos_token_id if 0 <= token < vocab_size]

    def check(self, request: GenerationRequest) -> None:
        """What can be refused before the prompt is known. Raises ApiError, a 400: the model lacks a token id."""
        self.check_tokens("stop_token_ids", request.stop_token_ids or ())
        self.check_tokens("logit_bias", request.logit_bias or {})

    def check_tokens(self, name: str, token_ids: Iterable[int]) -> None:
        """Raises ApiError, a 400, unless the model has all tokens of the field `name`."""
        greatest, last = max(token_ids, default=0), self.vocab_size - 1
        if greatest > last:
            raise bad_request(f"Invalid '{name}': token id {greatest} out of range [0, {last}].", name)

    def resolve(self, request: GenerationRequest, prompt_tokens: int, other_tokens: int = 0) -> SamplingParams:
        """The parameters of `request`, whose expanded prompt has `prompt_tokens` tokens. Raises as `max_tokens`."""
        defaults = self.defaults
        max_tokens = self.max_tokens(request, prompt_tokens, other_tokens=other_tokens)
        temperature = _first(request.temperature, defaults.temperature)
        top_p = _first(request.top_p, defaults.top_p)
        greedy = temperature < GREEDY_BELOW or top_p == 0
        # Where a grammar is complete nothing but an end can follow.
        ends = [] if request.ignore_eos and not request.grammar else self._ends
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self._random.getrandbits(63) if request.seed is None else request.seed % 2**63,
            temperature=0.0 if greedy else temperature,
            top_p=1.0 if greedy else top_p,
            top_k=0 if greedy else max(0, _first(request.top_k, defaults.top_k)),
            min_p=0.0 if greedy else _first(request.min_p, defaults.min_p),
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_first(request.presence_penalty, 0.0),
            frequency_penalty=_first(request.frequency_penalty, 0.0),
            logit_bias=request.logit_bias or {},
            min_tokens=min(_first(request.min_tokens, 0), max_tokens),
            logprobs=request.num_logprobs,
            prompt_logprobs=max((min(count, self.vocab_size) for count in _prompt_lists(request)), default=None),
            stop_token_ids=sorted({*ends, *(request.stop_token_ids or ())}),
        )

    def new_request(
        self,
        prompt: Prompt,
        request_id: str,
        media: Sequence[MediaItem] = (),
        client: bytes = b"",
        arrival: int | None = None,
    ) -> NewRequest:
        """The engine's form of a request with this prompt, which is expanded; for `arrival` see there. Raises ApiError:
        400 as `resolve`, or if the prompt is empty, or has a token that the tokenizer has, but not the model."""
        request, token_ids, pooling = prompt.body, prompt.token_ids, prompt.pooling
        if not token_ids:
            raise bad_request("The prompt is empty: it needs at least one token.", request.prompt_field)
        self.check_tokens(request.prompt_field, token_ids)
        new = NewRequest(
            request_id,
            token_ids,
            media=[*media],
            client=client,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            arrival=arrival,
            pooling=pooling,
        )
        if pooling is not None:
            self.max_tokens(request, len(token_ids), least=0)
            return new
        sampling, grammar = self.resolve(request, len(token_ids), prompt.other_tokens), request.grammar
        if grammar:
            shared_by = msgspec.msgpack.encode((client, request.cache_salt, grammar))
            sampling = msgspec.structs.replace(sampling, grammar=hashlib.blake2b(shared_by, digest_size=16).digest())
        # Sample i has the seed plus i: the ranks mix a seed before they use it, so neighbours have nothing in common.
        seeds = [(sampling.seed + index) % 2**63 for index in range(1, request.num_choices)]
        children = [ChildRequest(f"{request_id}-{index}", seed) for index, seed in enumerate(seeds, 1)]
        return msgspec.structs.replace(new, sampling=sampling, children=children, grammar=grammar)

    def max_tokens(self, request: GenerationRequest, prompt_tokens: int, least: int = 1, other_tokens: int = 0) -> int:
        """The maximum of tokens of each choice; 1 for 0, since an engine samples one after each prompt. The request's
        other prompts have `other_tokens`. Raises ApiError, a 400: the prompt leaves no room for the `least`, or the
        prompts have too many log probabilities."""
        is_empty, room = request.token_limit == 0, self.max_model_len - prompt_tokens
        least = 0 if is_empty else least
        if room < least:
            output = f", and the answer needs at least {least}" if least else ""
            size = f"{prompt_tokens} tokens, images and videos included{output}"
            raise prompt_too_long(size, self.max_model_len, request.prompt_field)
        choices, copies = request.num_choices, 1  # of the prompt: a chat's is listed once
        if isinstance(request, CompletionRequest):
            choices, copies = choices * len(request.prompts), choices
        listed = copies * (prompt_tokens + other_tokens) * sum(1 + count for count in _prompt_lists(request))
        left = (MOST_LISTED - listed) // choices
        if left < 0:
            text = f"The prompts' log probabilities are more than {MOST_LISTED}, all choices together; send less text"
            raise bad_request(f"{text} at once, or a lower 'prompt_logprobs' or 'logprobs'.", request.prompt_field)
        if request.num_logprobs is not None:
            room = min(room, left // (1 + request.num_logprobs))
        limit = request.token_limit or request.default_tokens or self.defaults.max_new_tokens or room
        return 1 if is_empty else min(max(room, least), max(limit, request.min_tokens or 0))


def _prompt_lists(request: GenerationRequest) -> list[int]:
    """For each place where the response lists the prompt's tokens, how many of the likeliest it has beside them."""
    counts = (request.prompt_logprobs, request.num_logprobs if request.echo else None)
    return [count for count in counts if count is not None]


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file without its nulls; empty if there is no such file."""
    values = read_json_object(path) if path.is_file() else {}
    return {name: value for name, value in values.items() if value is not None}
