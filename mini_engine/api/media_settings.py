"""How a request's media are sampled and processed: as the server says, or by less of it if the request asks for that.

Knows nothing of media themselves, nor how they are fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_engine.api.errors import bad_request
from mini_engine.api.protocol import ChatRequest
from mini_engine.media.hashing import settings_key
from mini_engine.messages import Modality

if TYPE_CHECKING:
    from mini_engine.media.processor import MediaProcessor, MediaSettings


@dataclass(frozen=True, eq=False)
class KeyedSettings:
    """How items become patches, and for each modality all that a media hash covers of it but the item's bytes."""

    settings: MediaSettings
    keys: Mapping[Modality, bytes]

    @classmethod
    def of(cls, settings: MediaSettings, model: tuple[str, str | None]) -> KeyedSettings:
        """`model`: see `hashing.settings_key`."""
        keys: dict[Modality, bytes] = {
            "image": settings_key("image", None, settings.processor_kwargs, model),
            "video": settings_key("video", settings.sampling, settings.processor_kwargs, model),
        }
        return cls(settings, keys)


class MediaSettingsResolver:
    """The server's settings, and those of requests, which can only lower the server's limits."""

    def __init__(
        self, processor: MediaProcessor, settings: MediaSettings, model: tuple[str, str | None], most_frames: int
    ):
        """`most_frames`: of a video, kept at most where `settings` do not say."""
        self.server = KeyedSettings.of(settings, model)
        self._processor = processor
        self._model = model
        self._most_frames = most_frames

    def resolve(self, chat: ChatRequest) -> KeyedSettings:
        """The settings for the media of `chat`.

        Raises:
            ApiError: 400 for settings that there are not, or that ask for more than the server's.
        """
        io_kwargs, processor_kwargs = chat.media_io_kwargs or {}, chat.mm_processor_kwargs or {}
        if io_kwargs.get("image"):
            raise bad_request("Invalid 'media_io_kwargs': images take no arguments.", "media_io_kwargs")
        video_kwargs = io_kwargs.get("video") or {}
        if not video_kwargs and not processor_kwargs:
            return self.server
        try:
            narrowed = self._processor.narrowed(self.server.settings, video_kwargs, processor_kwargs, self._most_frames)
        except ValueError as error:
            # The sampling may stand in either, and its errors do not say in which.
            of_processor = not video_kwargs or str(error).startswith("mm_processor_kwargs")
            param = "mm_processor_kwargs" if of_processor else "media_io_kwargs"
            raise bad_request(f"Invalid '{param}': {error}.", param, "invalid_value") from error
        return KeyedSettings.of(narrowed, self._model)
