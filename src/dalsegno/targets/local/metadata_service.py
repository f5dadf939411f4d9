"""The program `metadata-service TELEMETRY`: an instance metadata service like EC2's, for virtual hosts.

It runs if the cluster file has `local: {cloud: ec2}`. It listens at EC2's own link-local address, inside the host's
network namespace. So programs that read notices work as they do on EC2. The answers come from the node's telemetry, in
which `dalsegno inject cloud-notice` records a notice.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.health.telemetry import BadTelemetry, Telemetry, read_telemetry
from dalsegno.log import start_logging
from dalsegno.observe.http_server import HttpRequest, HttpResponse, HttpServer
from dalsegno.system.network import run_ip
from dalsegno.system.processes import LocalRunner
from dalsegno.wire.cloud_notice import format_time
from dalsegno.wire.instance_metadata import ADDRESS, FOLDER, SCHEDULED, SPOT, TOKEN_HEADER, TOKEN_PATH, TTL_HEADER


def main(arguments: Sequence[str]) -> int:
    start_logging("metadata-service")
    run_ip(LocalRunner(), [f"address replace {ADDRESS[0]}/32 dev lo"])
    HttpServer(socket.create_server(ADDRESS), InstanceMetadataService(Path(arguments[0])).answer).serve()
    return 0


def items(telemetry: Telemetry) -> dict[str, str]:
    """Return the answers of the service, by their paths below meta-data/."""
    found = {SCHEDULED: "[]"}
    if telemetry.notice_at:
        found[SPOT] = json.dumps({"action": "terminate", "time": format_time(telemetry.notice_at)})
    return found


@dataclass
class InstanceMetadataService:
    """Answers requests as version 2 of EC2's service does: a caller must request a token first."""

    telemetry: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def answer(self, request: HttpRequest) -> HttpResponse:
        if request.method == "PUT":
            known = request.path == TOKEN_PATH and request.headers.get(TTL_HEADER.lower(), "").isdecimal()
            return HttpResponse(200, self.token.encode()) if known else HttpResponse(400)
        if request.method != "GET":
            return HttpResponse(405)
        if request.headers.get(TOKEN_HEADER.lower()) != self.token:
            return HttpResponse(401)
        try:
            found = items(read_telemetry(self.telemetry))
        except BadTelemetry:
            return HttpResponse(503)
        text = found.get(request.path.removeprefix(FOLDER)) if request.path.startswith(FOLDER) else None
        return HttpResponse(404) if text is None else HttpResponse(200, text.encode())
