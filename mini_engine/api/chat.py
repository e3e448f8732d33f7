"""Chat messages -> prompt token ids, with a place for each image and video.

Three steps, because an item's length is known only after it was processed: `collect` finds the media, `render` writes
one placeholder for each, `expand` makes each placeholder as long as its item. Knows nothing of HTTP, nor how media are
fetched or processed. All methods may run in several threads at once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mini_engine.messages import Modality

Message = Mapping[str, Any]

_EVERY_PART = ("type", "uuid")
PART_SETTINGS: dict[Modality, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels"),
    "video": ("min_pixels", "max_pixels", "fps", "num_frames", "min_frames", "max_frames"),
}
_ROLES = ("system", "developer", "user", "assistant")
PART_TYPES: dict[str, tuple[Modality, tuple[str, ...]]] = {
    "image_url": ("image", ("image_url",)),  # OpenAI's
    "video_url": ("video", ("video_url",)),  # vLLM's
    "image": ("image", ("image", "url")),  # Hugging Face's
    "video": ("video", ("video", "url")),
}
# Besides the two placeholders themselves: the marks around them in the Qwen-VL vocabularies.
_VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")


class ChatError(ValueError):
    """Messages that cannot become a prompt. The text is safe to show to the client."""


@dataclass(frozen=True)
class MediaRef:
    """One image or video of a conversation, in the order of the prompt."""

    modality: Modality
    url: str
    name: str  # what errors call it: "video 1" is the first video of the conversation
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its part


class Placeholder(NamedTuple):
    """What is to stand for an item: `num_tokens` placeholders, in one run or as they stand in `text`, one for each of
    several runs."""

    modality: Modality
    num_tokens: int
    text: str | None = None


@dataclass(frozen=True)
class PlacedItem:
    """Where an item's placeholders lie among a prompt's tokens."""

    offset: int
    length: int
    more_offsets: list[int] = field(default_factory=list)  # of further runs of them, all equally long


@dataclass(frozen=True)
class ExpandedPrompt:
    """What the engine gets: all token ids, and the places of each item's placeholders in order."""

    token_ids: list[int]
    items: list[PlacedItem]


class ChatRenderer:
    """Writes prompts for one model, by its Hugging Face processor's tokenizer and chat template."""

    def __init__(self, hf_processor: Any, chat_template: str | None = None) -> None:
        """`chat_template` is Jinja text to use instead of the model's own. Raises ValueError if there is neither."""
        self._hf = hf_processor
        own = hf_processor.chat_template or hf_processor.tokenizer.chat_template
        template = chat_template or (own.get("default") if isinstance(own, dict) else own)
        if not template:
            raise ValueError("the model has no chat template; give one with --chat-template")
        self._template: str = template
        # The Rust tokenizer itself: its encode changes nothing, so that threads can share it. The wrapper around it
        # may set truncation and padding, which fails ("Already borrowed") while another thread encodes.
        self._encoder = hf_processor.tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._modality_of: dict[int, Modality] = {
            int(hf_processor.image_token_id): "image",
            int(hf_processor.video_token_id): "video",
        }
        vocabulary = hf_processor.tokenizer.get_added_vocab()
        marks = [mark for mark in _VISION_MARKS if mark in vocabulary]
        self._reserved = (hf_processor.image_token, hf_processor.video_token, *marks)
        # In characters, which are never more than the bytes that a token stands for.
        self._longest_token = max(map(len, hf_processor.tokenizer.get_vocab()))
        self.max_tokens: int | None = None  # the engine's limit, once it is known
        self._knows_developer = "developer" in template
        self.render([{"role": "user", "content": "Hello"}])  # a template that cannot work is found at start

    def collect(self, messages: Sequence[Message], limits: Mapping[str, int] | None = None) -> list[MediaRef]:
        """Returns the media of a conversation in order. `limits` is --limit-mm-per-prompt; absent means no limit.

        Raises ChatError for messages of a wrong form, parts of an unknown type, or more items than a limit allows.
        """
        refs: list[MediaRef] = []
        counts: Counter[str] = Counter()
        for message in messages:
            for part in _media_parts(message):
                modality, _ = PART_TYPES[part["type"]]
                counts[modality] += 1
                name = f"{modality} {counts[modality]}"
                settings = {key: part[key] for key in PART_SETTINGS[modality] if part.get(key) is not None}
                refs.append(MediaRef(modality, _url_of(part, name), name, settings))
        for limited, limit in (limits or {}).items():
            if counts[limited] > limit:
                raise ChatError(
                    f"the conversation has {counts[limited]} {limited} items, more than the {limit} that "
                    f"--limit-mm-per-prompt allows; send fewer"
                )
        return refs

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Returns the prompt's token ids, the start of the answer included, with one placeholder id for each item.

        Raises ChatError for messages of a wrong form, for text that holds the model's placeholder tokens (which would
        pass for media), and when the template refuses the conversation or leaves out an item.
        """
        if not messages:
            raise ChatError("messages must not be empty")
        text = self._apply_template([self._for_template(message) for message in messages])
        self._check_length(text)
        token_ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        wanted = [PART_TYPES[part["type"]][0] for message in messages for part in _media_parts(message)]
        placed = [self._modality_of[token] for token in token_ids if token in self._modality_of]
        if placed != wanted:
            raise ChatError(
                f"the chat template wrote {len(placed)} placeholders for {len(wanted)} media items, or in another order"
            )
        return token_ids

    @property
    def placeholders(self) -> frozenset[int]:
        """The token ids that stand for media."""
        return frozenset(self._modality_of)

    def encode(self, text: str, add_special_tokens: bool, allow_placeholders: bool = False) -> list[int]:
        """The token ids of a text that is no conversation.

        Raises ChatError for one that is too long however it is tokenised, or that holds the model's placeholder tokens
        unless they are allowed.
        """
        if not allow_placeholders:
            self._check_text(text)
        self._check_length(text, "the prompt")
        return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids

    def _check_length(self, text: str, what: str = "the conversation") -> None:
        """Refuse what no tokenisation could make short enough, since tokenising it would hold up everybody else."""
        least = len(text) // self._longest_token
        if self.max_tokens is not None and least > self.max_tokens:
            raise ChatError(
                f"{what} has {len(text)} characters, which is at least {least} tokens; this server takes "
                f"{self.max_tokens} tokens for prompt and answer together"
            )

    def expand(self, token_ids: Sequence[int], items: Sequence[Placeholder]) -> ExpandedPrompt:
        """Makes each placeholder as long as its item, with the text that belongs to it. `items` are in order.

        Raises ValueError when the items are not those of the placeholders: a mistake of the caller, not of the client.
        """
        expanded: list[int] = []
        placed: list[PlacedItem] = []
        remaining = iter(items)
        for token in token_ids:
            modality = self._modality_of.get(token)
            if modality is None:
                expanded.append(token)
                continue
            item = next(remaining, None)
            if item is None or item.modality != modality or item.num_tokens < 1:
                raise ValueError(f"placeholder {len(placed)} is for a {modality}, the item is {item}")
            # By itself: in a model's own template a special token stands on either side, which no token reaches across.
            written = [token] if item.text is None else self._encoder.encode(item.text, add_special_tokens=False).ids
            runs = written.count(token)
            offsets: list[int] = []
            for each in written:
                if each == token:
                    offsets.append(len(expanded))
                    expanded.extend([token] * (item.num_tokens // runs))
                else:
                    expanded.append(each)
            placed.append(PlacedItem(offsets[0], item.num_tokens, offsets[1:]))
        if len(placed) != len(items):
            raise ValueError(f"{len(items)} items for {len(placed)} placeholders")
        return ExpandedPrompt(expanded, placed)

    def _for_template(self, message: Message) -> dict[str, Any]:
        """The message as Hugging Face templates know it: role and content, media as bare {"type": "image"}."""
        role = message["role"] if message.get("role") in _ROLES else _fail_role(message.get("role"))
        if role == "developer" and not self._knows_developer:
            role = "system"
        content = _content(message)
        if isinstance(content, str):
            self._check_text(content)
            return {"role": role, "content": content}
        parts = [
            {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": PART_TYPES[part["type"]][0]}
            for part in content
        ]
        # Joined, because a template writes neighbouring parts without anything in between.
        self._check_text("".join(part.get("text", "\n") for part in parts))
        return {"role": role, "content": parts}

    def _check_text(self, text: str) -> None:
        for token in self._reserved:
            if token in text:
                raise ChatError(f"the text holds {token}, which stands for media in this model; remove it")

    def _apply_template(self, messages: list[dict[str, Any]]) -> str:
        import jinja2

        try:
            return self._hf.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError) as error:  # templates raise too, as for roles in a wrong order
            raise ChatError(f"the chat template refuses these messages: {str(error)[:200]}") from error


def _fail_role(role: Any) -> str:
    raise ChatError(f"message role {str(role)[:40]!r} is not supported; use {', '.join(_ROLES)}")


def _content(message: Message) -> str | list[Mapping[str, Any]]:
    """The content, checked: a string, or a list of parts whose types are known and whose texts are strings."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError("message content must be a string or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise ChatError("a content part of type 'text' must have a string under 'text'")
            _check_keys(part, ("text",))
        elif kind not in PART_TYPES:
            raise ChatError(
                f"content part of type {str(kind)[:40]!r} is not supported; use text, {', '.join(PART_TYPES)}"
            )
        else:
            modality, keys = PART_TYPES[kind]
            _check_keys({key: part[key] for key in part if key not in PART_SETTINGS[modality]}, keys)
    return content


def _check_keys(part: Mapping[str, Any], keys: Sequence[str]) -> None:
    """What else a part holds would be lost."""
    given = [key for key in part if key not in _EVERY_PART]
    for key in given:
        if key not in keys:
            raise ChatError(
                f"a content part of type {part['type']!r} must not have {key[:40]!r} as well; send a part for each"
            )
    if len(given) > 1:
        raise ChatError(f"a content part of type {part['type']!r} must have one of {' and '.join(given)}, not both")


def _media_parts(message: Message) -> list[Mapping[str, Any]]:
    content = _content(message)
    return [] if isinstance(content, str) else [part for part in content if part["type"] != "text"]


def _url_of(part: Mapping[str, Any], name: str) -> str:
    _, keys = PART_TYPES[part["type"]]
    for key in keys:
        value = part.get(key)
        url = value.get("url") if isinstance(value, Mapping) else value
        if isinstance(url, str) and url:
            return url
    raise ChatError(f"{name}: the part must look like {{'type': '{part['type']}', '{keys[0]}': {{'url': '...'}}}}")
