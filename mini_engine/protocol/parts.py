"""The parts of a message's content: text, images and videos, in the forms of OpenAI, vLLM, Hugging Face and
qwen_vl_utils. Unknown fields are ignored, unless they would set how an item is sampled or sized.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta, Struct

from mini_engine.messages import Modality
from mini_engine.protocol.body_split import URL_FIELDS

Count = Annotated[int, Meta(ge=1, le=10**9)]
Rate = Annotated[float, Meta(gt=0, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

# By the kind of a part: the fields of which it has one.
_SOURCES = {
    "text": ("text",),
    "refusal": ("refusal",),
    "image": ("image_url", "image", "url"),
    "video": ("video_url", "video", "url"),
    "file": ("file",),
}
_SOURCE_NAMES = ("text", "refusal", *URL_FIELDS, "file")
_JPEG_BASE64 = "/9j/"  # how the base64 of each JPEG begins: sent without `data:`, it is no absolute path
MAX_NAME = 256  # characters
MAX_URL_CHARACTERS = 16384  # of `file://` and `http(s)://` URLs; `max_media_bytes` limits `data:` URLs
# Settings of qwen_vl_utils, or of a whole request, that a part does not have.
_UNSUPPORTED = ("resized_height", "resized_width", "raw_fps", "sample_fps", "num_frames", "start", "end")


class File(Struct, frozen=True):
    """The content of a file, a `data:` URL of an image or a video."""

    file_data: str

    def __post_init__(self) -> None:
        if not self.file_data.startswith(("data:image/", "data:video/")):
            text = "`file_data` begins with `data:image/` or `data:video/`; send the pages of a document as images"
            raise ValueError(text)


class PartSettings(Struct, frozen=True, kw_only=True):
    """How one item is sampled and sized, by the names of qwen_vl_utils. Those of videos change no image."""

    fps: Rate | None = None
    nframes: Annotated[int, Meta(ge=2, le=10**9)] | None = None
    min_frames: Count | None = None
    max_frames: Count | None = None
    video_start: Seconds | None = None
    video_end: Seconds | None = None
    min_pixels: Count | None = None  # of an image, or of each frame
    max_pixels: Count | None = None
    total_pixels: Count | None = None  # of a video: of every second frame, since two become one step

    resized_height: Any = None
    resized_width: Any = None
    raw_fps: Any = None
    sample_fps: Any = None
    num_frames: Any = None
    start: Any = None
    end: Any = None

    def __post_init__(self) -> None:
        for name in _UNSUPPORTED:
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` of a part is not supported; its settings are {', '.join(SUPPORTED)}")
        if self.fps is not None and self.nframes is not None:
            raise ValueError("a part has either `fps` or `nframes`")

    @property
    def settings(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in SUPPORTED}
        return {name: value for name, value in values.items() if value is not None}


SUPPORTED = [name for name in PartSettings.__struct_fields__ if name not in _UNSUPPORTED]


class MediaUrl(PartSettings, frozen=True, kw_only=True):
    """The URL of an image or video, perhaps with the settings of its part."""

    url: Annotated[str, Meta(min_length=1)]


Location = MediaUrl | Annotated[str, Meta(min_length=1)]


class Part(PartSettings, frozen=True, kw_only=True):
    """A part of a message: the one of text, refusal, image, video and file that `type` names. A refusal, of an
    assistant, is its `text`."""

    type: Literal[
        "text", "refusal", "image_url", "video_url", "image", "video", "file", "input_text", "input_image",
        "input_video", "output_text", "reasoning_text", "summary_text",
    ]  # fmt: skip
    text: str | None = None
    refusal: str | None = None
    image_url: Location | None = None
    video_url: Location | None = None
    image: Location | None = None
    video: Location | None = None
    url: Location | None = None
    file: File | None = None
    # vLLM's: names the image or video; alone, or beside null, it means what was named before.
    uuid: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None = None

    def __post_init__(self) -> None:
        if self.text is None:
            super().__post_init__()
        sources = _SOURCES[self._kind]
        given = [name for name in _SOURCE_NAMES if getattr(self, name) is not None]
        is_name = self.uuid is not None and self._kind in ("image", "video") and not given
        if not is_name and (len(given) != 1 or given[0] not in sources):
            alone = ", or a `uuid` alone" if self._kind in ("image", "video") else ""
            allowed = f"`{'` or `'.join(sources)}`, and no other of these{alone}"
            raise ValueError(f"a part of the type {self.type} has {allowed}")
        if self.refusal is not None:
            msgspec.structs.force_setattr(self, "text", self.refusal)

    def fill_in(self, urls: dict[str, Any]) -> None:
        """Take the URL from `urls`, and put it in the place of the one that stands for it; see `SplitBody`."""
        for name in _SOURCE_NAMES[2:]:
            source = getattr(self, name)
            owner, inner = (self, name) if isinstance(source, str) else (source, "file_data" if self.file else "url")
            if source is not None:
                url = getattr(owner, inner)
                msgspec.structs.force_setattr(owner, inner, urls.pop(url, url))

    @property
    def _kind(self) -> str:
        return "text" if self.type.endswith("text") else self.type.removeprefix("input_").removesuffix("_url")

    @property
    def _source(self) -> Any:
        return self.image_url or self.video_url or self.image or self.video or self.url or ""

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the item's URL, and over them the part's own."""
        return (self._source.settings if isinstance(self._source, MediaUrl) else {}) | super().settings

    @property
    def modality(self) -> Modality | None:
        """None: text."""
        is_video = self._kind == "video" or self.location[:10].lower() == "data:video"
        return None if self.text is not None else "video" if is_video else "image"

    @property
    def location(self) -> str:
        """The URL of the image or video; of text, and of a name alone, empty."""
        location: str = self.file.file_data if self.file else getattr(self._source, "url", self._source)
        is_path = location.startswith("/") and not location.startswith(_JPEG_BASE64)
        return f"file://{quote(location)}" if is_path else location


@dataclass(frozen=True)
class MediaRef:
    """One image or video of a conversation, in the order of the prompt."""

    modality: Modality
    url: str  # empty: known by its name alone
    name: str  # what errors call it: "video 1" is the first video of the conversation
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its part, see `PartSettings`
    uuid: str | None = None  # the client's name for it
    key: bytes = b""  # of that name, see `http/known_media.py`
