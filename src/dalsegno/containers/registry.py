"""A client for registries (protocol version 2) that fetches manifests and blobs, with tokens where needed."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.parse
from dataclasses import dataclass
from email.message import Message

from dalsegno.containers.credentials import KNOWN_REALMS, Credential, CredentialFinder, RegistryServer, server_of
from dalsegno.containers.http import PLAIN_HINT, Http, HttpError, RegistryAnswer, Unreachable, address_of, shown
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
    """The authentication that a registry requires."""

    scheme: str  # authentication scheme: "bearer" or "basic"
    realm: str = ""
    service: str = ""
    scope: str = ""


def parse_challenge(headers: Message) -> Challenge | None:
    """Return the challenge that a 401 response offers, preferring bearer to basic; None if it offers neither."""
    offered = [_parse_one(text) for text in headers.get_all("WWW-Authenticate") or []]
    known = [each for each in offered if each.scheme in ("bearer", "basic")]
    return min(known, key=lambda each: each.scheme != "bearer") if known else None


def _parse_one(text: str) -> Challenge:
    scheme, _, rest = text.partition(" ")
    words = {key.lower(): value for key, value in _CHALLENGE.findall(rest)}
    return Challenge(scheme.lower(), words.get("realm", ""), words.get("service", ""), words.get("scope", ""))


class Registry:
    """A client for the repository of one image in a registry."""

    def __init__(self, name: ImageName, http: Http, credentials: CredentialFinder, *, plain_http: bool = False) -> None:
        """Open the repository. Plain HTTP is used only on the loopback address, or with `plain_http` if the registry
        has no TLS."""
        self._name = name
        self._http = http
        self._credentials = credentials
        self._may_be_plain = plain_http
        self._server = self._at("https")
        if self._server.is_loopback:
            self._server = self._at("http")
        self._authorization = ""
        self._lock = threading.Lock()

    def manifest(self, reference: str) -> bytes:
        """Return the index or manifest for a tag or a digest."""
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}
        try:
            answer = self._get(f"manifests/{reference}", headers)
        except Unreachable as error:
            self._fall_back_to_http(error)
            answer = self._get(f"manifests/{reference}", headers)
        with answer:
            return _read_up_to(answer, MAX_JSON)

    def blob(self, digest: str, start: int = 0) -> RegistryAnswer:
        """Request a blob from byte `start` on. A registry without range requests sends the whole blob, with status
        200."""
        return self._get(f"blobs/{digest}", {"Range": f"bytes={start}-"} if start else {})

    def _at(self, scheme: str) -> RegistryServer:
        server = server_of(f"{scheme}://{self._name.registry}/")
        if server is None:
            raise UsageError(f"invalid registry `{self._name.registry}`", hint="write HOST or HOST:PORT before `#`")
        return server

    def _fall_back_to_http(self, error: Unreachable) -> None:
        """Continue without TLS where that is allowed; otherwise raise, with a hint if the registry uses plain HTTP."""
        if self._server.scheme != "https" or self._authorization or self._server.host in KNOWN_REALMS:
            raise error
        if self._may_be_plain and (error.plain or not error.answered):
            self._server = self._at("http")
        elif error.answered or not error.plain or not self._uses_plain_http():
            raise error
        else:
            what = f"{self._name.registry} uses HTTP without TLS"
            raise Unreachable(what, hint=PLAIN_HINT, answered=True) from error

    def _uses_plain_http(self) -> bool:
        """Return whether the registry answers without TLS. No credential is sent."""
        try:
            self._http.get(f"http://{self._name.registry}/v2/", timeout_s=_PROBE_S).close()
        except HttpError as refused:
            return refused.status == 401
        except DalsegnoError:
            return False
        return True

    def _get(self, path: str, headers: dict[str, str]) -> RegistryAnswer:
        url = f"{self._server.scheme}://{self._name.registry}/v2/{self._name.repository}/{path}"
        used = self._authorization
        try:
            return self._http.get(url, self._with(headers, used))
        except HttpError as refused:
            # Another server, after a redirect, gets no credential.
            if refused.status != 401 or server_of(refused.url) != self._server:
                raise self._explain(refused) from refused
            again = self._authorize(refused, used)
        try:
            return self._http.get(url, self._with(headers, again))
        except HttpError as refused:
            raise self._explain(refused) from refused

    @staticmethod
    def _with(headers: dict[str, str], authorization: str) -> dict[str, str]:
        return {**headers, "Authorization": authorization} if authorization else headers

    # Authentication

    def _authorize(self, refused: HttpError, used: str) -> str:
        """Return a new Authorization header for a challenge. `used` is the header that the registry refused.

        If several threads need a new header, only one requests it.
        """
        with self._lock:
            if self._authorization == used:
                challenge = parse_challenge(refused.headers)
                if challenge is None:
                    raise self._explain(refused)
                self._authorization = self._answer_to(challenge)
            return self._authorization

    def _answer_to(self, challenge: Challenge) -> str:
        if challenge.scheme == "basic":
            known = self._known(self._credentials.for_registry(self._server, self._name.user))
            if known is None:
                raise DalsegnoError(f"{self._name.registry} requires a user and a password", hint=self._login_hint())
            return _basic(known)
        realm = self._realm(challenge)
        known = self._known(self._credentials.for_realm(self._server, realm, self._name.user))
        return f"Bearer {self._token(challenge, known)}"

    def _realm(self, challenge: Challenge) -> RegistryServer:
        """Return the token server. A token server without TLS must be on the registry's own host.

        The token server's answer is sent on to the registry as the token. If the registry could name any server without
        TLS, it could read from servers that only this machine can reach.
        """
        realm = server_of(challenge.realm)
        if realm is None:
            raise DamagedImage(
                f"{self._name.registry} names the token server `{shown(challenge.realm)}`, which is not a plain URL",
                hint="ask the operator of the registry",
            )
        if realm.scheme == "https":
            return realm
        what = f"{self._name.registry} names the token server `{shown(challenge.realm)}`, which has no TLS"
        if not self._server.is_same_host(realm):
            raise DalsegnoError(what, hint="credentials go to https URLs only, or to the registry's own host")
        if self._server.scheme == "https" and not self._may_be_plain:
            raise DalsegnoError(what, hint=PLAIN_HINT)
        return realm

    def _known(self, known: Credential | None) -> Credential | None:
        if known is None and self._name.user:
            raise DalsegnoError(
                f"no password is stored for {self._name.user} at {self._name.registry}", hint=self._login_hint()
            )
        return known

    def _token(self, challenge: Challenge, known: Credential | None) -> str:
        """Request a token for reading this one repository, whatever scope the registry asks for."""
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
            by = "" if server == self._name.registry else f" (at its token server {server})"
            what = f"{self._name.registry} refused {who} for {self._name.repository}{by}: {refused.status}"
            raise DalsegnoError(what, hint=self._login_hint()) from refused
        except (ValueError, RecursionError):
            value = None
        token = (value.get("token") or value.get("access_token")) if isinstance(value, dict) else None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise DamagedImage(f"{shown(challenge.realm)} gave no token", hint="try again later")
        return token

    def _explain(self, refused: HttpError) -> DalsegnoError:
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
                hint="check the name and the tag; a `#` ends the registry, as in `nvcr.io#nvidia/pytorch:24.01`",
            )
        if refused.status in (401, 403):
            return DalsegnoError(f"{name.registry} denied access to {name.repository}", hint=self._login_hint())
        if refused.status == 429:
            return DalsegnoError(f"{name.registry} has received too many requests from here", hint="wait, or log in")
        if refused.status >= 500:
            return Unreachable(refused.what, hint="try again later")
        return refused

    def _login_hint(self) -> str:
        unused = "".join(f"{each}; " for each in self._credentials.unused)
        machine = self._server.host if self._server.scheme == "https" else self._server.address
        return unused + _LOGIN_HINT.format(host=machine)


def _with_query(realm: str, asked: dict[str, str]) -> str:
    plain = realm.partition("#")[0]
    return f"{plain}{'&' if '?' in plain else '?'}{urllib.parse.urlencode(asked)}"


def _basic(known: Credential) -> str:
    return "Basic " + base64.b64encode(f"{known.user}:{known.password}".encode()).decode()


def _read_up_to(answer: RegistryAnswer, most: int) -> bytes:
    data = b""
    while piece := answer.read(1 << 16):
        data += piece
        if len(data) > most:
            raise DamagedImage(
                f"an answer of the registry is longer than {most >> 20} MiB", hint="check that the name is an image's"
            )
    return data
