"""The instance metadata service of EC2, version 2. It answers only the machine itself, at a link-local address.

The address is fixed, no proxy is used, and redirects are not followed. Answers have a maximum size, and no request
waits longer than a second for the next bytes. Only EC2 is supported, because other clouds do not announce notices at
this address.
"""

from __future__ import annotations

import time
from pathlib import Path

from dalsegno.wire.cloud_notice import CloudNotice, parse_spot

ADDRESS = ("169.254.169.254", 80)
TIMEOUT_S = 1.0
MAX_BYTES = 16 << 10
TOKEN_S = 6 * 3600  # lifetime of a token: the longest that EC2 allows
RENEW_S = 5 * 3600.0
TOKEN_PATH = "/latest/api/token"
TTL_HEADER, TOKEN_HEADER = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
FOLDER = "/latest/meta-data/"
SPOT, REBALANCE, SCHEDULED = "spot/instance-action", "events/recommendations/rebalance", "events/maintenance/scheduled"
VENDOR = Path("/sys/class/dmi/id/sys_vendor")
EC2_VENDOR = "Amazon EC2"


class NoMetadata(Exception):
    """The metadata service did not answer, or refused."""


class InstanceMetadata:
    """Reads the metadata of this machine. Requests a token when needed, and a new one before the old one expires."""

    def __init__(self, address: tuple[str, int] = ADDRESS) -> None:
        self.address = address
        self._token, self._renew_at = "", 0.0

    def get(self, path: str) -> str | None:
        """Return the text of an item below meta-data/; None if there is no such item."""
        status, text = self._ask(path)
        if status == 401:  # the token has expired, or the machine was resumed on another host
            self._token = ""
            status, text = self._ask(path)
        if status == 404:
            return None
        if status != 200:
            raise NoMetadata(f"the metadata service answers {status} for {path}")
        return text

    def _ask(self, path: str) -> tuple[int, str]:
        if not self._token or time.monotonic() >= self._renew_at:
            status, token = self._request("PUT", TOKEN_PATH, {TTL_HEADER: str(TOKEN_S)})
            if status != 200 or not token.isascii() or not token.isprintable() or not token:
                raise NoMetadata(f"the metadata service gives no token (status {status})")
            self._token, self._renew_at = token, time.monotonic() + RENEW_S
        return self._request("GET", FOLDER + path, {TOKEN_HEADER: self._token})

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        import http.client  # imported here to save memory, because node agents outside clouds do not need it

        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            data = answer.read(MAX_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise NoMetadata(f"the metadata service does not answer: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if len(data) > MAX_BYTES:
            raise NoMetadata(f"the metadata service answers more than {MAX_BYTES} bytes for {path}")
        return answer.status, data.decode(errors="replace")


def is_ec2(vendor: Path = VENDOR) -> bool:
    """Return whether this machine is an EC2 instance, according to its firmware."""
    try:
        return vendor.read_text(errors="replace").strip() == EC2_VENDOR
    except OSError:
        return False


def read_spot_notice(metadata: InstanceMetadata) -> CloudNotice | None:
    """Return the notice of a spot instance; None if there is none. Raise NoMetadata or BadNotice on failure."""
    text = metadata.get(SPOT)
    return parse_spot(text) if text is not None else None
