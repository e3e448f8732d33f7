"""A chat server that does what a prompt's text tells it to: answer, refuse, stall, break off.

A real HTTP/1.1 server on asyncio, in a thread of its own. Behaviours: `ok` (three chunks and usage), `bare` (no usage),
`long` (a hundred chunks; see `leavers`), `refuse` (500), `stall` (one chunk, then nothing), `silent` (no answer),
`error` (an error in the stream), `cut` (no [DONE]), `garbage` (no JSON), `empty` ([DONE] alone), `hang up` (closes the
connection).
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = json.dumps({"data": [{"id": "some-model"}]}).encode()
USAGE = {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}


class MisbehavingServer:
    """`with MisbehavingServer() as server:` listens at `server.url`. `bodies` are the requests that came."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener  # bound, and its own from then on; None: to a free port
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[bytes] = []
        self.sent: list[int] = []  # chunks of each `long` stream, when its client had left or it was through
        self.at_once = 0
        self.most_at_once = 0
        self.wanted_at_once = 0  # no answer begins before there were so many requests at once
        self.leavers = 0  # a `long` stream sends ten chunks, and the rest once so many clients have left

    def __enter__(self) -> MisbehavingServer:
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),))
        self._thread.start()
        assert ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        where: dict[str, Any] = {"host": "127.0.0.1", "port": 0} if self._listener is None else {"sock": self._listener}
        server = await asyncio.start_server(self._connection, **where)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.split(b"\r\n")
                length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
                body = await reader.readexactly(length)
                if lines[0].startswith(b"GET /v1/models"):
                    self._whole(writer, b"200 OK", MODELS)
                elif lines[0].startswith(b"GET"):
                    self._whole(writer, b"404 Not Found", b"{}")
                else:
                    self.headers.append(head)
                    await self._answer(writer, json.loads(body))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            while self.most_at_once < self.wanted_at_once:  # noqa: ASYNC110 - other connections change it
                await asyncio.sleep(0.001)
            behaviour = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            await self._behave(writer, behaviour.partition(":")[0], "messages" in body)
        finally:
            self.at_once -= 1

    async def _behave(self, writer: asyncio.StreamWriter, behaviour: str, chat: bool) -> None:
        if behaviour == "hang up":
            raise OSError
        if behaviour == "refuse":
            return self._whole(writer, b"500 Internal Server Error", b"out of order")
        if behaviour == "silent":
            await asyncio.sleep(3600)
        writer.write(HEAD)
        sent = 0
        try:
            for data in events(behaviour, chat):
                while behaviour == "long" and sent == 10 and len(self.sent) < self.leavers:
                    await self._chunk(writer, b": a comment, by which it is seen who has left\n\n")
                await self._chunk(writer, b"data: %s\n\n" % data)
                sent += 1
            if behaviour == "stall":
                await asyncio.sleep(3600)
        finally:
            if behaviour == "long":
                self.sent.append(sent)
        writer.write(b"0\r\n\r\n")

    @staticmethod
    async def _chunk(writer: asyncio.StreamWriter, raw: bytes) -> None:
        await asyncio.sleep(0.01)
        writer.write(b"%x\r\n%s\r\n" % (len(raw), raw))
        await writer.drain()


def events(behaviour: str, chat: bool) -> list[bytes]:
    """What a stream says, up to and with its [DONE]."""

    def texts(*parts: str) -> list[bytes]:
        choices = [{"index": 0, **({"delta": {"content": part}} if chat else {"text": part})} for part in parts]
        return [json.dumps({"choices": [choice]}).encode() for choice in choices]

    done = b"[DONE]"
    return {
        "ok": [*texts("four ", "chunks", ""), json.dumps({"choices": [], "usage": USAGE}).encode(), done],
        "bare": [*texts("a red circle", " moving left"), done],
        "long": [*texts(*["word "] * 100), done],
        "stall": texts("begun"),
        "error": [
            *texts("begun"),
            json.dumps({"error": {"message": "the engine is gone", "code": 500}}).encode(),
            done,
        ],
        "cut": texts("begun"),
        "garbage": [*texts("begun"), b"{not json", done],
        "empty": [done],
    }[behaviour]
