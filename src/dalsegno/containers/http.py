"""HTTP requests to registries: proxies from the environment, redirects without credentials, readable errors."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import urlsplit

from dalsegno.containers.manifest import DamagedImage, Descriptor
from dalsegno.containers.squash import Advance
from dalsegno.containers.tar import CHUNK
from dalsegno.errors import DalsegnoError
from dalsegno.printable import one_line
from dalsegno.system.files import explain, in_turn
from dalsegno.system.ownership import is_ours

_TIMEOUT_S = 30.0
_AUTHORIZATION = "Authorization"
PLAIN_HINT = (
    "if the registry has no TLS, set ENROOT_ALLOW_HTTP=yes in the environment (for srun too), or use "
    "`dalsegno image import --plain-http`"
)


class Unreachable(DalsegnoError):
    """Raised if the server did not answer, or if its answer was cut off. A retry may succeed."""

    def __init__(
        self, what: str, *, hint: str = "", answered: bool = False, plain: bool = False, stored: bool = False
    ) -> None:
        """Create the error.

        `answered` says whether a server responded, `plain` whether the server may use HTTP without TLS, and `stored`
        whether the store has the image.
        """
        super().__init__(what, hint=hint)
        self.answered = answered
        self.plain = plain
        self.stored = stored


class HttpError(DalsegnoError):
    """Raised if the server answered with an error."""

    def __init__(self, status: int, headers: Message, url: str, body: bytes = b"") -> None:
        """Create the error. `url` is the URL that failed. After a redirect, it may belong to another server than the
        requested URL."""
        super().__init__(f"{address_of(url)} answered {status} {_reason(status)}", hint="try again later")
        self.status = status
        self.url = url
        self.headers = headers
        self.body = body


class RegistryAnswer:
    """A response whose body is read in pieces."""

    def __init__(self, response: http.client.HTTPResponse, url: str, proxy: str) -> None:
        self._response = response
        self._url, self._proxy = url, proxy
        self.status = response.status
        self.headers: Message = response.headers

    def read(self, most: int) -> bytes:
        try:
            return self._response.read(most)
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self._url, error, self._proxy) from error

    def close(self) -> None:
        self._response.close()

    def __enter__(self) -> RegistryAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Http:
    """An HTTP client that several threads may share."""

    def __init__(self, proxies: Mapping[str, str] | None = None, *, plain_http: bool = False) -> None:
        """Create a client.

        `proxies` maps schemes to proxies; None means those in the environment (`http_proxy`, `https_proxy`,
        `no_proxy`). `plain_http` allows redirects from https to http.
        """
        given = None if proxies is None else dict(proxies)
        self._proxies = urllib.request.getproxies() if given is None else given
        self._opener = urllib.request.OpenerDirector()  # the opener from build_opener would also open file and FTP URLs
        for handler in (
            urllib.request.ProxyHandler(given), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPErrorProcessor(), _Redirects(plain_http),
            urllib.request.UnknownHandler(),
        ):  # fmt: skip
            self._opener.add_handler(handler)

    def get(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> RegistryAnswer:
        request = urllib.request.Request(url, data, headers={"User-Agent": "dalsegno", **(headers or {})})
        try:
            return RegistryAnswer(self._opener.open(request, timeout=timeout_s), url, self._proxy(url))
        except urllib.error.HTTPError as error:
            with error:
                raise HttpError(error.code, error.headers, error.geturl() or url, error.read(4096)) from None
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(url, error, self._proxy(url)) from error

    def _proxy(self, url: str) -> str:
        """Return the proxy for this URL as VARIABLE=ADDRESS; "" if there is none."""
        scheme, host = urlsplit(url)[:2]
        named = self._proxies.get(scheme, "")
        if not named or urllib.request.proxy_bypass(host):
            return ""
        address = urlsplit(named if "//" in named else f"//{named}").netloc
        return f"{scheme}_proxy={address.rpartition('@')[2]}"  # the address without user and password


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, plain_http: bool) -> None:
        self._plain_http = plain_http

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Follow redirects. Registries often redirect to storage on another host, which must not get the token."""
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https"):
            raise urllib.error.URLError("it redirects to a URL that is neither http nor https")
        if old.scheme == "https" and new.scheme != "https" and not self._plain_http:
            raise urllib.error.URLError(_Unencrypted())
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None:
            made.remove_header("Proxy-authorization")  # the opener adds it again if the new URL needs a proxy
            if (old.scheme, old.netloc) != (new.scheme, new.netloc):
                made.remove_header(_AUTHORIZATION)
        return made


class _Unencrypted(OSError):
    """Raised if a server redirects from https to http."""


def address_of(url: str) -> str:
    """Return `host[:port]` of a URL for display, without a password and without control characters."""
    return shown(urlsplit(url).netloc.rpartition("@")[2])


def shown(text: str) -> str:
    """Return a server's text as one line that is safe to print."""
    return one_line(text if len(text) <= 200 else f"{text[:200]}…")


def _unreachable(url: str, error: Exception, proxy: str) -> Unreachable:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    host = address_of(url)
    if isinstance(reason, ssl.SSLCertVerificationError):
        why = f"the certificate of {host} is not trusted: {reason.verify_message}"
        return Unreachable(why, hint="set SSL_CERT_FILE to a file with the certificates to trust", answered=True)
    if isinstance(reason, ssl.SSLError):
        return Unreachable(f"{host} does not speak TLS: {reason.reason}", hint=PLAIN_HINT, answered=True, plain=True)
    if isinstance(reason, _Unencrypted):
        return Unreachable(f"{host} redirects to an unencrypted URL", hint=PLAIN_HINT, answered=True)
    what = (
        reason if isinstance(reason, str) else getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    )
    if proxy:
        return Unreachable(
            f"no answer from {host} through the proxy ({proxy}): {what}",
            hint="check that variable; hosts in no_proxy are reached without a proxy",
        )
    cut_off = isinstance(reason, ConnectionError | http.client.HTTPException)
    return Unreachable(f"no answer from {host}: {what}", hint="check the name and the network", plain=cut_off)


def _reason(status: int) -> str:
    return http.client.responses.get(status, "")


# Downloads of blobs


_TRIES = 6  # a download fails after this many consecutive attempts that receive nothing
_PAUSE_S = 0.2  # pause before a retry; doubled for each consecutive attempt that received nothing


class Blobs(Protocol):
    """A source of blobs."""

    def blob(self, digest: str, start: int = 0) -> RegistryAnswer: ...


class TransferStopped(Exception):
    """Raised if another transfer failed, or if the user pressed Ctrl-C."""


def fetch(source: Blobs, wanted: Descriptor, target: Path, advance: Advance, stop: threading.Event) -> bool:
    """Download a blob to `target`, which exists only when complete. Calls for the same blob wait for each other.

    An interrupted download is resumed by the next call. Return whether this call checked the digest; False if the blob
    was already there.
    """
    part = _part(target)
    with in_turn(target.with_name(f".{target.name}.lock")):
        if is_ours(target, {os.geteuid()}):
            advance(wanted.size)
            return False
        try:
            with contextlib.closing(_Download(source, wanted, part, advance, stop)) as download:
                download.run()
            os.replace(part, target)
            return True
        except OSError as error:
            part.unlink(missing_ok=True)  # free the space, because the disk may be full
            raise explain(error, target) from error
        except DamagedImage:
            part.unlink(missing_ok=True)
            raise


def downloaded(target: Path) -> int:
    """Return how many bytes of a blob have been downloaded, completely or in part."""
    for path in (target, _part(target)):
        with contextlib.suppress(OSError):
            return path.stat().st_size
    return 0


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


class _Download:
    """A file that is being downloaded, and the digest of its bytes so far."""

    def __init__(self, source: Blobs, wanted: Descriptor, part: Path, advance: Advance, stop: threading.Event) -> None:
        self._source, self._wanted, self._advance, self._stop = source, wanted, advance, stop
        if not is_ours(part, {os.geteuid()}):
            part.unlink(missing_ok=True)
        self._handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._digest = hashlib.sha256()
        self._have = 0

    def close(self) -> None:
        os.close(self._handle)

    def run(self) -> None:
        self._read_partial()
        resumed, idle = self._have > 0, 0
        while self._have < self._wanted.size:
            before = self._have
            try:
                self._more()
            except Unreachable:
                idle = 0 if self._have > before else idle + 1
                if idle >= _TRIES:
                    raise
                if self._stop.wait(_PAUSE_S * 2**idle):
                    raise TransferStopped from None
        if self._digest.hexdigest() != self._wanted.hex:
            hint = (
                "the partial download was removed; try again"
                if resumed
                else "try again; if it persists, ask the registry's operator"
            )
            raise DamagedImage(f"a layer does not match its digest {self._wanted.digest}", hint=hint)

    def _read_partial(self) -> None:
        """Compute the digest of the bytes that an earlier call downloaded. Start over if there are too many of them."""
        while self._have <= self._wanted.size and (chunk := os.read(self._handle, CHUNK)):
            self._digest.update(chunk)
            self._have += len(chunk)
        self._advance(self._have)
        if self._have > self._wanted.size:
            self._restart()

    def _restart(self) -> None:
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.ftruncate(self._handle, 0)
        self._advance(-self._have)
        self._digest, self._have = hashlib.sha256(), 0

    def _more(self) -> None:
        with self._source.blob(self._wanted.digest, self._have) as answer:
            if self._have and answer.status != 206:  # the registry sent the whole blob, because it cannot resume
                self._restart()
            while chunk := answer.read(CHUNK):
                if self._stop.is_set():
                    raise TransferStopped
                self._keep(chunk)
        if self._have < self._wanted.size:
            raise Unreachable("the registry stopped in the middle of a layer", hint="try again to resume the download")

    def _keep(self, chunk: bytes) -> None:
        if self._have + len(chunk) > self._wanted.size:
            raise DamagedImage(
                f"layer {self._wanted.digest} is longer than the manifest says", hint="push the image again"
            )
        left = memoryview(chunk)
        while left:  # a write to a nearly full disk may be partial
            left = left[os.write(self._handle, left) :]
        self._digest.update(chunk)
        self._have += len(chunk)
        self._advance(len(chunk))
