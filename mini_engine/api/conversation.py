"""The messages of a chat request: their roles, and parts of text, images and videos in each form that clients write.

Knows nothing of how media are fetched, nor of the chat template.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from mini_engine.api.tool_calls import ToolCall
from mini_engine.messages import Modality

MAX_MESSAGES = 4096

Ignored = Annotated[Any, Meta(description="Ignored: it does not change the answer.")]


class MediaUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """The URL of an image or video."""

    url: Annotated[str, Meta(min_length=1)]
    detail: Ignored = None  # `mm_processor_kwargs` sets the size of items


class TextPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text in a message."""

    text: str
    uuid: Ignored = None


class InputTextPart(TextPart, frozen=True, kw_only=True, tag="input_text"):
    """Text by the name of OpenAI's Responses API."""


Location = MediaUrl | Annotated[str, Meta(min_length=1)]


class _MediaPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    modality: ClassVar[Modality]

    uuid: Ignored = None

    @property
    def url(self) -> str:
        """Where the image or video is."""
        location = getattr(self, f"{self.modality}_url")
        return location if isinstance(location, str) else location.url


class ImagePart(_MediaPart, frozen=True, kw_only=True, tag="image_url"):
    """An image in a message."""

    modality = "image"
    image_url: Location


class VideoPart(_MediaPart, frozen=True, kw_only=True, tag="video_url"):
    """A video in a message, in vLLM's form."""

    modality = "video"
    video_url: Location


class InputImagePart(ImagePart, frozen=True, kw_only=True, tag="input_image"):
    """An image, as OpenAI's Responses API writes it."""

    detail: Ignored = None


class InputVideoPart(VideoPart, frozen=True, kw_only=True, tag="input_video"):
    """A video, by a name like those."""


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file, a `data:` URL of an image or a video."""

    file_data: Annotated[str, Meta(pattern="^data:(image|video)/")]
    filename: Ignored = None


class FilePart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="file"):
    """An image or a video, by its media type, in OpenAI's form."""

    file: File
    uuid: Ignored = None

    @property
    def modality(self) -> Modality:
        return "video" if self.url.startswith("data:video") else "image"

    @property
    def url(self) -> str:
        return self.file.file_data


MediaPart = ImagePart | VideoPart | InputImagePart | InputVideoPart | FilePart
Part = TextPart | InputTextPart | MediaPart


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message. What an answer of OpenAI's has beside its text is accepted where it says nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name
    tool_call_id: str | None = None
    name: Ignored = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: None = None

    def __post_init__(self) -> None:
        own = bool(self.tool_calls or self.thought)
        if (own and self.role != "assistant") or (self.content is None and not own):
            raise ValueError("it needs `content`; only the role assistant may have `tool_calls` or `reasoning` instead")

    @property
    def thought(self) -> str:
        """An assistant's reasoning."""
        return self.reasoning or self.reasoning_content or ""

    @property
    def parts(self) -> list[Part]:
        """`content` as a list."""
        return self.content if isinstance(self.content, list) else [TextPart(text=self.content or "")]

    @property
    def media(self) -> list[MediaPart]:
        """The images and videos, in order."""
        return [part for part in self.parts if not isinstance(part, TextPart)]

    @property
    def num_characters(self) -> int:
        """Of text, thoughts and arguments."""
        called = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return called + len(self.thought) + sum(len(part.text) for part in self.parts if isinstance(part, TextPart))


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
