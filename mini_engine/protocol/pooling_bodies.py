"""The request bodies of embeddings, rankings and scores, as `bodies.py` has the others. Knows nothing of the prompts
that are made of them (`prompt/pooling.py`)."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

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

    inputs_field: ClassVar[str] = "input"

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
    def has_system_message(self) -> bool:
        return any(message.role in ("system", "developer") for message in self.messages or ())

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
        if self.instruction and self.has_system_message:
            raise bad_request("Send either 'instruction' or a system message, not both.", "instruction")


class RankingItem(Struct, frozen=True, forbid_unknown_fields=True):
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


Items = str | RankingItem | Annotated[list[str | RankingItem], Meta(min_length=1)]
Content = list[Part]  # of a query or a document


def contents_of(*items: Items | None) -> list[Content]:
    """The parts of each query or document, of the first of the fields that is not None."""
    given: Any = next((field for field in items if field is not None), [])
    listed = given if isinstance(given, list) else [given]
    return [[Part(type="text", text=item)] if isinstance(item, str) else item.parts for item in listed]


class RankingRequest(PoolingRequest, kw_only=True, frozen=True):
    """The fields of requests for scores of documents."""

    inputs_field = "documents"

    @property
    def sides(self) -> tuple[list[Content], list[Content]]:
        """The queries, and the documents."""
        raise NotImplementedError

    @property
    def parts(self) -> Iterator[Part]:
        return (part for contents in self.sides for content in contents for part in content)

    @property
    def pairs(self) -> list[tuple[Content, Content]]:
        """Each document with its query."""
        queries, documents = self.sides
        return list(zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True))

    def check(self) -> None:
        super().check()
        num_queries, num_documents = map(len, self.sides)
        if num_queries not in (1, num_documents) or num_documents > MAX_INPUTS:
            remedy = f"send one query, or one for each document, and at most {MAX_INPUTS} documents"
            raise bad_request(f"{num_queries} queries for {num_documents} documents: {remedy}.", "documents")


class RerankRequest(RankingRequest, kw_only=True, frozen=True):
    """The body of a rerank request, in the form of Jina and Cohere."""

    query: str | RankingItem
    documents: Items
    top_n: Annotated[int, Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None

    @property
    def sides(self) -> tuple[list[Content], list[Content]]:
        return contents_of(self.query), contents_of(self.documents)


class ScoreRequest(RankingRequest, kw_only=True, frozen=True):
    """The body of a score request, in vLLM's form. `text_1` and `text_2` are older names of the others."""

    queries: Items | None = None
    documents: Items | None = None
    text_1: Items | None = None
    text_2: Items | None = None
    encoding_format: Ignored = IGNORED

    @property
    def sides(self) -> tuple[list[Content], list[Content]]:
        return contents_of(self.queries, self.text_1), contents_of(self.documents, self.text_2)

    def check(self) -> None:
        for name, other in (("queries", "text_1"), ("documents", "text_2")):
            if (getattr(self, name) is None) == (getattr(self, other) is None):
                raise bad_request(f"Send either '{name}' or '{other}'.", name, "missing_required_parameter")
        super().check()
