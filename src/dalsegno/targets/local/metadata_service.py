"""`metadata-service TELEMETRY`: an instance metadata service like EC2's, on a virtual host with `local: {cloud: ec2}`.

It listens at EC2's own link-local address, inside the host's network namespace, so that the readers of notices run as
they do on EC2. Its answers come from the node's telemetry, in which `dalsegno inject cloud-notice` records a notice.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dalsegno.health.telemetry import BadTelemetry, Telemetry, read_telemetry
from dalsegno.log import start_logging
from dalsegno.system.network import run_ip
from dalsegno.system.processes import LocalRunner
from dalsegno.wire.cloud_notice import format_time
from dalsegno.wire.instance_metadata import (
    ADDRESS,
    FOLDER,
    SCHEDULED,
    SPOT,
    TIMEOUT_S,
    TOKEN_HEADER,
    TOKEN_PATH,
    TTL_HEADER,
)

log = logging.getLogger("metadata-service")


def main(arguments: Sequence[str]) -> int:
    start_logging("metadata-service")
    run_ip(LocalRunner(), [f"address replace {ADDRESS[0]}/32 dev lo"])
    serve(Path(arguments[0])).serve_forever()
    return 0


def serve(telemetry: Path, address: tuple[str, int] = ADDRESS) -> ThreadingHTTPServer:
    """Return a server that answers from a telemetry file."""
    handler = type("NodeMetadataHandler", (MetadataHandler,), {"telemetry": telemetry, "token": secrets.token_hex(16)})
    server = ThreadingHTTPServer(address, handler)
    server.daemon_threads = True
    return server


def items(telemetry: Telemetry) -> dict[str, str]:
    """Return the items of the service by their paths below meta-data/."""
    found = {SCHEDULED: "[]"}
    if telemetry.notice_at:
        found[SPOT] = json.dumps({"action": "terminate", "time": format_time(telemetry.notice_at)})
    return found


class MetadataHandler(BaseHTTPRequestHandler):
    """Answers as version 2 of EC2's service does: only to those who have requested a token first."""

    telemetry: Path
    token: str
    timeout = TIMEOUT_S

    def do_PUT(self) -> None:
        known = self.path == TOKEN_PATH and self.headers.get(TTL_HEADER, "").isdecimal()
        self._answer(200, self.token) if known else self._answer(400)

    def do_GET(self) -> None:
        if self.headers.get(TOKEN_HEADER) != self.token:
            self._answer(401)
            return
        try:
            found = items(read_telemetry(self.telemetry))
        except BadTelemetry:
            self._answer(503)
            return
        text = found.get(self.path.removeprefix(FOLDER)) if self.path.startswith(FOLDER) else None
        self._answer(404) if text is None else self._answer(200, text)

    def _answer(self, status: int, text: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
