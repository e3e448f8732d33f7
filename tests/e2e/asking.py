"""Requests that run while a test does something else."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket

from tests.e2e.asked import Asked
from tests.e2e.running_server import RunningServer, message

ENDLESS = {"max_tokens": 60_000, "ignore_eos": True, "stream": True}  # for minutes
TEXT = Asked("tell me", "", [])


class Asking:
    """A running request at one API server, or at any."""

    def __init__(self, server: RunningServer, api: str | None, one: Asked, **more: object):
        self._connection = server.connect(api)
        self._response: http.client.HTTPResponse | None = None
        body = {"model": server.model, "messages": [message(one.text, one.urls)], "temperature": 0, **one.more, **more}
        headers = {"Content-Type": "application/json"}
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        except BaseException:
            self._connection.close()
            raise
        self._socket = self._connection.sock

    def reply(self) -> dict:
        """The whole response, which has to be a 200."""
        response = self._connection.getresponse()
        body = json.loads(response.read())
        self._connection.close()
        assert response.status == 200, body
        return body

    def answer(self) -> str:
        """The answer's text."""
        return self.reply()["choices"][0]["message"]["content"]

    def response(self) -> http.client.HTTPResponse:
        """Of which the events that were waited for are read."""
        self._response = self._response or self._connection.getresponse()
        return self._response

    def read_events(self, count: int) -> None:
        """Wait for that many events of a stream that is not at its end."""
        while count:
            line = self.response().readline()
            assert line and b"[DONE]" not in line, "the stream has ended"
            count -= line.startswith(b"data: ")

    def has_nothing_yet(self) -> bool:
        """Whether no byte was received."""
        return not select.select([self._connection.sock], [], [], 0)[0]

    def disconnect(self) -> None:
        """End the connection for a thread that reads from it, before it is closed."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the connection. Without effect when closed."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def is_reset(self) -> bool:
        """Whether the connection ends without the end of the answer."""
        try:
            if self._response is None:
                self._connection.getresponse()
                return False
            return b"[DONE]" not in self._response.read()
        except (ConnectionError, http.client.HTTPException):
            return True
        finally:
            self.hang_up()
