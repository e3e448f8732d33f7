"""POST /v1/completions: text that goes on where a prompt ends, without a chat template and without media.

The road is that of a chat request, less its media; a request with several prompts is as many requests to the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.api import responses
from mini_engine.api.answer import Answer, Piece
from mini_engine.api.body import parse_body
from mini_engine.api.chat import ChatError
from mini_engine.api.chat_completions import sample_texts
from mini_engine.api.completion_protocol import Choice, CompletionRequest, CompletionWriter, LogprobWriter, too_many
from mini_engine.api.context import AppContext, context_of, in_thread_if_large, read_body, respond
from mini_engine.api.error_responses import explain
from mini_engine.api.errors import bad_request
from mini_engine.api.openapi import FOR_TEXT, takes
from mini_engine.api.protocol import MAX_CHOICES
from mini_engine.api.timings import RequestClock
from mini_engine.messages import NewRequest

router = APIRouter()


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=FOR_TEXT)
async def completions(request: Request) -> Response:
    """Continue one or several texts, as OpenAI's legacy completions."""
    context = context_of(request)
    asked = parse_body(await read_body(request), CompletionRequest, context.model_names)
    work = Completing(context, asked, request.state.request_id, request.state.clock)
    return await respond(work.stream() if asked.stream else work.complete())


class Completing:
    """One request under way. Choice i of prompt p has the index p * n + i."""

    def __init__(self, context: AppContext, asked: CompletionRequest, request_id: str, clock: RequestClock):
        self._context = context
        self._asked = asked
        self._id = request_id
        self._clock = clock
        self._logprobs = [LogprobWriter() for _ in range(len(asked.prompts) * asked.num_choices)]

    async def complete(self) -> bytes:
        """The whole answer as a response's body."""
        pieces: list[list[Piece]] = [[] for _ in self._logprobs]
        with contextlib.ExitStack() as running:
            answers = await self._answers(running)
            async with contextlib.aclosing(merged(answers)) as merging:
                async for prompt, piece in merging:
                    pieces[self._index(prompt, piece)].append(piece)
        choices = [self._choice(index, theirs) for index, theirs in enumerate(pieces)]
        return CompletionWriter(self._id, self._context.model_names[0]).whole(choices, _usage(answers))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, the first of them with the first token. The last ones leave together.

        What fails before the first event is raised; afterwards an error event ends the stream.
        """
        include_usage = self._asked.include_usage
        writer = CompletionWriter(self._id, self._context.model_names[0], include_usage)
        started = False
        unfinished = len(self._logprobs)
        with contextlib.ExitStack() as running:
            answers = await self._answers(running)
            try:
                async with contextlib.aclosing(merged(answers)) as merging:
                    async for prompt, piece in merging:
                        event = writer.event(self._choice(self._index(prompt, piece), [piece]))
                        unfinished -= piece.finish_reason is not None
                        if not unfinished:
                            event += (writer.usage(_usage(answers)) if include_usage else b"") + responses.DONE
                        if event:
                            yield event
                            started = True
            except Exception as error:  # noqa: BLE001 - explain() logs what it does not know
                if not started:
                    raise
                yield responses.error_event(explain(error, self._id, self._clock))

    async def _answers(self, running: contextlib.ExitStack) -> list[Answer]:
        """The answers to all prompts, which `running` aborts when it is left early. Nothing runs unless all can."""
        async with self._context.engines.while_running():
            requests = await self._requests()
            clocks = [self._clock, *(RequestClock() for _ in requests[1:])]
            return [
                running.enter_context(await self._submit(request, clock))
                for request, clock in zip(requests, clocks, strict=True)
            ]

    async def _requests(self) -> list[NewRequest]:
        asked, sampling = self._asked, self._context.sampling
        if too_many(asked):
            raise bad_request(
                f"{len(asked.prompts)} prompts with {asked.num_choices} choices each are more than {MAX_CHOICES} "
                "choices; send fewer.",
                "prompt",
                "invalid_value",
            )
        sampling.check(asked)
        requests = []
        for number, prompt in enumerate(asked.prompts):
            token_ids = await self._encode(prompt) if isinstance(prompt, str) else self._checked(prompt)
            request_id = f"{self._id}-prompt{number}" if number else self._id
            requests.append(sampling.new_request(asked, request_id, token_ids, []))
        return requests

    async def _encode(self, prompt: str) -> list[int]:
        renderer, special = self._context.renderer, self._asked.add_special_tokens is not False
        try:
            token_ids = await in_thread_if_large(partial(renderer.encode, prompt, special), len(prompt))
        except ChatError as error:
            raise bad_request(str(error), "prompt") from None
        if not token_ids:
            raise bad_request("The prompt is empty: it needs at least one token.", "prompt", "invalid_value")
        return token_ids

    def _checked(self, token_ids: list[int]) -> list[int]:
        self._context.sampling.check_tokens("prompt", token_ids)
        media = self._context.renderer.placeholders.intersection(token_ids)
        if media:
            text = f"Invalid 'prompt': token {min(media)} stands for media, which a completion cannot have."
            raise bad_request(text, "prompt", "invalid_value")
        return token_ids

    async def _submit(self, request: NewRequest, clock: RequestClock) -> Answer:
        context = self._context
        samples = sample_texts(context, self._asked, request.sampling)
        clock.enter("transport")
        with context.engines.choose(samples=self._asked.num_choices) as engine:
            generation = await engine.submit(request)
        clock.enter("other")
        return Answer(generation, samples, clock, len(request.prompt_token_ids))

    def _index(self, prompt: int, piece: Piece) -> int:
        return prompt * self._asked.num_choices + piece.index

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Choice:
        """Neighbouring pieces of a choice as one."""
        listed = [token for piece in pieces for token in piece.logprobs or ()]
        logprobs = None if pieces[-1].logprobs is None else self._logprobs[index].write(listed)
        return Choice(index, "".join(piece.text for piece in pieces), logprobs, pieces[-1].finish_reason)


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all answers as they come, each with the number of its answer."""
    coming = {asyncio.ensure_future(answer.__anext__()): number for number, answer in enumerate(answers)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = coming.pop(task)
                piece = task.result()
                if not answers[number].over:
                    coming[asyncio.ensure_future(answers[number].__anext__())] = number
                yield number, piece
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


def _usage(answers: Sequence[Answer]) -> responses.Usage:
    """The tokens of all prompts and their choices."""
    each = [answer.usage for answer in answers]
    return responses.usage(
        sum(used.prompt_tokens for used in each),
        sum(used.completion_tokens for used in each),
        sum(used.prompt_tokens_details.cached_tokens for used in each),
    )
