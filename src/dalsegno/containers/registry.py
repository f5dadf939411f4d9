"""A registry, by its protocol (version 2): manifests and blobs of one image, with tokens where it asks for them."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.parse
from dataclasses import dataclass
from email.message import Message

from dalsegno.containers.credentials import KNOWN_REALMS, Credential, RegistryServer, Wallet, server_of
from dalsegno.containers.http import PLAIN_HINT, Http, HttpError, HttpResponse, Unreachable, address_of, shown
from dalsegno.containers.manifest import MANIFEST_TYPES, MAX_JSON, DamagedImage
from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.image_name import ImageName

_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_PROBE_S = 5.0
_LOGIN_HINT = (
    "log in with `docker login`, or write `machine {host} login USER password WORD` into ~/.config/enroot/.credentials"
)


@dataclass(frozen=True)
class Challenge:
    """What a registry wants to see."""

    scheme: str  # "bearer" or "basic"
    realm: str = ""
    service: str = ""
    scope: str = ""


def parse_challenge(headers: Message) -> Challenge | None:
    """The best of what a 401 offers."""
    offered = [_parse_one(text) for text in headers.get_all("WWW-Authenticate") or []]
    known = [each for each in offered if each.scheme in ("bearer", "basic")]
    return min(known, key=lambda each: each.scheme != "bearer") if known else None


def _parse_one(text: str) -> Challenge:
    scheme, _, rest = text.partition(" ")
    words = {key.lower(): value for key, value in _CHALLENGE.findall(rest)}
    return Challenge(scheme.lower(), words.get("realm", ""), words.get("service", ""), words.get("scope", ""))


class Registry:
    """One image's place in a registry."""

    def __init__(self, name: ImageName, http: Http, wallet: Wallet, *, plain_http: bool = False) -> None:
        """Without encryption only where it was asked for and TLS is not spoken, or where nobody else can listen."""
        self._name = name
        self._http = http
        self._wallet = wallet
        self._may_be_plain = plain_http
        self._server = self._at("https")
        if self._server.is_loopback:
            self._server = self._at("http")
        self._authorization = ""
        self._lock = threading.Lock()

    def manifest(self, reference: str) -> bytes:
        """The index or manifest of a tag or a digest."""
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        try:
            answer = self._get(f"manifests/{reference}", headers)
        except Unreachable as error:
            self._without_tls(error)
            answer = self._get(f"manifests/{reference}", headers)
        with answer:
            return _read_up_to(answer, MAX_JSON)

    def blob(self, digest: str, start: int = 0) -> HttpResponse:
        """A blob, from some byte on; a registry that cannot do that sends all of it, with status 200."""
        return self._get(f"blobs/{digest}", {"Range": f"bytes={start}-"} if start else {})

    def _at(self, scheme: str) -> RegistryServer:
        server = server_of(f"{scheme}://{self._name.registry}/")
        if server is None:
            raise UsageError(f"`{self._name.registry}` is not a registry", hint="write HOST or HOST:PORT before `#`")
        return server

    def _without_tls(self, error: Unreachable) -> None:
        """Go on without TLS where that was asked for; else say how to ask for it, if the registry speaks plain HTTP."""
        if self._server.scheme != "https" or self._authorization or self._server.host in KNOWN_REALMS:
            raise error
        if self._may_be_plain and (error.plain or not error.answered):
            self._server = self._at("http")
        elif error.answered or not error.plain or not self._speaks_plain_http():
            raise error
        else:
            what = f"{self._name.registry} speaks HTTP without TLS"
            raise Unreachable(what, hint=PLAIN_HINT, answered=True) from error

    def _speaks_plain_http(self) -> bool:
        """Nothing but the question itself is sent."""
        try:
            self._http.get(f"http://{self._name.registry}/v2/", timeout_s=_PROBE_S).close()
        except HttpError as refused:
            return refused.status == 401
        except DalsegnoError:
            return False
        return True

    def _get(self, path: str, headers: dict[str, str]) -> HttpResponse:
        url = f"{self._server.scheme}://{self._name.registry}/v2/{self._name.repository}/{path}"
        used = self._authorization
        try:
            return self._http.get(url, self._with(headers, used))
        except HttpError as refused:
            if refused.status != 401 or server_of(refused.url) != self._server:  # another's challenge is not answered
                raise self._in_words(refused) from refused
            again = self._authorize(refused, used)
        try:
            return self._http.get(url, self._with(headers, again))
        except HttpError as refused:
            raise self._in_words(refused) from refused

    @staticmethod
    def _with(headers: dict[str, str], authorization: str) -> dict[str, str]:
        return {**headers, "Authorization": authorization} if authorization else headers

    # Proving who we are ------------------------------------------------------------------------------------------

    def _authorize(self, refused: HttpError, used: str) -> str:
        """What the challenge asks for; of several threads one does it, when a token has run out too."""
        with self._lock:
            if self._authorization == used:
                challenge = parse_challenge(refused.headers)
                if challenge is None:
                    raise self._in_words(refused)
                self._authorization = self._answer_to(challenge)
            return self._authorization

    def _answer_to(self, challenge: Challenge) -> str:
        if challenge.scheme == "basic":
            known = self._known(self._wallet.for_registry(self._server, self._name.user))
            if known is None:
                raise DalsegnoError(f"{self._name.registry} wants a user and a password", hint=self._login_hint())
            return _basic(known)
        realm = self._realm(challenge)
        known = self._known(self._wallet.for_realm(self._server, realm, self._name.user))
        return f"Bearer {self._token(challenge, known)}"

    def _realm(self, challenge: Challenge) -> RegistryServer:
        """The server that gives tokens. One without TLS must be on the registry's own host: what it answers is sent to
        the registry, which could so have us read for it what only this machine can reach."""
        realm = server_of(challenge.realm)
        if realm is None:
            raise DamagedImage(
                f"{self._name.registry} names `{shown(challenge.realm)}` for tokens, which is not a plain URL",
                hint="ask the operator of the registry",
            )
        if realm.scheme == "https":
            return realm
        what = f"{self._name.registry} names `{shown(challenge.realm)}` for tokens, which has no TLS"
        if not self._server.is_same_host(realm):
            raise DalsegnoError(what, hint="credentials go to https URLs only, or to the registry's own host")
        if self._server.scheme == "https" and not self._may_be_plain:
            raise DalsegnoError(what, hint=PLAIN_HINT)
        return realm

    def _known(self, known: Credential | None) -> Credential | None:
        if known is None and self._name.user:
            raise DalsegnoError(
                f"no password is known for {self._name.user} at {self._name.registry}", hint=self._login_hint()
            )
        return known

    def _token(self, challenge: Challenge, known: Credential | None) -> str:
        """Ask for a token that lets us read this one repository, whatever scope the registry asks for."""
        asked = {"service": challenge.service, "scope": f"repository:{self._name.repository}:pull"}
        headers = {"Authorization": _basic(known)} if known and not known.identity_token else {}
        url, data = _with_query(challenge.realm, asked), None
        if known and known.identity_token:
            form = {
                **asked,
                "grant_type": "refresh_token",
                "refresh_token": known.identity_token,
                "client_id": "dalsegno",
            }
            url, data = challenge.realm, urllib.parse.urlencode(form).encode()
        try:
            with self._http.get(url, headers, data) as answer:
                value = json.loads(_read_up_to(answer, 1 << 20))
        except HttpError as refused:
            who = f"the password of {known.user or 'the token'}" if known else "a request without a user"
            server = address_of(url)
            by = "" if server == self._name.registry else f" (by {server}, which gives its tokens)"
            what = f"{self._name.registry} refused {who} for {self._name.repository}{by}: {refused.status}"
            raise DalsegnoError(what, hint=self._login_hint()) from refused
        except (ValueError, RecursionError):
            value = None
        token = (value.get("token") or value.get("access_token")) if isinstance(value, dict) else None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise DamagedImage(f"{shown(challenge.realm)} gave no token", hint="try again later")
        return token

    # Errors in words ---------------------------------------------------------------------------------------------

    def _in_words(self, refused: HttpError) -> DalsegnoError:
        name = self._name
        if refused.status in (401, 403) and server_of(refused.url) != self._server:
            other = address_of(refused.url)
            return DalsegnoError(
                f"{name.registry} redirects to {other}, which answered {refused.status}",
                hint="try again later, or ask the operator of the registry: credentials are not sent to other servers",
            )
        if refused.status == 404:
            return NotThere(
                f"{name.registry} has no image {name.repository}{'@' if name.digest else ':'}{name.reference}",
                hint="look at the name and the tag; before a `#` stands the registry: `nvcr.io#nvidia/pytorch:24.01`",
            )
        if refused.status in (401, 403):
            return DalsegnoError(f"{name.registry} does not let us have {name.repository}", hint=self._login_hint())
        if refused.status == 429:
            return DalsegnoError(f"{name.registry} has had too many requests from here", hint="wait, or log in")
        if refused.status >= 500:
            return Unreachable(refused.what, hint="try again later")
        return refused

    def _login_hint(self) -> str:
        unused = "".join(f"{each}; " for each in self._wallet.unused)
        machine = self._server.host if self._server.scheme == "https" else self._server.address
        return unused + _LOGIN_HINT.format(host=machine)


def _with_query(realm: str, asked: dict[str, str]) -> str:
    plain = realm.partition("#")[0]
    return f"{plain}{'&' if '?' in plain else '?'}{urllib.parse.urlencode(asked)}"


def _basic(known: Credential) -> str:
    return "Basic " + base64.b64encode(f"{known.user}:{known.password}".encode()).decode()


def _read_up_to(answer: HttpResponse, most: int) -> bytes:
    data = b""
    while piece := answer.read(1 << 16):
        data += piece
        if len(data) > most:
            raise DamagedImage(f"an answer of the registry is longer than {most >> 20} MiB", hint="this is no image")
    return data
