"""POST /v1/completions, /tokenize and /detokenize: text without a chat template, and token ids.

The path of a completion's prompt is that of a chat request; each of several is a request of its own to an engine. The
others, in vLLM's form, ask no engine: the media of a conversation are decoded, and dropped.
"""

import asyncio
import contextlib
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mini_engine.http.body import JSON, read_body, takes
from mini_engine.http.context import AppContext, context_of, state_of
from mini_engine.http.responses import CompletionResponder
from mini_engine.http.routes.chat_completions import load_media, start
from mini_engine.messages import MediaItem
from mini_engine.prompt.renderer import Prompt, check_budget, collect_media
from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.bodies import CompletionRequest, DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue one or several texts, as OpenAI's legacy completions.

    Choice i of prompt p has the index p * n + i.
    """
    context, state = context_of(request), state_of(request)
    body = await read_body(request, CompletionRequest, context)
    state.choices.receive(len(body.prompts) * body.num_choices - 1)
    context.sampling.check(body)
    prompts: list[list[int]] = []
    for prompt in body.prompts:
        await asyncio.sleep(0)  # each may take some milliseconds
        token_ids = await _encode(context, body, prompt, state.client) if isinstance(prompt, str) else prompt
        if not token_ids:  # before any of the prompts is sent
            raise bad_request("The prompt is empty: it needs at least one token.", "prompt")
        context.renderer.check_tokens("prompt", token_ids)
        prompts.append(token_ids)
    total, answers = sum(map(len, prompts)), []
    for number, token_ids in enumerate(prompts):
        first_index, other_tokens = number * body.num_choices, total - len(token_ids)
        sent = Prompt(body, token_ids, first_index=first_index, other_tokens=other_tokens)
        answers.append(await start(context, sent, state_of(request, number)))
    return await CompletionResponder(body, state, context.config.served_names[0]).respond(answers)


async def _encode(
    context: AppContext, body: CompletionRequest | TokenizeRequest, text: str, client: bytes
) -> list[int]:
    encode = partial(context.renderer.encode, text, body.add_special_tokens is not False)
    return await context.run_sized(encode, len(text), client)


# --- tokens -----------------------------------------------------------------------------------------------------------


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or those of a conversation as a chat completion has them, with all of its media."""
    context, state = context_of(request), state_of(request)
    body = await read_body(request, TokenizeRequest, context)
    media: list[MediaItem] = []
    if body.prompt is None:
        async with contextlib.AsyncExitStack() as held:
            chat = body.chat(body.messages or ())
            prompt = await context.run_sized(partial(context.renderer.render, chat), chat.num_characters, state.client)
            refs = collect_media(prompt.body.parts, context.config.item_limits)
            items = [item.fitted for item in await load_media(context, prompt, refs, state, held)]
            await held.enter_async_context(context.media_permits.hold(len(items), state.clock, state.client))
            measured = await context.media_loader.process(items, state.clock, state.request_id)
            processed = [measured[item.media_hash] for item in items]
            tokens, media = context.renderer.expand(prompt.token_ids, processed)
            check_budget(media, context.limits)
    else:
        tokens = await _encode(context, body, body.prompt, state.client)
    kinds = ("image", "video")
    counts = {f"{kind}_tokens": sum(item.num_tokens for item in media if item.modality == kind) for kind in kinds}
    answer = {"count": len(tokens), "max_model_len": context.limits.max_model_len, "prompt_tokens_details": counts}

    def encode_answer() -> bytes:
        names = [*map(context.renderer.tokenizer.id_to_token, tokens)] if body.return_token_strs else None
        return msgspec.json.encode(answer | {"tokens": tokens, "token_strs": names})

    return Response(await context.run_sized(encode_answer, len(tokens), state.client), media_type=JSON)


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest, context)
    if (count := len(body.tokens)) > (limit := context.limits.max_model_len):
        text = f"Invalid 'tokens': it has {count} token ids, more than --max-model-len, {limit}; send fewer."
        raise bad_request(text, "tokens")
    context.sampling.check_tokens("tokens", body.tokens)
    decode = partial(context.renderer.tokenizer.decode_batch, [body.tokens], skip_special_tokens=False)
    (text,) = await context.run_sized(decode, len(body.tokens), state_of(request).client)
    return Response(msgspec.json.encode({"prompt": text}), media_type=JSON)
