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
from typing import Any, ClassVar
from urllib.parse import quote

from mini_engine.batch.server_handle import MAX_CONCURRENCY, Reply, ServerHandle, check_flags

ROOT_FLAG = "--allowed-local-media-path=/"
CHAT = "/v1/chat/completions"

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

    def part(self) -> dict[str, Any]:
        """The part of a message. Raises OSError, AttributeError: an image cannot be encoded, or is none."""
        name = f"{self.kind}_url"
        return {"type": name, name: None if self.source is None else self._url(), **self.settings}

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


# Of a file, by its suffix.
KINDS: dict[str, type[Media]] = dict.fromkeys(
    ".avif .bmp .heic .heif .jfif .jp2 .jpeg .jpg .png .tif .tiff .webp".split(), Image
) | dict.fromkeys(".avi .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ts .webm .wmv".split(), Video)


@dataclass(frozen=True)
class LLMAnswer:
    """What became of one prompt, input or document."""

    id: int  # its position, from 0 on
    error: str | None = None  # why there is no answer
    text: str = ""  # of the first choice
    finish_reason: str | None = None
    vector: Sequence[float] = ()  # the embedding of an input: float32, of length 1; also for `numpy.asarray`
    score: float = 0.0  # of a document: how well it answers the query, at most 1
    usage: Mapping[str, Any] = field(default_factory=dict)  # tokens
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds of each stage in the server
    response: Mapping[str, Any] = field(default_factory=dict)  # all of it: tool calls, thoughts, other choices

    @classmethod
    def of(cls, index: int, reply: Reply) -> "LLMAnswer":
        """That in the response to a request with one prompt, input (in base64) or document."""
        body = reply.body
        if reply.error is not None:
            return cls(index, reply.error.removeprefix("documents[0]: "), response=body)
        if "choices" in body:
            choice, text = body["choices"][0], body["choices"][0]["message"]["content"] or ""
            content: dict[str, Any] = {"text": text, "finish_reason": choice["finish_reason"]}
        elif "score" in (item := body["data"][0]):
            content = {"score": item["score"]}
        else:
            content = {"vector": array.array("f", base64.b64decode(item["embedding"]))}
        return cls(index, None, **content, usage=body["usage"], timings=body.get("metrics", {}), response=body)


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
        if "allowed_local_media_path" not in check_flags(flags):
            flags.append(ROOT_FLAG)
        self._server = ServerHandle(flags=flags, max_concurrency=max_concurrency)
        self.close = weakref.finalize(self, self._server.close)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, prompt: Prompt, **fields: Any) -> concurrent.futures.Future[LLMAnswer]:
        """Ask about one prompt, without waiting: `result()` waits and raises ServerError, `asyncio.wrap_future` lets a
        coroutine wait, and `cancel()` aborts. Its `id` is 0. Raises ServerError: in a fork."""
        future = self._server.run(ask(self._server, CHAT, 0, lambda: chat_body(prompt, fields)))
        # The server ends with the last reference to this object.
        future.add_done_callback(lambda _, _kept=self: None)  # type: ignore[misc]
        return future

    def stream(self, prompts: Iterable[Prompt], **fields: Any) -> Iterator[LLMAnswer]:
        """Ask about prompts; yields the answers as they come. At most `max_concurrency` are read ahead, in the caller's
        thread. Leaving the loop aborts the others. Raises ServerError."""
        return self._stream(CHAT, prompts, lambda prompt: chat_body(prompt, fields))

    def chat(self, messages: Sequence[Prompt], *, use_tqdm: bool = True, **fields: Any) -> list[LLMAnswer]:
        """Ask about prompts, or about one text or conversation; returns the answers in the order of the prompts, and
        meanwhile shows a progress bar. Raises ServerError."""
        prompts = prompts_of(messages)
        return in_order(self.stream(prompts, **fields), len(prompts), use_tqdm)

    def embed(self, inputs: Sequence[Prompt], *, use_tqdm: bool = True, **fields: Any) -> list[LLMAnswer]:
        """The embeddings of inputs, which have the form of prompts, in their order, or of one text or conversation;
        with the option `runner="pooling"`. Fields are those of an embeddings request, such as `instruction` and
        `dimensions`. Raises ServerError."""

        def body(item: Prompt) -> dict[str, Any]:
            return {"messages": messages_of(item), **fields, "encoding_format": "base64"}

        prompts = prompts_of(inputs)
        return in_order(self._stream("/v1/embeddings", prompts, body), len(prompts), use_tqdm)

    def rank(
        self, query: Prompt, documents: Sequence[Prompt], *, use_tqdm: bool = True, **fields: Any
    ) -> list[LLMAnswer]:
        """Documents by how well they answer a query, the best first and those with an error last; with the option
        `convert="classify"`, or `"embed"` for cosines. Query and documents are texts, or lists of texts, `Image` and
        `Video`. Fields are those of a score request, such as `instruction`. Raises ServerError, and
        what `messages_of` raises for the query."""
        queries = {"content": _content(query)}

        def body(document: Prompt) -> dict[str, Any]:
            return {"queries": queries, "documents": {"content": _content(document)}, **fields}

        answers = in_order(self._stream("/v1/score", documents, body), len(documents), use_tqdm)
        return sorted(answers, key=lambda answer: (answer.error is not None, -answer.score))

    def _stream(
        self, path: str, prompts: Iterable[Prompt], body: Callable[[Prompt], dict[str, Any]]
    ) -> Iterator[LLMAnswer]:
        works = (ask(self._server, path, index, partial(body, prompt)) for index, prompt in enumerate(prompts))
        return self._server.as_finished(works)


def in_order(answers: Iterator[LLMAnswer], total: int, use_tqdm: bool) -> list[LLMAnswer]:
    """The answers as their prompts were, with a progress bar until all have come."""
    from tqdm.auto import tqdm  # of a notebook, if this is one; the server starts before it is imported

    bar = tqdm(answers, total=total, disable=not use_tqdm or sys.stderr is None, unit=" prompts")
    return sorted(bar, key=lambda answer: answer.id)


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
    server: ServerHandle, path: str, index: int, make_body: Callable[[], dict[str, Any]]
) -> Coroutine[Any, Any, LLMAnswer]:
    """The answer to a request, which is made before this returns: the program may change its prompt then, or its own
    working directory. Awaited, it raises ServerError."""
    try:
        body = json.dumps(make_body()).encode()
    except Exception as error:  # noqa: BLE001 - a prompt may hold any object
        return asyncio.sleep(0, LLMAnswer(index, f"{type(error).__name__}: {error}"))

    async def send() -> LLMAnswer:
        return LLMAnswer.of(index, await server.post(path, body))

    return send()


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
