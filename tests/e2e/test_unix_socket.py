"""A server with several API servers behind one unix socket, with TLS on it, and a log of JSON."""

import json
import socket
import ssl
import stat
from pathlib import Path

import httpx
from openai import OpenAI

from tests.support.running_server import SERVE, RunningServer, refused
from tests.support.web import make_certificate


class UnixServer(RunningServer):
    def __init__(self, path: Path, certificate: Path, key: Path, *flags: str):
        super().__init__()
        self.path, self.certificate = path, certificate
        tls = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
        self.command = [*SERVE[:2], "--uds", str(path), *tls, *flags]

    def _connect(self) -> OpenAI:
        assert self.url == f"https+unix://{self.path}:/v1"
        context = ssl.create_default_context(cafile=self.certificate)
        transport = httpx.HTTPTransport(uds=str(self.path), verify=context)
        http = httpx.Client(transport=transport, headers={"connection": "close"})
        return OpenAI(base_url="https://localhost/v1", api_key="none", max_retries=0, timeout=120, http_client=http)


def test_a_unix_socket_for_all_api_servers(tmp_path: Path):
    path, certificate = tmp_path / "engine.sock", make_certificate(tmp_path, "DNS:localhost")
    with socket.socket(socket.AF_UNIX) as killed:  # what a server leaves that is killed
        killed.bind(str(path))
    flags = ["--api-server-count", "2", "--log-format", "json", "--enable-log-requests"]
    with UnixServer(path, *certificate, *flags) as server:
        assert {"api 0", "api 1"} <= server.pids().keys()
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(60)
            plain.connect(str(path))
            plain.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert server.ask("hello", [], max_tokens=3) == server.ask("hello", [], max_tokens=3)
            assert plain.recv(100) == b"", "an answer without TLS"
        assert "another server listens" in refused(UnixServer(path, *certificate, *flags))
        assert server.ask("hello", [], max_tokens=3)
        assert stat.S_ISSOCK(path.stat().st_mode)
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(str(path))
            context = ssl.create_default_context(cafile=certificate[0])
            with context.wrap_socket(plain, server_hostname="localhost"):  # that its client does not read
                assert server.stop() == 0
        assert not path.exists()
        lines = [json.loads(line) for line in server.log.splitlines()]
    processes = {line["process"] for line in lines}
    assert {"supervisor", "worker 0.0"} <= processes
    assert {"api 0", "api 1"} & processes  # one may have taken all of the few connections
    of_requests = "request_id method path status seconds model prompt_tokens completion_tokens".split()
    assert all(set(line) - {*of_requests} == {"time", "level", "process", "logger", "message"} for line in lines)
    (warning,) = [line["message"] for line in lines if line["level"] != "info"]
    assert "plain HTTP on the TLS port" in warning
    requests = [line for line in lines if "POST /v1/chat/completions: 200" in line["message"]]
    assert len(requests) == 3 and all(line["message"].startswith(line["request_id"]) for line in requests)
    assert [line["completion_tokens"] for line in requests] == [3] * 3
    assert (lines[-1]["process"], lines[-1]["message"]) == ("supervisor", "stopped")
