"""Check a request before any page handles it: Host, Origin, session, form token. Add security headers to every answer.

A page of another site can make a browser send requests to this server. The Host of such a request is a name of that
site (DNS rebinding), or its Origin is not ours. So the Host must be `localhost`, a loopback address, or an address or
name of the cluster's head, and the Origin of a request that changes something must be this server.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import parse_qsl

from dalsegno.observe.http_server import HttpRequest, HttpResponse

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    ("Content-Security-Policy", CSP),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),  # with "no-referrer", browsers would send `Origin: null`, which is refused
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
MAX_FIELDS = 32


def host_name(header: str) -> str:
    """Return the name or address in a Host header, without its port: `[::1]:80` → `::1`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def host_is_ours(request: HttpRequest, names: Collection[str]) -> bool:
    """Return whether the Host header is `localhost`, a loopback address, or an address or name of the head node."""
    name = host_name(request.headers.get("host", ""))
    if name == "localhost" or (name and name in names):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or name in names


def origin_is_ours(request: HttpRequest) -> bool:
    """Return whether a request that changes something comes from a page of this server.

    Every browser sends Origin with a POST. A request without it is refused.
    """
    fetched = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin", "")
    return fetched == "same-origin" and origin == f"http://{request.headers.get('host', '')}"


def form_of(request: HttpRequest) -> dict[str, str]:
    """Return the fields of a posted form; {} if the request has no form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        return {}
    try:
        return dict(parse_qsl(request.body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        return {}


def token_matches(form: Mapping[str, str], csrf: str) -> bool:
    return bool(csrf) and hmac.compare_digest(form.get("csrf", "").encode(), csrf.encode())


def cookie_of(request: HttpRequest, name: str) -> str:
    pairs = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def set_cookie(name: str, value: str, max_age_s: float) -> tuple[str, str]:
    flags = f"Path=/; Max-Age={int(max_age_s)}; HttpOnly; SameSite=Strict"
    return ("Set-Cookie", f"{name}={value}; {flags}")


def protected(response: HttpResponse) -> HttpResponse:
    """Return the answer with the security headers. Unless it has its own Cache-Control, browsers must not store it."""
    own = {name.lower() for name, _ in response.headers}
    added = [(name, value) for name, value in SECURITY_HEADERS if name.lower() not in own]
    if "cache-control" not in own:
        added.append(("Cache-Control", "no-store"))
    return HttpResponse(response.status, response.body, response.content_type, (*response.headers, *added))
