"""Chat messages -> prompt token ids, with a place for each image and video.

Three steps, because an item's length is known only after it was processed: `collect_media` finds the media, `render`
writes one placeholder for each, `expand` makes each placeholder as long as its item. Knows nothing of HTTP, nor how
media are fetched or processed. All methods may run in several threads at once.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from mini_engine.media.hashing import HASH_BYTES
from mini_engine.messages import CachedMedia, EngineLimits, MediaItem, Modality
from mini_engine.prompt.client_text import MARK, ClientText, encode_text
from mini_engine.prompt.tool_calls import CALL, CALL_END, TAGS, THINK, AnswerFormat, AnswerParser, after_thought
from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.bodies import ChatMessage, ChatRequest, StructuredOutputs

if TYPE_CHECKING:
    from mini_engine.media.processor import MediaProcessor, ProcessedItem

MAX_MEDIA = 1024  # images and videos of a prompt
PIECE = 1 << 16  # characters that are tokenised at once to see how many tokens a long text has

Source = tuple[bytes, "ProcessedItem | CachedMedia"]  # an item under its hash


@dataclass(frozen=True)
class MediaRef:
    """One image or video of a conversation, in the order of the prompt."""

    modality: Modality
    url: str
    name: str  # what errors call it: "video 1" is the first video of the conversation
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its part, see `PartSettings`


class ChatRenderer:
    """Writes prompts for one model, by its Hugging Face processor's tokenizer and chat template."""

    def __init__(
        self, hf_processor: Any, chat_template: str | None = None, tool_parser: str = "auto", reasoning: str = "auto"
    ) -> None:
        """`chat_template` is Jinja text to use instead of the model's own; for the parsers see `AnswerFormat`. Raises
        ValueError if there is neither template, or for a parser that it does not suit."""
        self._hf = hf_processor
        own = hf_processor.chat_template or hf_processor.tokenizer.chat_template
        template = chat_template or (own.get("default") if isinstance(own, dict) else own)
        if not template:
            raise ValueError("the model has no chat template; give one with --chat-template")
        self._template: str = template
        self._names = frozenset(re.findall(r"[A-Za-z_]\w*", template))  # that it may read
        # The Rust tokenizer itself: its encode changes nothing, so that threads can share it. The wrapper around it
        # may set truncation and padding, which fails ("Already borrowed") while another thread encodes.
        self.tokenizer = hf_processor.tokenizer.backend_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._modality_of: dict[int, Modality] = {
            int(hf_processor.image_token_id): "image",
            int(hf_processor.video_token_id): "video",
        }
        vocabulary = hf_processor.tokenizer.get_added_vocab()
        self._client_text = ClientText(self.tokenizer, TAGS)
        self._format = AnswerFormat.of(template, vocabulary, tool_parser, reasoning)
        # In characters, which are never more than the bytes that a token stands for.
        self._longest_token = max(map(len, hf_processor.tokenizer.get_vocab()))
        self.max_tokens: int | None = None  # the engine's limit, once it is known
        self._knows_developer = "developer" in template
        # A template that cannot work is found at start.
        self.render(ChatRequest(messages=[ChatMessage(role="user", content="Hello")]))

    def render(self, asked: ChatRequest) -> list[int]:
        """Returns the prompt's token ids, the start of the answer included, with one placeholder id for each item.

        Raises ApiError, a 400, for tools that the template does not write, for variables that are fields of the
        request, and when it refuses the conversation or leaves out an item.
        """
        text = self._apply_template(asked)
        self._check_length(text, self._client_text.encode)
        token_ids = self._client_text.encode(text)
        wanted = [part.modality for message in asked.messages for part in message.parts if part.modality]
        placed = [self._modality_of[token] for token in token_ids if token in self._modality_of]
        if placed != wanted:
            counts = f"{len(placed)} placeholders for {len(wanted)} media items"
            raise bad_request(f"the chat template wrote {counts}, or in other order", "messages")
        return token_ids

    def opens_thought(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer to this prompt begins inside a thought."""
        end = self.tokenizer.decode(token_ids[-16:], skip_special_tokens=False)  # enough for the tag
        return self._format.thoughts and end.rstrip().endswith(THINK)

    def constrain(self, chat: ChatRequest, in_thought: bool) -> ChatRequest:
        """The request with the grammar that its answer follows: a call that it asks for, after the thought. Raises
        ApiError, a 400: it asks for no function of its own, or for another grammar too."""
        grammar = chat.grammar
        if chat.tool_choice not in (None, "none", "auto") and (grammar or not chat.must_call):
            problem = "together with structured output" if grammar else "of a function that is not in 'tools'"
            raise bad_request(f"'tool_choice' cannot ask for a call {problem}.", "tool_choice")
        if chat.must_call:
            parallel = chat.parallel_tool_calls is not False and chat.tool_choice == "required"
            grammar = self._format.call_grammar(chat.must_call, parallel)
        if not grammar:
            return chat
        grammar = after_thought(grammar) if in_thought else grammar
        return msgspec.structs.replace(chat, structured_outputs=StructuredOutputs(grammar=grammar))

    def thought_parser(self, in_thought: bool) -> Callable[[], AnswerParser]:
        """What makes the parser for the thought of each choice."""
        return partial(AnswerParser, thoughts=self._format.thoughts, in_thought=in_thought)

    @property
    def placeholders(self) -> frozenset[int]:
        """The token ids that stand for media."""
        return frozenset(self._modality_of)

    def encode(self, text: str, add_special_tokens: bool, allow_placeholders: bool = False) -> list[int]:
        """The token ids of a text that is no conversation.

        Raises ApiError, a 400, for one that is too long however it is tokenised, or that holds the model's placeholder
        tokens unless they are allowed.
        """
        encode = partial(encode_text, self.tokenizer, add_special_tokens=add_special_tokens)
        self._check_length(text, encode, "prompt")
        token_ids = encode(text)
        if not allow_placeholders and (placed := self.placeholders.intersection(token_ids)):
            token = self.tokenizer.id_to_token(min(placed))
            raise bad_request(f"the text contains {token}, a media placeholder of this model; remove it", "prompt")
        return token_ids

    def _check_length(self, text: str, encode: Callable[[str], Sized], param: str = "messages") -> None:
        """Refuse a text that is too long. A tokenizer takes hundreds of bytes for each token: a long text is measured
        in pieces first."""
        least, counted = len(text) // self._longest_token, 0
        for number, begin in enumerate(range(0, len(text), PIECE) if len(text) > 4 * PIECE else (), 1):
            if self.max_tokens is None or least > self.max_tokens:
                break
            counted += len(encode(text[begin : begin + PIECE]))
            least = max(least, counted - number * self._longest_token)  # a cut may make more of one token
        if self.max_tokens is not None and least > self.max_tokens:
            raise bad_request(
                f"The prompt has {len(text)} characters, which is at least {least} tokens; this server takes "
                f"{self.max_tokens} tokens for prompt and answer together. Send a shorter prompt.",
                param,
                "context_length_exceeded",
            )

    def expand(self, token_ids: Sequence[int], sources: Sequence[Source]) -> tuple[list[int], list[MediaItem]]:
        """The prompt with each placeholder as long as its item, with the text that belongs to it, and the items with
        their places. `sources` are in order."""
        expanded: list[int] = []
        placed: list[MediaItem] = []
        remaining = iter(sources)
        for token in token_ids:
            modality = self._modality_of.get(token)
            if modality is None:
                expanded.append(token)
                continue
            media_hash, item = next(remaining)
            assert item.modality == modality
            # By itself: in a model's own template a special token stands on either side, which no token reaches across.
            text = item.placeholder
            written = [token] if text is None else self.tokenizer.encode(text, add_special_tokens=False).ids
            runs = written.count(token)
            offsets: list[int] = []
            for each in written:
                if each == token:
                    offsets.append(len(expanded))
                    expanded.extend([token] * (item.num_tokens // runs))
                else:
                    expanded.append(each)
            patches = None if isinstance(item, CachedMedia) else item.patches
            cacheable = isinstance(item, CachedMedia) or item.missing is None
            placed.append(
                MediaItem(
                    item.modality, offsets, item.num_tokens, item.grid_thw, item.second_per_grid, patches, media_hash,
                    placeholder=item.placeholder, cacheable=cacheable,
                )
            )  # fmt: skip
        return expanded, placed

    def _for_template(self, message: ChatMessage) -> dict[str, Any]:
        """The message as Hugging Face templates know it: media as bare {"type": "image"}, arguments as objects.

        In an assistant's text the tags of thoughts and calls stay tokens, since templates look for them there.
        """
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        mark_text = partial(self._client_text.mark, keep_tags=role == "assistant")
        calls, as_text = message.tool_calls or [], ""
        more: dict[str, Any] = {"tool_call_id": message.tool_call_id, "reasoning_content": message.thought}
        try:
            more = self._client_text.mark({**more, "tool_calls": [call.parsed() for call in calls]})
        except (msgspec.DecodeError, RecursionError):
            # Arguments that are no object, or cut off. A template may fail at them; as text they are what was said.
            texts = [call.text for call in calls]
            as_text = "\n".join(f"{CALL}\n{text}\n{CALL_END}" for text in self._client_text.mark(texts))
            more = self._client_text.mark(more)
        content: Any = [
            {"type": part.modality} if part.text is None else {"type": "text", "text": mark_text(part.text)}
            for part in message.parts
        ]
        content += [{"type": "text", "text": "\n" * bool(message.content) + as_text}] * bool(as_text)
        if not isinstance(message.content, list):
            content = "".join(part["text"] for part in content)
        return {"role": role, "content": content, **{name: value for name, value in more.items() if value}}

    def _arguments(self, asked: ChatRequest) -> dict[str, Any]:
        """What the template gets beside the messages. A variable that it does not have changes nothing."""
        tools = asked.tools if asked.calls_tools else None
        if tools and not self._format.calls:
            text = "the chat template has no tools in Hermes' format; leave them out, or use another --chat-template"
            raise bad_request(text, "tools")
        more = {"reasoning_effort": asked.reasoning_effort} | (asked.chat_template_kwargs or {})
        goes_on = bool(asked.continue_final_message)
        opens = not goes_on if asked.add_generation_prompt is None else asked.add_generation_prompt
        own = {"add_generation_prompt": opens, "continue_final_message": goes_on, "tools": msgspec.to_builtins(tools)}
        if fields := more.keys() & {"messages", *own}:
            raise bad_request(f"set {min(fields)!r} as a field of the request", "chat_template_kwargs")
        used = {name: value for name, value in more.items() if name in self._names and value is not None}
        return self._client_text.mark(own | used)

    def _apply_template(self, asked: ChatRequest) -> str:
        """The prompt as text, with the marks of `ClientText`."""
        import jinja2

        try:
            arguments = self._arguments(asked)
            messages = [self._for_template(message) for message in asked.messages]
            return self._hf.apply_chat_template(messages, chat_template=self._template, tokenize=False, **arguments)
        except RecursionError:
            raise bad_request("the tools or template variables are nested too deeply", "messages") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise too, as for roles in no order
            is_late = any(message.role in ("system", "developer") for message in asked.messages[1:])
            remedy = "send one system message, as the first" if is_late else "change the roles or order of the messages"
            reason = str(error).replace(MARK, "")[:200]
            raise bad_request(f"the chat template rejects these messages: {reason}; {remedy}", "messages") from error


def collect_media(messages: Sequence[ChatMessage], limits: Mapping[str, int]) -> list[MediaRef]:
    """Returns the media of a conversation in order. `limits` is --limit-mm-per-prompt; absent means no limit.

    Raises ApiError, a 400, for more items than a limit allows.
    """
    refs: list[MediaRef] = []
    counts: Counter[str] = Counter()
    for part in (part for message in messages for part in message.parts):
        if modality := part.modality:
            counts[modality] += 1
            refs.append(MediaRef(modality, part.location, f"{modality} {counts[modality]}", part.settings))
    if len(refs) > MAX_MEDIA:
        text = f"the conversation has {len(refs)} images and videos, more than {MAX_MEDIA}; send fewer"
        raise bad_request(text, "messages")
    for limited, limit in limits.items():
        if counts[limited] > limit:
            raise bad_request(
                f"the conversation has {counts[limited]} {limited} items, more than the {limit} that "
                f"--limit-mm-per-prompt allows; send fewer",
                "messages",
            )
    return refs


# --- the prompt's media, for the engine -------------------------------------------------------------------------------


def prompt_sources(
    hashes: Sequence[bytes], processed: Mapping[bytes, ProcessedItem], found: Mapping[bytes, CachedMedia]
) -> list[Source]:
    """The items with these hashes, in order; each is in `processed`, or else in `found`.

    An item of which a part could not be read gets a hash like no other: a hit is not decoded, so it could not report
    what is missing.
    """
    private = {digest: os.urandom(HASH_BYTES) for digest, item in processed.items() if item.missing}
    return [(private.get(digest, digest), processed.get(digest) or found[digest]) for digest in hashes]


def media_usage(item: MediaItem, processor: MediaProcessor) -> dict[str, Any]:
    """What the response says of an item: its size in pixels after sampling and resizing, and its tokens. Of a video
    also its frames, of which the last is repeated to fill the last temporal patch, and the seconds between them."""
    steps, height, width = item.grid_thw
    size = {"width": width * processor.patch_size, "height": height * processor.patch_size}
    used = {"type": item.modality, **size, "tokens": item.num_tokens}
    if item.second_per_grid is None:
        return used
    seconds = round(item.second_per_grid / processor.step, 4)
    return used | {"frames": steps * processor.step, "seconds_per_frame": seconds}


def check_budget(media: Sequence[MediaItem], limits: EngineLimits) -> None:
    """Refuse what no encoder cache could hold. An item that comes twice counts once. Raises ApiError: 400 that says how
    much would be needed, and which flag raises the limit."""
    needed = sum({item.media_hash: item.num_tokens for item in media}.values())
    if needed > limits.max_prompt_media_tokens:
        raise bad_request(
            f"The images and videos of this prompt have {needed} tokens together; this server takes at most "
            f"{limits.max_prompt_media_tokens} in one prompt. Send fewer or smaller ones, or start the server with "
            f"--encoder-cache-tokens {needed}.",
            "messages",
            "media_too_large",
        )
