"""The messages of a chat request: their roles, and parts of text, images and videos in each form that clients write.

Knows nothing of how media are fetched, nor of the chat template.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mini_engine.api.tool_calls import ToolCall
from mini_engine.messages import Modality

MAX_MESSAGES = 4096

Ignored = Annotated[Any, Meta(description="Ignored: it does not change the answer.")]


class MediaUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """The URL of an image or video."""

    url: Annotated[str, Meta(min_length=1)]
    detail: Ignored = None  # `mm_processor_kwargs` sets the size of items


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file, a `data:` URL of an image or a video."""

    file_data: Annotated[str, Meta(pattern="^data:(image|video)/")]
    filename: Ignored = None


Location = MediaUrl | Annotated[str, Meta(min_length=1)]
PartType = Literal["text", "image_url", "video_url", "file", "input_text", "input_image", "input_video"]
INPUT = {"input_text": "text", "input_image": "image_url", "input_video": "video_url"}  # names of the Responses API


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message: the one of text, image, video and file that `type` names."""

    type: PartType
    text: str | None = None
    image_url: Location | None = None
    video_url: Location | None = None
    file: File | None = None
    detail: Ignored = None
    uuid: Ignored = None

    def __post_init__(self) -> None:
        wanted = INPUT.get(self.type, self.type)
        if [name for name in ("text", "image_url", "video_url", "file") if getattr(self, name) is not None] != [wanted]:
            raise ValueError(f"a part of the type {self.type} has `{wanted}`, and nothing else")

    @property
    def modality(self) -> Modality | None:
        """None: text."""
        is_video = self.video_url is not None or self.url.startswith("data:video")
        return None if self.text is not None else "video" if is_video else "image"

    @property
    def url(self) -> str:
        """Where the image or video is; of text empty."""
        location = self.file.file_data if self.file else self.image_url or self.video_url or ""
        return location.url if isinstance(location, MediaUrl) else location


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message. What an answer of OpenAI's has beside its text is accepted where it says nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    name: Ignored = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: None = None

    def __post_init__(self) -> None:
        own = bool(self.tool_calls or self.reasoning_content)
        if (own and self.role != "assistant") or (self.content is None and not own):
            raise ValueError("it needs `content`; only the role assistant may have `tool_calls` or a thought instead")

    @property
    def parts(self) -> list[Part]:
        """`content` as a list."""
        return self.content if isinstance(self.content, list) else [Part(type="text", text=self.content or "")]

    @property
    def media(self) -> list[tuple[Modality, str]]:
        """The images and videos, each with its URL, in order."""
        return [(part.modality, part.url) for part in self.parts if part.modality is not None]

    @property
    def num_characters(self) -> int:
        """Of text, thoughts and arguments."""
        texts = [self.reasoning_content, *(call.function.arguments for call in self.tool_calls or ())]
        return sum(len(text or "") for text in (*texts, *(part.text for part in self.parts)))


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
