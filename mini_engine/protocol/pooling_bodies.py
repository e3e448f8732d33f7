"""The request bodies of embeddings, rankings and scores, as `bodies.py` has the others. Knows nothing of the prompts
that are made of them (`prompt/pooling_prompts.py`)."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.bodies import (
    IGNORED,
    MAX_PARTS,
    PART_CHARACTERS,
    Body,
    Ignored,
    Int32,
    MediaIOKwargs,
    Messages,
    Positive,
    Prompts,
    separate,
)
from mini_engine.protocol.parts import Part

MAX_INPUTS = 2048  # OpenAI's limit on `input`
MAX_REPEATED = 1 << 22  # characters of query and instruction, for all prompts after the first


class PoolingRequest(Body, kw_only=True, frozen=True):
    """The fields of every request for embeddings or scores."""

    instruction: Annotated[str, Meta(min_length=1)] | None = None  # what is compared, and for what
    priority: Int32 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    media_io_kwargs: MediaIOKwargs | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # those that the model's tokenizer puts after a text
    user: Ignored = IGNORED

    def check_repeated(self, name: str, count: int, query: Sequence[Part] = ()) -> None:
        """Raises ApiError, a 400, if the prompts of the `count` inputs in the field `name` repeat too much: each has
        the instruction, and the `query`."""
        characters = len(self.instruction or "") + sum(PART_CHARACTERS + len(part.text or "") for part in query)
        if (count - 1) * characters > MAX_REPEATED:
            shared = f"query and instruction, of {characters} characters, are in the prompt of each of {count} inputs"
            limit = f"more than {MAX_REPEATED} characters besides the first"
            raise bad_request(f"Invalid '{name}': {shared}: {limit}; send fewer inputs.", name)


class EmbeddingRequest(PoolingRequest, kw_only=True, frozen=True):
    """The body of an embeddings request: texts and token ids, or one conversation."""

    items_per_unit = 8  # token ids cost little

    input: Prompts | None = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def has_system_message(self) -> bool:
        return any(message.role in ("system", "developer") for message in self.messages or ())

    @property
    def inputs(self) -> list[str | list[int]]:
        return [] if self.input is None else separate(self.input, "input")

    def check(self) -> None:
        super().check()
        if (self.input is None) == (self.messages is None):
            raise bad_request("Send either 'input' or 'messages'.", "input", "missing_required_parameter")
        if len(self.inputs) > MAX_INPUTS:
            raise bad_request(f"{len(self.inputs)} inputs are more than {MAX_INPUTS}; send fewer.", "input")
        if self.instruction and self.has_system_message:
            raise bad_request("Send either 'instruction' or a system message, not both.", "instruction")
        self.check_repeated("input", len(self.inputs))


class RankingItem(Struct, frozen=True, forbid_unknown_fields=True):
    """A query or a document: a text, or vLLM's parts of a message."""

    text: str | None = None
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.content is None):
            raise ValueError("it has either `text` or `content`")


Item = str | RankingItem
Items = Item | Annotated[list[Item], Meta(min_length=1, max_length=MAX_INPUTS)]
Content = list[Part]  # of a query or a document


def _content(item: Item) -> Content:
    content = (item.content or item.text or "") if isinstance(item, RankingItem) else item
    return content if isinstance(content, list) else [Part(type="text", text=content)]


class RankingRequest(PoolingRequest, kw_only=True, frozen=True):
    """The fields of requests for scores of documents."""

    # The fields of queries, and of documents; a request has one of each.
    side_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = (("query",), ("documents",))

    @property
    def sides(self) -> list[list[Content]]:
        """The queries, and the documents."""
        given = [next(filter(None, (getattr(self, name) for name in names)), "") for names in self.side_names]
        return [[_content(item) for item in (side if isinstance(side, list) else [side])] for side in given]

    @property
    def parts(self) -> Iterator[Part]:
        return (part for contents in self.sides for content in contents for part in content)

    def check(self) -> None:
        super().check()
        for names in self.side_names:
            if sum(getattr(self, name) is not None for name in names) != 1:
                text = f"Send either '{names[0]}' or '{names[-1]}'."
                raise bad_request(text, names[0], "missing_required_parameter")
        queries, documents = self.sides
        num_queries, num_documents = len(queries), len(documents)
        if num_queries not in (1, num_documents):
            remedy = "send one query, or one for each document"
            raise bad_request(f"{num_queries} queries for {num_documents} documents: {remedy}.", "documents")
        self.check_repeated("documents", num_documents, queries[0] if num_queries == 1 else [])


class RerankRequest(RankingRequest, kw_only=True, frozen=True):
    """The body of a rerank request, in the form of Jina and Cohere."""

    query: Item
    documents: Items
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None


class ScoreRequest(RankingRequest, kw_only=True, frozen=True):
    """The body of a score request, in vLLM's form. `text_1` and `text_2` are older names of the others."""

    side_names = (("queries", "text_1"), ("documents", "text_2"))

    queries: Items | None = None
    documents: Items | None = None
    text_1: Items | None = None
    text_2: Items | None = None
    encoding_format: Ignored = IGNORED
