import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_engine.media import http_fetch
from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import MediaPolicy, fetch
from tests.media.web import WebServer, response

BODY = b"over TLS"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that signs itself, for media.test and 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    names = "subjectAltName=DNS:media.test,IP:127.0.0.1"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
        + ["-subj", "/CN=media.test", "-addext", names, "-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
        + ["-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture
def server_names() -> list[str]:
    return []


@pytest.fixture
def server(certificate: tuple[Path, Path], server_names: list[str]) -> Iterator[WebServer]:
    """GET /down redirects to plain HTTP on the same port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    context.sni_callback = lambda _, name, __: server_names.append(name or "")

    def answer(connection: socket.socket, request: str) -> None:
        down = request.startswith("GET /down ")
        to = f"http://media.test:{running.port}/"
        connection.sendall(response(b"", "301 Moved", Location=to) if down else response(BODY))

    with WebServer(answer, tls=context) as running:
        yield running


@pytest.fixture
def trusted(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The certificate is the only one that is trusted, as an operator would set it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    http_fetch.tls_context.cache_clear()
    yield
    http_fetch.tls_context.cache_clear()


@pytest.fixture
def policy() -> MediaPolicy:
    return MediaPolicy(
        None,
        1000,
        allowed_media_domains=["media.test", "other.test", "127.0.0.1"],
        allow_media_redirects=True,
        resolve=lambda host, port: ["127.0.0.1"],
        is_allowed_address=lambda address: True,
    )


@pytest.mark.usefixtures("trusted")
def test_the_name_is_for_tls_and_the_address_for_the_connection(
    server: WebServer, server_names: list[str], policy: MediaPolicy
) -> None:
    assert fetch(f"https://Media.test:{server.port}/a", policy) == BODY
    assert server_names == ["media.test"]
    assert f"Host: media.test:{server.port}\r\n" in server.requests[0]
    assert fetch(f"https://127.0.0.1:{server.port}/a", policy) == BODY


@pytest.mark.usefixtures("trusted")
def test_a_certificate_for_another_name(server: WebServer, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match="certificate must be valid for the URL's host") as caught:
        fetch(f"https://other.test:{server.port}/a", policy)
    assert "media.test" not in str(caught.value) and not server.requests


def test_a_certificate_that_nobody_trusts(server: WebServer, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match="certificate must be valid for the URL's host"):
        fetch(f"https://media.test:{server.port}/a", policy)
    assert not server.requests


@pytest.mark.usefixtures("trusted")
def test_no_redirect_from_https_to_http(server: WebServer, policy: MediaPolicy) -> None:
    with pytest.raises(MediaError, match="from https to http"):
        fetch(f"https://media.test:{server.port}/down", policy)
    assert server.dialled == 1


def test_a_server_without_tls(policy: MediaPolicy) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(response(BODY))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MediaError, match="no TLS connection"):
            fetch(f"https://media.test:{listener.getsockname()[1]}/", policy)
        thread.join()
