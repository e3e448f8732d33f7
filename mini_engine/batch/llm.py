"""The engine from Python: `LLM` starts a server of its own, and asks it about texts, images and videos."""

import array
import asyncio
import base64
import concurrent.futures
import io
import json
import os
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from tqdm.auto import tqdm

from mini_engine.batch.server_handle import MAX_CONCURRENCY, ServerHandle
from mini_engine.launch.cli import settle

ROOT_FLAG = "--allowed-local-media-path=/"
CHAT = "/v1/chat/completions"
REFUSED = (400, 404, 413)  # which a document may be the cause of

Prompt = Any  # see `LLM`


class Media:
    """An item of a prompt.

    Args:
        source: a path, a URL (`http(s)://`, `file://`, `data:`), or a file's content as bytes; of an image also a PIL
            image. None: what had the same `uuid` before.
        settings: such as `fps`, `nframes`, `video_start`, `max_pixels`; docs/api.md lists them. And its `uuid`.
    """

    kind: ClassVar[str]

    def __init__(self, source: str | os.PathLike[str] | bytes | Any, **settings: Any):
        self.source, self.settings = source, settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r:.100})"

    def part(self) -> dict[str, Any]:
        """The part of a message. Raises OSError, ValueError: the image cannot be encoded, or there is neither."""
        is_name = self.source is None
        if is_name and "uuid" not in self.settings:
            raise ValueError(f"{self} has neither a source nor the `uuid` of one that was sent before")
        return {"type": f"{self.kind}_url", f"{self.kind}_url": None if is_name else self._url(), **self.settings}

    def _url(self) -> str:
        source = self.source
        if isinstance(source, str) and source.startswith(("http://", "https://", "file://", "data:")):
            return source
        if isinstance(source, str | os.PathLike):
            return f"file://{quote(os.path.abspath(os.fsencode(source)))}"
        if not isinstance(source, bytes):
            buffer = io.BytesIO()
            source.save(buffer, "PNG", compress_level=1)  # a quarter of the default's time, a fifth more bytes
            source = buffer.getvalue()
        return f"data:{self.kind}/;base64,{base64.b64encode(source).decode()}"


class Image(Media):
    kind = "image"


class Video(Media):
    kind = "video"


@dataclass(frozen=True)
class ChatAnswer:
    """What became of one prompt."""

    id: int  # the position of the prompt, from 0 on
    text: str = ""  # of the first choice
    error: str | None = None  # why there is no answer
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)  # tokens
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds of each stage in the server
    response: Mapping[str, Any] = field(default_factory=dict)  # all of it: tool calls, thoughts, other choices

    @classmethod
    def of(cls, index: int, body: Mapping[str, Any]) -> "ChatAnswer":
        """That in a response without a stream."""
        choice, usage, timings = body["choices"][0], body["usage"], body.get("metrics", {})
        text = choice["message"]["content"] or ""
        return cls(index, text, None, choice["finish_reason"], usage, timings, body)


@dataclass(frozen=True)
class PooledAnswer:
    """What became of one input, or one document."""

    id: int  # its position, from 0 on
    vector: Sequence[float] = ()  # the embedding of an input: float32, of length 1; also for `numpy.asarray`
    score: float = 0.0  # of a document: how well it answers the query, at most 1
    error: str | None = None  # why there is neither
    usage: Mapping[str, Any] = field(default_factory=dict)  # of all documents of a request
    response: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, index: int, body: Mapping[str, Any]) -> "PooledAnswer":
        """That in a response with one embedding, in base64."""
        vector = array.array("f", base64.b64decode(body["data"][0]["embedding"]))
        return cls(index, vector, 0.0, None, body["usage"], body)


AnswerT = TypeVar("AnswerT", ChatAnswer, PooledAnswer)


class LLM:
    """A model, and the processes that serve it, which end with `close`, with a `with` block, or with the program.

    A prompt is a text; or a list of texts, `Image` and `Video`, which is one message of a user; or a conversation, a
    list of messages with `role` and `content`, a text or such a list. Fields of a request, such as `temperature` and
    `max_tokens`, are named as in the body of a chat completion.

    An error of one prompt is in its answer. What all of them would suffer from is raised, as `ServerError`: the end of
    the server. Methods may be called from any thread. None needs the `__main__` guard of multiprocessing.

    Args:
        model: directory or hub name; by default the bundled model.
        max_concurrency: prompts that are read ahead and in flight.
        flags: of `serve.py`, as in its command line.
        options: the same flags with underscores, such as `max_model_len=16384`. Images and videos may be read from
            anywhere unless `allowed_local_media_path` says otherwise: set it for conversations of other people.

    Raises:
        ConfigError: unusable options.
        ServerError: the server did not start.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        max_concurrency: int = MAX_CONCURRENCY,
        flags: Sequence[str] = (),
        **options: Any,
    ):
        flags = [*flags, *flags_of({"model": model, **options})]
        if "allowed_local_media_path" not in settle(flags, os.environ).origins:
            flags.append(ROOT_FLAG)
        self._server = ServerHandle(flags=flags, max_concurrency=max_concurrency)
        self.close = weakref.finalize(self, self._server.close)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def submit(self, prompt: Prompt, **fields: Any) -> concurrent.futures.Future[ChatAnswer]:
        """Ask about one prompt, without waiting: `result()` waits and raises ServerError, `asyncio.wrap_future` lets a
        coroutine wait, and `cancel()` aborts. Its `id` is 0. Raises ServerError: in a fork."""
        return self._server.run(ask(self._server, ChatAnswer, CHAT, 0, lambda: chat_body(prompt, fields)))

    def stream(self, prompts: Iterable[Prompt], **fields: Any) -> Iterator[ChatAnswer]:
        """Ask about prompts; yields the answers as they come. At most `max_concurrency` are read ahead, in the caller's
        thread. Leaving the loop aborts the others. Raises ServerError."""
        return self._stream(ChatAnswer, CHAT, prompts, lambda prompt: chat_body(prompt, fields))

    def chat(self, messages: Sequence[Prompt], *, use_tqdm: bool = True, **fields: Any) -> list[ChatAnswer]:
        """Ask about prompts, or about one text or conversation; returns the answers in the order of the prompts, and
        meanwhile shows a progress bar. Raises ServerError."""
        prompts = prompts_of(messages)
        return self._all(self.stream(prompts, **fields), len(prompts), use_tqdm)

    def embed(self, inputs: Sequence[Prompt], *, use_tqdm: bool = True, **fields: Any) -> list[PooledAnswer]:
        """The embeddings of inputs, which have the form of prompts, in their order, or of one text or conversation;
        with the option `runner="pooling"`. Fields are those of an embeddings request, such as `instruction` and
        `dimensions`. Raises ServerError."""

        def body(item: Prompt) -> dict[str, Any]:
            return {"messages": messages_of(item), **fields, "encoding_format": "base64"}

        prompts = prompts_of(inputs)
        return self._all(self._stream(PooledAnswer, "/v1/embeddings", prompts, body), len(prompts), use_tqdm)

    def rank(self, query: Prompt, documents: Sequence[Prompt], **fields: Any) -> list[PooledAnswer]:
        """Documents by how well they answer a query, the best first and those with an error last; with the option
        `convert="classify"`, or `"embed"` for cosines. Query and documents are texts, or lists of texts, `Image` and
        `Video`. Fields are those of a score request, such as `instruction`. Raises ServerError, and what `Media.part`
        raises for the query."""
        head = json.dumps({"queries": {"content": _content(query)}, **fields})
        encoded, ranked = dict[int, str](), list[PooledAnswer]()
        for index, document in enumerate(documents):
            try:
                encoded[index] = json.dumps({"content": _content(document)})
            except Exception as error:  # noqa: BLE001 - a document may hold any object
                ranked.append(PooledAnswer(index, error=f"{type(error).__name__}: {error}"))
        for scored in self._server.as_finished([score(self._server, head, encoded)] if encoded else []):
            ranked += scored
        return sorted(ranked, key=lambda document: (document.error is not None, -document.score))

    def _stream(
        self, kind: type[AnswerT], path: str, prompts: Iterable[Prompt], body: Callable[[Prompt], dict[str, Any]]
    ) -> Iterator[AnswerT]:
        works = (ask(self._server, kind, path, index, partial(body, prompt)) for index, prompt in enumerate(prompts))
        return self._server.as_finished(works)

    def _all(self, answers: Iterator[AnswerT], total: int, use_tqdm: bool) -> list[AnswerT]:
        disable = not use_tqdm or sys.stderr is None
        arrived = tqdm(answers, total=total, disable=disable, unit=" prompts")
        return sorted(arrived, key=lambda answer: answer.id)


def flags_of(options: Mapping[str, Any]) -> Iterator[str]:
    """The flags of `serve.py` for options; None is the default."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"


def prompts_of(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Those in a list, or the only one: a text, or a conversation."""
    return [prompts] if isinstance(prompts, str) or is_conversation(prompts) else prompts


def is_conversation(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict) and "role" in prompt[0]


def ask(
    server: ServerHandle, kind: type[AnswerT], path: str, index: int, make_body: Callable[[], dict[str, Any]]
) -> Coroutine[Any, Any, AnswerT]:
    """The answer to a request, which is made before this returns: the program may change its prompt then, or its own
    working directory. Awaited, it raises ServerError."""
    try:
        body = json.dumps(make_body()).encode()
    except Exception as error:  # noqa: BLE001 - a prompt may hold any object
        return asyncio.sleep(0, kind(index, error=f"{type(error).__name__}: {error}"))
    return send(server, kind, path, index, body)


async def send(server: ServerHandle, kind: type[AnswerT], path: str, index: int, body: bytes) -> AnswerT:
    """The answer to a request. Raises ServerError."""
    reply = await server.post(path, body)
    return kind.of(index, reply.body) if reply.error is None else kind(index, error=reply.error, response=reply.body)


async def score(server: ServerHandle, head: str, documents: Mapping[int, str]) -> list[PooledAnswer]:
    """The scores of documents, by their positions: the answer to one request, the object `head` with them. If that is
    refused, each half is sent again: so the error of a document is no other's, and there may be more than fit into a
    request. Raises ServerError."""
    body = f'{head[:-1]}, "documents": [{", ".join(documents.values())}]}}'
    reply = await server.post("/v1/score", body.encode())
    if reply.error is None:
        values, usage = (item["score"] for item in reply.body["data"]), reply.body["usage"]
        return [PooledAnswer(index, (), value, None, usage) for index, value in zip(documents, values, strict=True)]
    if len(documents) == 1 or reply.status not in REFUSED or reply.body["error"]["param"] == "query":
        error = reply.error.removeprefix("documents[0]: ") if len(documents) == 1 else reply.error
        return [PooledAnswer(index, error=error, response=reply.body) for index in documents]
    items, middle = [*documents.items()], len(documents) // 2
    return [*await score(server, head, dict(items[:middle])), *await score(server, head, dict(items[middle:]))]


def chat_body(prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A request for an answer. Raises ValueError: for a stream; and as `messages_of`."""
    if fields.get("stream"):
        raise ValueError("'stream': an answer comes as a whole; omit it")
    return {"messages": messages_of(prompt), "return_timings": True, **fields}


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt. Raises TypeError, AttributeError: it has another form; what `Media.part` raises."""
    messages = prompt if is_conversation(prompt) else [{"role": "user", "content": prompt}]
    return [{**message, "content": _content(message.get("content"))} for message in messages]


def _content(content: Any) -> Any:
    if isinstance(content, Media):
        content = [content]
    if not isinstance(content, list | tuple):
        return content
    parts = ({"type": "text", "text": part} if isinstance(part, str) else part for part in content)
    return [part.part() if isinstance(part, Media) else part for part in parts]
