"""How a request's media are sampled and processed: as the server says, or as the request asks.

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
    """The server's settings, and those of requests that set some of them."""

    def __init__(self, processor: MediaProcessor, model: tuple[str, str | None]):
        self.server = KeyedSettings.of(processor.settings, model)
        self._processor = processor
        self._model = model

    def resolve(self, chat: ChatRequest) -> KeyedSettings:
        """The settings for the media of `chat`.

        Raises:
            ApiError: 400 for settings that there are not, or that ask for more than the server allows.
        """
        io_kwargs, processor_kwargs = chat.media_io_kwargs or {}, chat.mm_processor_kwargs or {}
        if io_kwargs.get("image"):
            raise bad_request("Invalid 'media_io_kwargs': images take no arguments.", "media_io_kwargs")
        video_kwargs = io_kwargs.get("video") or {}
        if not video_kwargs and not processor_kwargs:
            return self.server
        try:
            settings = self._processor.settings_for(video_kwargs, processor_kwargs)
        except ValueError as error:
            param = "mm_processor_kwargs" if processor_kwargs else "media_io_kwargs"
            raise bad_request(f"Invalid '{param}': {error}.", param, "invalid_value") from error
        return KeyedSettings.of(settings, self._model)
