"""A registry, by its protocol (version 2): manifests and blobs of one image, with tokens where it asks for them."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.parse
from dataclasses import dataclass
from email.message import Message

from dalsegno.containers.credentials import Credential, Wallet
from dalsegno.containers.damage import DamagedImage
from dalsegno.containers.http_client import Answer, Http, Refused, Unreachable
from dalsegno.containers.manifest import MANIFEST_TYPES, MAX_JSON
from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.image_name import ImageName

_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
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


def is_loopback(registry: str) -> bool:
    host = re.sub(r":\d+$", "", registry)
    return host in ("localhost", "[::1]") or re.fullmatch(r"127\.\d+\.\d+\.\d+", host) is not None


class Registry:
    """One image's place in a registry."""

    def __init__(self, name: ImageName, http: Http, wallet: Wallet, *, plain_http: bool = False) -> None:
        """Without encryption only where it was asked for, or where nobody else can listen."""
        self._name = name
        self._http = http
        self._wallet = wallet
        self._plain = plain_http or is_loopback(name.registry)
        self._base = f"{'http' if self._plain else 'https'}://{name.registry}/v2/{name.repository}"
        self._authorization = ""
        self._lock = threading.Lock()

    def manifest(self, reference: str) -> bytes:
        """The index or manifest of a tag or a digest."""
        with self._get(f"{self._base}/manifests/{reference}", {"Accept": ", ".join(MANIFEST_TYPES)}) as answer:
            data = _read_up_to(answer, MAX_JSON)
        return data

    def blob(self, digest: str, start: int = 0) -> Answer:
        """A blob, from some byte on; a registry that cannot do that sends all of it, with status 200."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        return self._get(f"{self._base}/blobs/{digest}", headers)

    def _get(self, url: str, headers: dict[str, str]) -> Answer:
        used = self._authorization
        try:
            return self._http.get(url, self._with(headers, used))
        except Refused as refused:
            if refused.status != 401:
                raise self._in_words(refused) from refused
            again = self._authorize(refused, used)
        try:
            return self._http.get(url, self._with(headers, again))
        except Refused as refused:
            raise self._in_words(refused) from refused

    @staticmethod
    def _with(headers: dict[str, str], authorization: str) -> dict[str, str]:
        return {**headers, "Authorization": authorization} if authorization else headers

    # Proving who we are ------------------------------------------------------------------------------------------

    def _authorize(self, refused: Refused, used: str) -> str:
        """What the challenge asks for; of several threads one does it, when a token has run out too."""
        with self._lock:
            if self._authorization == used:
                challenge = parse_challenge(refused.headers)
                if challenge is None:
                    raise self._in_words(refused)
                self._authorization = self._answer_to(challenge)
            return self._authorization

    def _answer_to(self, challenge: Challenge) -> str:
        realm = urllib.parse.urlsplit(challenge.realm)
        known = self._wallet.find(self._name.registry, realm.netloc, self._name.user)
        if known is None and self._name.user:
            raise DalsegnoError(
                f"no password is known for {self._name.user} at {self._name.registry}", hint=self._login_hint()
            )
        if challenge.scheme == "basic":
            if known is None:
                raise DalsegnoError(f"{self._name.registry} wants a user and a password", hint=self._login_hint())
            return _basic(known)
        if realm.scheme != "https" and not (self._plain and realm.scheme == "http"):
            what = f"{self._name.registry} names `{challenge.realm}` for tokens"
            raise DalsegnoError(what, hint="credentials are sent to https addresses only")
        return f"Bearer {self._token(challenge, known)}"

    def _token(self, challenge: Challenge, known: Credential | None) -> str:
        asked = {"service": challenge.service, "scope": challenge.scope or f"repository:{self._name.repository}:pull"}
        headers = {"Authorization": _basic(known)} if known and not known.identity_token else {}
        url, data = f"{challenge.realm}?{urllib.parse.urlencode(asked)}", None
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
        except Refused as refused:
            who = f"the password of {known.user or 'the token'}" if known else "a request without a user"
            server = urllib.parse.urlsplit(url).netloc
            by = "" if server == self._name.registry else f" (by {server}, which gives its tokens)"
            what = f"{self._name.registry} refused {who} for {self._name.repository}{by}: {refused.status}"
            raise DalsegnoError(what, hint=self._login_hint()) from refused
        except ValueError:
            value = None
        token = (value.get("token") or value.get("access_token")) if isinstance(value, dict) else None
        if not isinstance(token, str) or not token.isprintable():
            raise DamagedImage(f"{challenge.realm} gave no token", hint="try again later")
        return token

    # Errors in words ---------------------------------------------------------------------------------------------

    def _in_words(self, refused: Refused) -> DalsegnoError:
        name = self._name
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
        lacking = "".join(f"{each} was to be asked, and is not on this machine; " for each in self._wallet.lacking)
        return lacking + _LOGIN_HINT.format(host=self._name.registry.partition(":")[0])


def _basic(known: Credential) -> str:
    return "Basic " + base64.b64encode(f"{known.user}:{known.password}".encode()).decode()


def _read_up_to(answer: Answer, most: int) -> bytes:
    data = b""
    while piece := answer.read(1 << 16):
        data += piece
        if len(data) > most:
            raise DamagedImage(f"an answer of the registry is longer than {most >> 20} MiB", hint="this is no image")
    return data
