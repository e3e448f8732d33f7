"""The HTTP application, and the road of a request through this process: `Frontend.answer`.

Each step of the road is a line there and a file of its own; what operators ask for is in `operation.py`. This file
knows nothing of sockets or processes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route

from mini_engine.api import completions, operation, responses, tokens
from mini_engine.api.admission import MediaAdmission, RequestAdmission
from mini_engine.api.answer import Answer, Piece, SampleText
from mini_engine.api.body import check_model, parse_body
from mini_engine.api.chat import ChatRenderer
from mini_engine.api.completion_protocol import CompletionRequest
from mini_engine.api.connection import BodyLimits, read_body
from mini_engine.api.delivery import Delivery, deliver, worked
from mini_engine.api.detokenizer import Detokenizer
from mini_engine.api.door import Door, Work
from mini_engine.api.engine_client import EngineClient
from mini_engine.api.errors import ApiError
from mini_engine.api.logprobs import LogprobList
from mini_engine.api.media_loader import MediaLoader
from mini_engine.api.media_settings import MediaSettingsResolver, video_tokens
from mini_engine.api.openapi import FOR_TEXT, GUARDED, DescribedApp, in_path, refuses, takes
from mini_engine.api.prompt_media import check_budget, place, placeholders, prompt_items
from mini_engine.api.protocol import ChatRequest, GenerationRequest
from mini_engine.api.refusal import error_response, explain, refuse_for, unknown_url
from mini_engine.api.request_log import RequestLog
from mini_engine.api.sampling import SamplingResolver
from mini_engine.api.timings import RequestClock
from mini_engine.api.tokens import DetokenizeRequest, TokenizeRequest
from mini_engine.api.vocabulary import Vocabulary
from mini_engine.config import EngineConfig
from mini_engine.log import about
from mini_engine.messages import EngineLimits, SamplingParams
from mini_engine.shortage import shortage_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frontend:
    """What a request meets in this process."""

    model_names: list[str]  # the first is the one in responses
    item_limits: Mapping[str, int]  # --limit-mm-per-prompt
    renderer: ChatRenderer
    tokenizer: Any  # Hugging Face's
    vocabulary: Vocabulary
    body_limits: BodyLimits
    requests: RequestAdmission
    admission: MediaAdmission
    media_settings: MediaSettingsResolver
    media: MediaLoader
    sampling: SamplingResolver
    engines: EngineClient
    limits: EngineLimits

    async def read(self, request: Request) -> bytes:
        """The body of a request for text, which is not read when there is too much to do already.

        Raises:
            ApiError: 408, 413, 415 or 429.
            EngineError: no engine runs.
            ClientDisconnect: the client went meanwhile.
        """
        self.engines.check()
        self.requests.check()
        return await read_body(request, self.body_limits)

    async def answer(self, chat: ChatRequest, request_id: str, clock: RequestClock) -> Answer:
        """Rows 2 to 8 of docs/request-path.md; the answer's tokens are on their way when this returns.

        The prompt is rendered before any media are loaded: a conversation that cannot be rendered costs no decoding.
        All of it ends when the engines do.

        Raises:
            ApiError, ChatError, MediaError, EngineError: see `errors.as_api_error`.
        """
        async with self.engines.while_running(), contextlib.AsyncExitStack() as held:
            # Row 2: what is asked for, and the prompt with a place for each item.
            self.sampling.check(chat)
            messages = chat.plain_messages()
            refs = self.renderer.collect(messages, self.item_limits)
            token_ids = await worked(partial(self.renderer.render, messages), sum(map(_text_length, messages)))
            budget = video_tokens(self.limits, len(token_ids), chat.asked_tokens or 1, len(refs))
            keyed = self.media_settings.resolve(chat, budget, refs)
            # Row 3: room for the bytes, those that other servers have, a place in line.
            reservation = held.enter_context(self.admission.reserve(await self.media.sizes(refs)))
            clock.enter("fetch")
            downloads = await self.media.download(refs, reservation.receive)
            clock.enter("admission")  # not before: another server that hangs would keep others out of the line
            await held.enter_async_context(self.admission.in_line(len(refs)))
            logger.debug(
                "%s admitted: %d tokens, and %d media of up to %d bytes",
                request_id, len(token_ids), len(refs), reservation.nbytes, extra=about(request_id),
            )  # fmt: skip
            # Row 4: the other bytes, and the hashes of all.
            clock.enter("fetch")
            fetched = await self.media.fetch(refs, keyed, downloads)
            reservation.correct(sum(len(item.data) for item in fetched))
            clock.enter("other")
            hashes = list(dict.fromkeys(item.media_hash for item in fetched))
            with self.engines.choose(hashes[0] if hashes else None, chat.num_choices) as engine:  # row 5
                held.enter_context(engine.media.holding(request_id))
                found = await engine.media.look_up(request_id, hashes)
                # Row 6: decode and process what its ranks cannot read.
                lacking = [item for item in fetched if item.media_hash not in found]
                items = prompt_items(
                    [item.media_hash for item in fetched], await self.media.process(lacking, clock, request_id), found
                )
                # Row 7: the placeholders at their length, and the sampling.
                check_budget(items, self.limits)
                prompt = self.renderer.expand(token_ids, placeholders(items))
                request = self.sampling.new_request(chat, request_id, prompt.token_ids, place(prompt, items))
                samples = self.sample_texts(chat, request.sampling)
            # Row 8.
            clock.enter("transport")
            generation = await engine.submit(request)
            clock.enter("other")
        missing = [f"{ref.name}: {item.missing}" for ref, item in zip(refs, items, strict=True) if item.missing]
        used = [item.usage(self.media.processor) for item in items]
        return Answer(generation, samples, clock, len(prompt.token_ids), missing, used)

    def sample_texts(self, asked: GenerationRequest, sampling: SamplingParams) -> list[SampleText]:
        """What makes the text of each sample of the answer to `asked`, which was resolved to `sampling`."""
        include_stop = bool(asked.include_stop_str_in_output)
        skip_special = asked.skip_special_tokens is not False

        def sample_text() -> SampleText:
            detokenizer = Detokenizer(
                self.vocabulary, asked.stop_strings, include_stop, skip_special, min_tokens=sampling.min_tokens
            )
            logprobs = None if sampling.logprobs is None else LogprobList(self.vocabulary, skip_special)
            return SampleText(detokenizer, logprobs, () if include_stop else sampling.stop_token_ids)

        return [sample_text() for _ in range(asked.num_choices)]

    async def complete(self, chat: ChatRequest, request_id: str, clock: RequestClock) -> bytes:
        """The whole answer as a response's body."""
        with self.requests.admit(), await self.answer(chat, request_id, clock) as answer:
            pieces: list[list[Piece]] = [[] for _ in answer.samples]
            timings = chat.return_timings
            del chat  # its media are as large as text as they are themselves
            async for piece in answer:
                pieces[piece.index].append(piece)
        choices = [_choice(index, theirs) for index, theirs in enumerate(pieces)]
        return responses.completion(
            request_id, self.model_names[0], choices, answer.usage, _remarks(timings, answer, clock)
        )

    async def stream(self, chat: ChatRequest, request_id: str, clock: RequestClock) -> AsyncGenerator[bytes, None]:
        """The answer as events, the first of them with the first token. The last ones leave together.

        What fails before the first event is raised; afterwards an error event ends the stream.
        """
        include_usage, timings = chat.include_usage, chat.return_timings
        writer = responses.EventWriter(request_id, self.model_names[0], include_usage)
        started = False
        with self.requests.admit(), await self.answer(chat, request_id, clock) as answer:
            del chat  # as above
            try:
                async for piece in answer:
                    remarks = _remarks(timings, answer, clock) if answer.over else responses.Remarks()
                    with_text = responses.Remarks() if include_usage else remarks
                    event = writer.delta(piece.index, piece.text, piece.finish_reason, piece.logprobs, with_text)
                    if answer.over:
                        event += (writer.usage(answer.usage, remarks) if include_usage else b"") + responses.DONE
                    if event:
                        yield event
                    started = True
            except Exception as error:  # noqa: BLE001 - explain() logs what it does not know
                if not started:
                    raise
                yield responses.error_event(explain(error, request_id, clock))


def _choice(index: int, pieces: list[Piece]) -> responses.Choice:
    """A sample's pieces as one choice."""
    finish_reason = pieces[-1].finish_reason
    assert finish_reason is not None
    listed = [token for piece in pieces for token in piece.logprobs or ()]
    logprobs = None if pieces[-1].logprobs is None else responses.ChoiceLogprobs(listed)
    text = "".join(piece.text for piece in pieces)
    return responses.Choice(index, responses.AnswerMessage(text), finish_reason, logprobs)


def _remarks(timings: bool | None, answer: Answer, clock: RequestClock) -> responses.Remarks:
    """What there is to say of a request whose answer is over; with `timings` where its time went."""
    return responses.Remarks(clock.timings() if timings else None, answer.warnings)


def _text_length(message: Mapping[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


router = APIRouter()


def _frontend(request: Request) -> Frontend:
    return request.app.state.frontend


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=FOR_TEXT)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as OpenAI's chat completions."""
    frontend = _frontend(request)

    # `deliver` calls it with the body, runs what it returns to the end, or to the first event, and ends it when the
    # client goes.
    def begin(body: bytes, request_id: str, clock: RequestClock) -> Delivery:
        chat = parse_body(body, ChatRequest, frontend.model_names)
        return (frontend.stream if chat.stream else frontend.complete)(chat, request_id, clock)

    return await deliver(request, frontend.read(request), "chatcmpl", begin)


@router.get("/v1/models", responses=GUARDED)
async def models(request: Request) -> Response:
    """The names of the model that is served."""
    frontend = _frontend(request)
    created = request.app.state.created
    body = responses.model_list(frontend.model_names, created, frontend.sampling.max_model_len)
    return Response(body, media_type="application/json")


@router.get("/v1/models/{name:path}", openapi_extra=in_path("name"), responses=GUARDED | refuses(404))
async def model(request: Request) -> Response:
    """One of these names."""
    frontend, name = _frontend(request), request.path_params["name"]
    try:
        check_model(name, frontend.model_names)
    except ApiError as error:
        return error_response(error)
    body = responses.model(name, request.app.state.created, frontend.sampling.max_model_len)
    return Response(body, media_type="application/json")


ROUTERS = (router, completions.router, tokens.router, operation.router)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, an unknown path or method, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return unknown_url(request, ROUTERS)
    methods = {  # of all routes of this path, of which the error knows one
        method
        for part in ROUTERS
        for route in part.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    methods = methods or set((error.headers or {}).get("Allow", "").split(", "))
    allowed = ", ".join(sorted(methods))
    text = f"{error.detail}; this path takes {allowed}."
    return error_response(ApiError(405, text, code="method_not_allowed", headers={"Allow": allowed}))


async def _os_error(_: Request, error: Exception) -> Response:
    """What operators ask for reads files, for which there may be no descriptor."""
    shortage = shortage_in(error)
    if shortage is None:
        raise error
    return error_response(refuse_for(shortage))


def create_app(frontend: Frontend, config: EngineConfig) -> FastAPI:
    """The ASGI application over `frontend`."""
    app = DescribedApp(
        [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest],
        title="mini-engine",
        version=importlib.metadata.version("mini-engine"),
        redirect_slashes=False,  # to wherever the header `Host` says
    )
    app.state.work = Work()
    app.add_middleware(Door, api_keys=config.api_key, root_path=config.root_path, work=app.state.work)
    if config.enable_log_requests:
        app.add_middleware(RequestLog)
    if config.allowed_origins:  # before the door: a browser's preflight brings no key, and must read a refusal
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    app.state.frontend = frontend
    app.state.config = config
    app.state.created = int(time.time())
    for part in ROUTERS:
        app.include_router(part)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _os_error)
    return app
