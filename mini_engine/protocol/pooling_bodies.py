"""The request bodies of embeddings, rankings and scores, as `bodies.py` has the others. Knows nothing of the prompts
that are made of them (`prompt/pooling.py`)."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.bodies import (
    IGNORED,
    MAX_PARTS,
    Body,
    ChatMessage,
    ChatRequest,
    Ignored,
    Int32,
    MediaIOKwargs,
    Messages,
    Positive,
    Prompts,
    check_structure,
    separate,
)
from mini_engine.protocol.parts import Part

MAX_INPUTS = 2048  # OpenAI's limit on `input`


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

    def chat(self, *messages: ChatMessage) -> ChatRequest:
        """A chat request with these messages, and what this one says of media, cache and turn."""
        names = {*self.__struct_fields__}.intersection(ChatRequest.__struct_fields__)
        return ChatRequest(**{name: getattr(self, name) for name in names} | {"messages": [*messages]})

    def check(self) -> None:
        super().check()
        check_structure((), self.chat_template_kwargs)


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
    def inputs(self) -> list[str | list[int]]:
        return [] if self.input is None else separate(self.input, "input")

    def check(self) -> None:
        super().check()
        check_structure(self.messages or (), None)
        if (self.input is None) == (self.messages is None):
            raise bad_request("Send either 'input' or 'messages'.", "input", "missing_required_parameter")
        if len(self.inputs) > MAX_INPUTS:
            raise bad_request(f"{len(self.inputs)} inputs are more than {MAX_INPUTS}; send fewer.", "input")
        if self.instruction and any(message.role == "system" for message in self.messages or ()):
            raise bad_request("Send either 'instruction' or a system message, not both.", "instruction")


class RankingItem(Struct, frozen=True):
    """A query or a document: a text, or vLLM's parts of a message."""

    text: str | None = None
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.content is None):
            raise ValueError("it has either `text` or `content`")

    @property
    def parts(self) -> list[Part]:
        if isinstance(self.content, list):
            return self.content
        return [Part(type="text", text=self.content if self.text is None else self.text)]


OneItem = str | RankingItem
Items = str | RankingItem | Annotated[list[OneItem], Meta(min_length=1)]
Pair = tuple[list[Part], list[Part]]  # the parts of a query, and of a document


def parts_of(items: Items | None) -> list[list[Part]]:
    """The parts of each query or document."""
    listed: Iterable[OneItem] = items if isinstance(items, list) else [items] if items is not None else []
    return [[Part(type="text", text=item)] if isinstance(item, str) else item.parts for item in listed]


class RankingRequest(PoolingRequest, kw_only=True, frozen=True):
    """The fields of requests for scores of documents."""

    documents: Items | None = None

    @property
    def all_items(self) -> tuple[Items | None, Items | None]:
        """Queries and documents."""
        raise NotImplementedError

    @property
    def parts(self) -> Iterator[Part]:
        return (part for items in self.all_items for parts in parts_of(items) for part in parts)

    @property
    def pairs(self) -> list[Pair]:
        """Each document with its query."""
        queries, documents = map(parts_of, self.all_items)
        return list(zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True))

    def check(self) -> None:
        super().check()
        queries, documents = map(parts_of, self.all_items)
        if not queries or not documents:
            raise bad_request("Send a query and documents.", "documents", "missing_required_parameter")
        if len(queries) not in (1, len(documents)):
            text = f"{len(queries)} queries for {len(documents)} documents; send one query, or one for each document."
            raise bad_request(text, "queries")
        if len(documents) > MAX_INPUTS:
            raise bad_request(f"{len(documents)} documents are more than {MAX_INPUTS}; send fewer.", "documents")


class RerankRequest(RankingRequest, kw_only=True, frozen=True):
    """The body of a rerank request, in the form of Jina and Cohere."""

    query: OneItem
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None

    @property
    def all_items(self) -> tuple[Items | None, Items | None]:
        return self.query, self.documents


class ScoreRequest(RankingRequest, kw_only=True, frozen=True):
    """The body of a score request, in vLLM's form."""

    queries: Items | None = None
    text_1: Items | None = None  # the older names of `queries` and `documents`
    text_2: Items | None = None
    encoding_format: Ignored = IGNORED

    @property
    def all_items(self) -> tuple[Items | None, Items | None]:
        first = self.text_1 if self.queries is None else self.queries
        return first, self.text_2 if self.documents is None else self.documents

    def check(self) -> None:
        super().check()
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise bad_request(f"Send either '{name}' or '{other}', not both.", name)
