"""The HTTP server: where it listens, who may use it, what it logs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mini_engine.config.option import ConfigError, check_files, option
from mini_engine.log import LogFormat

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options on the server."""

    host: str = option("0.0.0.0", "Address to listen on.", "Server")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", "Server", minimum=0, maximum=65535)
    uds: str | None = option(
        None, "Unix socket to listen on instead of --host and --port.", "Server", metavar="PATH", unset="none"
    )
    root_path: str = option("", "Path under which a proxy shows the server, such as /engine.", "Server", unset="none")
    max_connections: int | None = option(
        None, "Connections per API server, idle ones too, above which requests get a 503. It protects the file "
        "descriptors; --max-num-queued-reqs limits the load.", "Server", minimum=1,
        unset="half of the files that a process may open",
    )  # fmt: skip
    timeout_client: float = option(
        30.0, "Seconds in which a client must send the request headers, send 8 KiB and an eighth more of the body, and "
        "read what it is sent; a connection that is slower is closed.", "Server", minimum=0.1, maximum=3600,
    )  # fmt: skip
    timeout_keep_alive: int = option(
        5, "Seconds for which a connection stays open after a response.", "Server", minimum=0, maximum=3600
    )

    api_key: list[str] = option(
        [], "Keys of which clients must send one in the header `Authorization: Bearer KEY`, but for `/health` and "
        "`/live`; may be given several times. A flag shows in the list of processes, the environment variable does "
        "not.", "Security", metavar="KEY", unset="no key is asked for", secret=True,
    )  # fmt: skip
    ssl_keyfile: str | None = option(
        None, "File with the private key for TLS; with --ssl-certfile.", "Security", metavar="FILE", unset="no TLS"
    )
    ssl_certfile: str | None = option(
        None, "File with the certificate for TLS; with --ssl-keyfile.", "Security", metavar="FILE", unset="no TLS"
    )
    ssl_ca_certs: str | None = option(
        None, "File with the certificates that clients' own must go back to; with --ssl-cert-reqs.", "Security",
        metavar="FILE", unset="none",
    )  # fmt: skip
    ssl_cert_reqs: int = option(
        0, "Whether clients must have a certificate: 0 no, 1 they may, 2 they must; with --ssl-ca-certs.", "Security",
        minimum=0, maximum=2,
    )  # fmt: skip
    allowed_origins: list[str] = option(
        [], "Origins whose pages may use the server from a browser (CORS); `*` is all.", "Security",
        metavar="ORIGIN", unset="none",
    )  # fmt: skip
    allowed_methods: list[str] = option(
        ["*"], "Methods allowed to those pages.", "Security", metavar="METHOD", unset="all"
    )
    allowed_headers: list[str] = option(
        ["*"], "Headers allowed to those pages.", "Security", metavar="HEADER", unset="all"
    )
    allow_credentials: bool = option(False, "Let those pages send cookies and the like.", "Security")

    log_level: LogLevel = option("info", "Least severe log lines to print.", "Logging")
    log_format: LogFormat = option("text", "Form of the log's lines; each an object with `json`.", "Logging")
    enable_log_requests: bool = option(
        False, "Log a line for each request when it has ended: id, status, time; never what it says.", "Logging",
        twins={"--disable-log-requests": False},
    )  # fmt: skip
    disable_log_stats: bool = option(
        False, "Log no line with the server's figures every ten seconds in which something ran.", "Logging"
    )

    def validate(self) -> None:
        """Raises ConfigError for the first value that does not fit the others."""
        if not all(self.api_key):
            raise ConfigError("--api-key: a key must not be empty; leave the flag out to ask for none")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path: {self.root_path!r} must begin with a slash and not end with one")
        if self.uds is not None and (self.host, self.port) != (ServerOptions.host, ServerOptions.port):
            raise ConfigError("--uds: a unix socket has neither --host nor --port; keep one of them")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile: TLS needs both of them")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == 0) or (self.ssl_ca_certs and not self.ssl_certfile):
            raise ConfigError("--ssl-ca-certs and --ssl-cert-reqs 1 or 2 need each other, and --ssl-certfile")
        narrowed = (self.allowed_methods, self.allowed_headers, self.allow_credentials) != (["*"], ["*"], False)
        if narrowed and not self.allowed_origins:
            raise ConfigError("--allowed-methods, --allowed-headers and --allow-credentials need --allowed-origins")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials: name the --allowed-origins; with * any page could use them")
        check_files(
            {
                "--ssl-keyfile": self.ssl_keyfile,
                "--ssl-certfile": self.ssl_certfile,
                "--ssl-ca-certs": self.ssl_ca_certs,
            }
        )
