"""Chat messages -> prompt token ids, with a place for each image and video.

Three steps, because an item's length is known only after it was processed: `collect_media` finds the media, `render`
writes one placeholder for each, `expand` makes each placeholder as long as its item. Knows nothing of HTTP, nor how
media are fetched or processed. All methods may run in several threads at once.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2
import msgspec

from mini_engine.media.processor import MediaProcessor, ProcessedItem
from mini_engine.messages import EngineLimits, MediaItem, Modality, PoolingParams
from mini_engine.prompt.client_text import MARK, ClientText, encode_text
from mini_engine.prompt.tool_calls import AnswerParser, after_thought, call_format, call_grammar
from mini_engine.prompt.xml_calls import XmlCallParser, XmlThoughtParser, xml_call_grammar
from mini_engine.protocol.api_errors import bad_request, prompt_too_long
from mini_engine.protocol.bodies import ChatMessage, ChatRequest, GenerationRequest, StructuredOutputs
from mini_engine.protocol.parts import MediaRef, Part
from mini_engine.protocol.tools import CALL, CALL_END, TAGS, THINK

MAX_MEDIA = 1024  # images and videos of a prompt
PIECE = 1 << 16  # characters that are tokenised at once to see how many tokens a long text has


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, or a text."""

    body: GenerationRequest  # with the grammar of its answer
    token_ids: list[int]  # with one placeholder for each item
    # Make one for each choice.
    thought_parser: Callable[[], AnswerParser] = AnswerParser
    call_parser: Callable[[], AnswerParser] = AnswerParser
    first_index: int = 0  # of its choices
    other_tokens: int = 0  # of the other prompts of its request
    pooling: PoolingParams | None = None  # in the place of an answer


class ChatRenderer:
    """Writes prompts for one model, by its Hugging Face processor's tokenizer and chat template."""

    def __init__(
        self, hf_processor: Any, chat_template: str | None = None, tool_parser: str = "auto", reasoning: str = "auto"
    ) -> None:
        """`chat_template` is Jinja text to use instead of the model's own; the parsers are `--tool-call-parser` and
        `--reasoning-parser`. Raises ValueError if there is neither template, or for a parser that it does not suit."""
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
        self.placeholders = frozenset(self._modality_of)  # token ids
        self.after_text = self.tokenizer.encode("").ids  # tokens that it puts after a text, as those of embeddings do
        self._client_text = ClientText(self.tokenizer, TAGS)
        self._added_tokens = hf_processor.tokenizer.get_added_vocab()
        self._call_format = call_format(template, tool_parser)
        self._has_thoughts = reasoning == "qwen3" or (reasoning == "auto" and THINK in template)
        # In characters, which are never more than the bytes that a token stands for.
        self._longest_token = max(map(len, hf_processor.tokenizer.get_vocab()))
        self.max_tokens = sys.maxsize  # the engine's limit, once it is known
        self._knows_developer = "developer" in template
        # So that a template that cannot work is an error at start.
        self.render(ChatRequest(messages=[ChatMessage(role="user", content="Hello")]))

    def render(self, chat: ChatRequest) -> Prompt:
        """The prompt with one placeholder id for each item, the start of the answer included; and what decides how the
        answer begins, and what it may be.

        Raises ApiError, a 400, for tools that the template does not write, for variables that are fields of the
        request, and when it refuses the conversation or leaves out an item; and for a forced call of a function that is
        not in `tools`, or together with another grammar.
        """
        try:
            arguments = self._template_arguments(chat)
            messages = [self._template_message(message) for message in chat.messages]
            if chat.continue_final_message and "tool_calls" in messages[-1]:  # transformers would drop them
                raise ValueError("a message with tool_calls cannot be continued")
            text = self._hf.apply_chat_template(messages, chat_template=self._template, tokenize=False, **arguments)
        except RecursionError:
            raise bad_request("the tools or template variables are nested too deeply", "messages") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates raise too, as for roles in no order
            is_late = any(message.role in ("system", "developer") for message in chat.messages[1:])
            remedy = "send one system message, as the first" if is_late else "change the roles or order of the messages"
            reason = str(error).replace(MARK, "")[:200]
            raise bad_request(f"the chat template rejects these messages: {reason}; {remedy}", "messages") from error
        self._check_length(text, self._client_text.encode)
        token_ids = self._client_text.encode(text)
        sent = [part.modality for message in chat.messages for part in message.parts if part.modality]
        placed = [self._modality_of[token] for token in token_ids if token in self._modality_of]
        if placed != sent:
            counts = f"{len(placed)} placeholders for {len(sent)} media items"
            raise bad_request(f"the chat template wrote {counts}, or in other order", "messages")
        end = self.tokenizer.decode(token_ids[-16:], skip_special_tokens=False)  # enough for the tag
        in_thought = self._has_thoughts and end.rstrip().endswith(THINK)
        is_constrained = chat.grammar or chat.tool_choice not in (None, "none", "auto")
        body = self._constrain(chat, in_thought) if is_constrained else chat
        thoughts = {"thoughts": self._has_thoughts, "in_thought": in_thought}
        if chat.calls_tools and self._call_format == "qwen3_xml":
            functions = {tool.function.name: tool.function for tool in chat.tools or ()}
            return Prompt(body, token_ids, partial(XmlThoughtParser, **thoughts), partial(XmlCallParser, functions))
        return Prompt(body, token_ids, partial(AnswerParser, **thoughts), partial(AnswerParser, calls=chat.calls_tools))

    def _constrain(self, chat: ChatRequest, in_thought: bool) -> ChatRequest:
        """The request with the grammar that its answer follows, after the thought, or that of its forced call."""
        grammar = chat.grammar
        if chat.tool_choice not in (None, "none", "auto") and (grammar or not chat.must_call):
            problem = "together with structured output" if grammar else "of a function that is not in 'tools'"
            raise bad_request(f"'tool_choice' cannot ask for a call {problem}.", "tool_choice")
        if chat.must_call:
            parallel = chat.parallel_tool_calls is not False and chat.tool_choice == "required"
            write = xml_call_grammar if self._call_format == "qwen3_xml" else call_grammar
            try:
                grammar = write(chat.must_call, parallel, self._added_tokens)
            except ValueError as error:
                raise bad_request(f"tools: {error}", "tools") from None
        grammar = after_thought(grammar) if in_thought else grammar
        return msgspec.structs.replace(chat, structured_outputs=StructuredOutputs(grammar=grammar))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text that is no conversation, unchecked. Raises ApiError, a 400: it is too long."""
        encode = partial(encode_text, self.tokenizer, add_special_tokens=add_special_tokens)
        self._check_length(text, encode, "prompt")
        return encode(text)

    def check_tokens(self, name: str, token_ids: list[int]) -> None:
        """Raises ApiError, a 400, for placeholders among the token ids of the field `name`, which has no media."""
        if media := self.placeholders.intersection(token_ids):
            token = f"token {min(media)}, {self.tokenizer.id_to_token(min(media))},"
            raise bad_request(f"Invalid '{name}': {token} is a placeholder for media; remove it.", name)

    def _check_length(self, text: str, encode: Callable[[str], Sized], param: str = "messages") -> None:
        """Refuse a text that is too long. A tokenizer needs hundreds of bytes of memory for each token, so a long text
        is first encoded in pieces."""
        least, counted = len(text) // self._longest_token, 0
        for number, begin in enumerate(range(0, len(text), PIECE) if len(text) > 4 * PIECE else (), 1):
            if least > self.max_tokens:
                break
            counted += len(encode(text[begin : begin + PIECE]))
            least = max(least, counted - number * self._longest_token)  # a cut may make more of one token
        if least > self.max_tokens:
            size = f"{len(text)} characters, which is at least {least} tokens"
            raise prompt_too_long(size, self.max_tokens, param)

    def expand(self, token_ids: Sequence[int], items: Sequence[ProcessedItem]) -> tuple[list[int], list[MediaItem]]:
        """The prompt with each placeholder as long as its item, with the item's text, and the items with their offsets.
        `items` are in order."""
        expanded: list[int] = []
        placed: list[MediaItem] = []
        remaining = iter(items)
        for token in token_ids:
            if token not in self.placeholders:
                expanded.append(token)
                continue
            item = next(remaining)
            facts = item.facts
            # By itself: in a model's own template a special token stands on either side, which no token reaches across.
            text, offsets = facts.placeholder, []
            written = [token] if text is None else self.tokenizer.encode(text, add_special_tokens=False).ids
            run = [token] * (facts.num_tokens // written.count(token))
            for written_token in written:
                if written_token == token:
                    offsets.append(len(expanded))
                expanded += run if written_token == token else [written_token]
            own = {"offsets": offsets, "patches": item.patches, "cacheable": item.missing is None}
            placed.append(MediaItem(**msgspec.structs.asdict(facts), **own))  # type: ignore[arg-type] # facts of any type
        return expanded, placed

    def _template_message(self, message: ChatMessage) -> dict[str, Any]:
        """The message as Hugging Face templates know it: media as bare {"type": "image"}, arguments as objects.

        In an assistant's text the tags of thoughts and calls stay tokens, since templates look for them there.
        """
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        mark, keep_tags = self._client_text.mark, role == "assistant"
        content: Any = [
            {"type": part.modality} if part.text is None else {"type": "text", "text": mark(part.text, keep_tags)}
            for part in message.parts
        ]
        fields = mark({"tool_call_id": message.tool_call_id, "reasoning_content": message.thought})
        try:
            fields["tool_calls"] = mark([call.parsed() for call in message.tool_calls or ()])
        except (msgspec.DecodeError, RecursionError):
            # Arguments that are no object, or cut off. A template may fail at them, so they become the model's text.
            calls = "\n".join(f"{CALL}\n{mark(call.text)}\n{CALL_END}" for call in message.tool_calls or ())
            content.append({"type": "text", "text": "\n" * bool(message.content) + calls})
        if not isinstance(message.content, list):
            content = "".join(part["text"] for part in content)
        return {"role": role, "content": content, **{name: value for name, value in fields.items() if value}}

    def _template_arguments(self, chat: ChatRequest) -> dict[str, Any]:
        """The template's variables besides the messages. One that it does not read is left out."""
        tools = chat.tools if chat.calls_tools else None
        if tools and self._call_format is None:
            text = "the chat template has no tools in a known format; leave them out, or use another --chat-template"
            raise bad_request(text, "tools")
        variables = {"reasoning_effort": chat.reasoning_effort} | (chat.chat_template_kwargs or {})
        goes_on = bool(chat.continue_final_message)
        opens = not goes_on if chat.add_generation_prompt is None else chat.add_generation_prompt
        own = {"add_generation_prompt": opens, "continue_final_message": goes_on, "tools": msgspec.to_builtins(tools)}
        if fields := variables.keys() & {"messages", *own}:
            raise bad_request(f"set {min(fields)!r} as a field of the request", "chat_template_kwargs")
        used = {name: value for name, value in variables.items() if name in self._names and value is not None}
        return self._client_text.mark(own | used)


def collect_media(parts: Iterable[Part], limits: Mapping[str, int]) -> list[MediaRef]:
    """Returns the media of a conversation's parts, in order. `limits` is --limit-mm-per-prompt; absent means no limit.

    Raises ApiError, a 400, for more items than a limit allows.
    """
    refs: list[MediaRef] = []
    counts: Counter[str] = Counter()
    for part in parts:
        if modality := part.modality:
            counts[modality] += 1
            refs.append(MediaRef(modality, part.location, f"{modality} {counts[modality]}", part.settings, part.uuid))
    if len(refs) > MAX_MEDIA:
        text = f"the conversation has {len(refs)} images and videos, more than {MAX_MEDIA}; send fewer"
        raise bad_request(text, "messages")
    for kind, limit in limits.items():
        if counts[kind] > limit:
            allowed = f"more than the {limit} that --limit-mm-per-prompt allows; send fewer"
            raise bad_request(f"the conversation has {counts[kind]} {kind} items, {allowed}", "messages")
    return refs


# --- the prompt's media, for the engine -------------------------------------------------------------------------------


def media_usage(item: MediaItem, processor: MediaProcessor) -> dict[str, Any]:
    """The item in the response: its size in pixels after sampling and resizing, and its tokens; of a video also its
    frames, of which the last is repeated to fill the last temporal patch, its duration divided by their number, and
    when they are displayed, in seconds after the video's first frame."""
    steps, height, width = item.grid_thw
    size = {"width": width * processor.patch_size, "height": height * processor.patch_size}
    used = {"type": item.modality, **size, "tokens": item.num_tokens}
    if item.second_per_grid is None or item.timestamps is None:
        return used
    seconds, times = round(item.second_per_grid / processor.step, 4), [round(time, 4) for time in item.timestamps]
    return used | {"frames": steps * processor.step, "seconds_per_frame": seconds, "timestamps": times}


def check_budget(media: Sequence[MediaItem], limits: EngineLimits) -> None:
    """Raises ApiError, a 400, for media that do not fit into the encoder cache, with the flag that raises the limit. An
    item that occurs twice counts once."""
    needed, limit = sum({item.media_hash: item.num_tokens for item in media}.values()), limits.max_prompt_media_tokens
    if needed > limit:
        text = (
            f"The images and videos of this prompt have {needed} tokens together; this server takes at most {limit} in "
            f"one prompt. Send fewer or smaller ones, or start the server with --encoder-cache-tokens {needed}."
        )
        raise bad_request(text, "messages", "media_too_large")
