"""A request as the engine core sees it: token counts, block ids and handles."""

from __future__ import annotations

import dataclasses

from mini_engine.messages import MediaItem, MessageId, NewRequest


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One accepted request. The ranks hold its tokens; the core only counts them."""

    new: NewRequest
    sender: str
    incarnation: int
    num_computed: int = 0  # tokens whose keys and values are in the cache once the dispatched steps have run
    num_sampled: int = 0  # output tokens sampled by dispatched steps, those not reported yet among them
    num_delivered: int = 0  # output tokens reported and sent on
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_encoded: int = 0  # media items whose embeddings the ranks hold
    announced: bool = False  # the ranks know the sequence

    @property
    def id(self) -> str:
        return self.new.request_id

    @property
    def media(self) -> list[MediaItem]:
        return self.new.media

    @property
    def num_prompt(self) -> int:
        return len(self.new.prompt_token_ids)

    @property
    def num_known(self) -> int:
        """Tokens that exist or will exist once the dispatched steps have run."""
        return self.num_prompt + self.num_sampled

    @property
    def num_missing(self) -> int:
        """Known tokens that no dispatched step computes; 0 when no further token is wanted."""
        return 0 if self.num_sampled >= self.new.sampling.max_tokens else self.num_known - self.num_computed

    @property
    def messages(self) -> list[MessageId]:
        """The tensor messages that carry its media, each once."""
        return list(dict.fromkeys(item.patches.message for item in self.media))
