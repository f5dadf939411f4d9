"""Requests to registries: proxies as the environment says, redirects without credentials, errors as words."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from http.client import HTTPMessage
from typing import IO
from urllib.parse import urlsplit

from dalsegno.errors import DalsegnoError

_TIMEOUT_S = 30.0
_AUTHORIZATION = "Authorization"
_PLAIN_HINT = (
    "a registry without it wants ENROOT_ALLOW_HTTP=yes in the environment, of srun too, or `image import --plain-http`"
)


class Unreachable(DalsegnoError):
    """Nobody answered, or the answer broke off: it may be tried again."""


class Refused(DalsegnoError):
    """The server answered with an error."""

    def __init__(self, status: int, headers: Message, url: str, body: bytes = b"") -> None:
        super().__init__(f"{urlsplit(url).netloc} answered {status} {_reason(status)}", hint="try again later")
        self.status = status
        self.headers = headers
        self.body = body


class Answer:
    """A body that is being read."""

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

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Http:
    """One opener; it may be used by several threads."""

    def __init__(self, proxies: Mapping[str, str] | None = None) -> None:
        """`proxies`: None as the environment (`http_proxy`, `https_proxy`, `no_proxy`) says."""
        given = None if proxies is None else dict(proxies)
        self._proxies = urllib.request.getproxies() if given is None else given
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(given), _Redirects())

    def get(self, url: str, headers: Mapping[str, str] | None = None, data: bytes | None = None) -> Answer:
        request = urllib.request.Request(url, data, headers={"User-Agent": "dalsegno", **(headers or {})})
        try:
            return Answer(self._opener.open(request, timeout=_TIMEOUT_S), url, self._proxy(url))
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.headers, url, error.read(4096)) from None
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(url, error, self._proxy(url)) from error

    def _proxy(self, url: str) -> str:
        """The variable that names the proxy which is asked for this, and its address; "" if there is none."""
        scheme, host = urlsplit(url)[:2]
        named = self._proxies.get(scheme, "")
        if not named or urllib.request.proxy_bypass(host):
            return ""
        address = urlsplit(named if "//" in named else f"//{named}").netloc
        return f"{scheme}_proxy={address.rpartition('@')[2]}"  # without the password that may stand in it


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Blobs are often kept elsewhere: who keeps them shall not learn our token, nor be asked without encryption."""
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if old.scheme == "https" and new.scheme != "https":
            raise urllib.error.URLError("it sends us on without encryption")
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            made.remove_header(_AUTHORIZATION)
        return made


def _unreachable(url: str, error: Exception, proxy: str) -> Unreachable:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    host = urlsplit(url).netloc
    if isinstance(reason, ssl.SSLCertVerificationError):
        why = f"the certificate of {host} is not trusted: {reason.verify_message}"
        return Unreachable(why, hint="SSL_CERT_FILE names a file of certificates to trust")
    if isinstance(reason, ssl.SSLError):
        return Unreachable(f"{host} does not speak TLS: {reason.reason}", hint=_PLAIN_HINT)
    what = (
        reason if isinstance(reason, str) else getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    )
    if proxy:
        return Unreachable(
            f"no answer from {host} through the proxy ({proxy}): {what}",
            hint="look at that variable; hosts in no_proxy are asked without a proxy",
        )
    return Unreachable(f"no answer from {host}: {what}", hint="look at the name and the network")


def _reason(status: int) -> str:
    return http.client.responses.get(status, "")
