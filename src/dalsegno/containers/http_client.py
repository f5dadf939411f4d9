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
from dalsegno.printable import one_line

_TIMEOUT_S = 30.0
_AUTHORIZATION = "Authorization"
PLAIN_HINT = (
    "if the registry has no TLS, set ENROOT_ALLOW_HTTP=yes in the environment (for srun too), or use "
    "`dalsegno image import --plain-http`"
)


class Unreachable(DalsegnoError):
    """Nobody answered, or the answer broke off: it may be tried again."""

    def __init__(self, what: str, *, hint: str = "", answered: bool = False, plain: bool = False) -> None:
        """`answered`: somebody is there; `plain`: and may speak HTTP without TLS."""
        super().__init__(what, hint=hint)
        self.answered = answered
        self.plain = plain


class Refused(DalsegnoError):
    """The server answered with an error."""

    def __init__(self, status: int, headers: Message, url: str, body: bytes = b"") -> None:
        """`url`: of the server that answered, which is another one after a redirect."""
        super().__init__(f"{address_of(url)} answered {status} {_reason(status)}", hint="try again later")
        self.status = status
        self.url = url
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

    def __init__(self, proxies: Mapping[str, str] | None = None, *, plain_http: bool = False) -> None:
        """`proxies`: None as the environment (`http_proxy`, `https_proxy`, `no_proxy`) says. `plain_http`: a server
        with TLS may redirect to one without."""
        given = None if proxies is None else dict(proxies)
        self._proxies = urllib.request.getproxies() if given is None else given
        self._opener = urllib.request.OpenerDirector()  # build_opener's would also read files and speak FTP
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
    ) -> Answer:
        request = urllib.request.Request(url, data, headers={"User-Agent": "dalsegno", **(headers or {})})
        try:
            return Answer(self._opener.open(request, timeout=timeout_s), url, self._proxy(url))
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.headers, error.geturl() or url, error.read(4096)) from None
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
    def __init__(self, plain_http: bool) -> None:
        self._plain_http = plain_http

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Follow to other hosts, where blobs are often kept, without the token that was meant for the first host."""
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https"):
            raise urllib.error.URLError("it redirects to a URL that is neither http nor https")
        if old.scheme == "https" and new.scheme != "https" and not self._plain_http:
            raise urllib.error.URLError(_Unencrypted())
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None:
            made.remove_header("Proxy-authorization")  # the new URL may need no proxy; if it does, it is added again
            if (old.scheme, old.netloc) != (new.scheme, new.netloc):
                made.remove_header(_AUTHORIZATION)
        return made


class _Unencrypted(OSError):
    """A server with TLS redirects to one without."""


def address_of(url: str) -> str:
    """`host[:port]` of a URL, fit to be shown: without a password that stands in it, and without control characters."""
    return shown(urlsplit(url).netloc.rpartition("@")[2])


def shown(text: str) -> str:
    """What a server said, as one line that a terminal can print."""
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
            hint="look at that variable; hosts in no_proxy are asked without a proxy",
        )
    broken_off = isinstance(reason, ConnectionError | http.client.HTTPException)
    return Unreachable(f"no answer from {host}: {what}", hint="check the name and the network", plain=broken_off)


def _reason(status: int) -> str:
    return http.client.responses.get(status, "")
