"""Authentication of the web page: one-time login tokens, sessions and read-only links.

Tokens and cookies are random and are stored only as SHA-256 digests, so that the time of a lookup reveals nothing
about them. Sessions are saved in a file of mode 0600, so that they survive a restart of the observer.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.files import read_json, write_atomic

TOKEN_S = 60.0  # a one-time token is valid for this long
SESSION_S = 12 * 3600.0
LINK_S = 90 * 86400.0  # a read-only link, as for a wall display, is valid for this long
MAX_TOKENS, MAX_TOKENS_PER_USER = 256, 16
MAX_SESSIONS, MAX_SESSIONS_PER_USER = 512, 32


class WebRole(Enum):
    """The role of a visitor, which determines the allowed actions."""

    VIEWER = "viewer"  # the visitor of a read-only link, as on a wall display
    USER = "user"  # a user of the cluster, who can cancel only their own runs and jobs
    OPERATOR = "operator"  # root or the cluster's owner


@dataclass(frozen=True)
class Visitor:
    """A person with a valid session of the web page. `csrf` is the token that this visitor's forms must send."""

    role: WebRole
    uid: int
    user: str
    csrf: str = ""

    @property
    def operates(self) -> bool:
        return self.role is WebRole.OPERATOR

    def may_cancel(self, uid: int | None) -> bool:
        """Return whether the visitor may cancel a run or job of this user."""
        return self.operates or (self.role is WebRole.USER and uid is not None and uid == self.uid)


@dataclass(frozen=True)
class WebSession:
    """A session, a read-only link, or a login token. It is identified by the digest of its secret."""

    digest: str
    role: WebRole
    uid: int
    user: str
    until: float  # time of expiry, in seconds since 1970


@dataclass(frozen=True)
class _SavedSessions:
    sessions: tuple[WebSession, ...] = ()


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def csrf_of(cookie: str) -> str:
    """Return the token that the forms of a session must send. It can only be computed from the session's cookie."""
    return hmac.new(cookie.encode(), b"form", hashlib.sha256).hexdigest()


class Sessions:
    """The store of all login tokens and sessions. Any thread may call its methods."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock, self._lock = path, clock, threading.Lock()
        self._tokens: dict[str, WebSession] = {}
        self._sessions = {each.digest: each for each in _read(path)}

    def issue(self, role: WebRole, uid: int, user: str) -> str:
        """Return a new login token. It can be used once, within a minute."""
        token = secrets.token_urlsafe(32)
        entry = WebSession(digest_of(token), role, uid, user, self._clock() + TOKEN_S)
        with self._lock:
            self._tokens = _with(self._current(self._tokens), entry, MAX_TOKENS, MAX_TOKENS_PER_USER)
        return token

    def make_link(self, uid: int, user: str) -> str:
        """Return the secret of a new read-only link. It is valid until it is revoked, for ninety days at most."""
        secret = secrets.token_urlsafe(32)
        self._add(WebSession(digest_of(secret), WebRole.VIEWER, uid, user, self._clock() + LINK_S))
        return secret

    def exchange(self, token: str) -> str | None:
        """Return a cookie in exchange for a login token or the secret of a read-only link; None if it is invalid. A
        login token can be exchanged only once."""
        found = digest_of(token)
        with self._lock:
            self._tokens = self._current(self._tokens)
            entry = self._tokens.pop(found, None)
            link = self._current(self._sessions).get(found)
        if entry is None:
            return token if link is not None and link.role is WebRole.VIEWER else None
        cookie = secrets.token_urlsafe(32)
        self._add(replace(entry, digest=digest_of(cookie), until=self._clock() + SESSION_S))
        return cookie

    def visitor(self, cookie: str) -> Visitor | None:
        """Return the visitor with this cookie; None if there is no such session, or it has ended."""
        with self._lock:
            session = self._sessions.get(digest_of(cookie))
        if not cookie or session is None or session.until <= self._clock():
            return None
        return Visitor(session.role, session.uid, session.user, csrf_of(cookie))

    def end(self, cookie: str) -> None:
        """End the session with this cookie. A read-only link stays valid until its owner revokes it."""
        session = self._sessions.get(digest_of(cookie))
        if session is not None and session.role is not WebRole.VIEWER:
            self._keep(lambda each: each.digest != session.digest)

    def revoke(self, uid: int) -> int:
        """End all sessions, links and login tokens of a user, or of all users if `uid` is 0. Return the number of ended
        sessions and links."""
        with self._lock:
            self._tokens = {key: each for key, each in self._tokens.items() if uid != 0 and each.uid != uid}
            before = len(self._sessions)
        self._keep(lambda each: uid != 0 and each.uid != uid)
        return before - len(self._sessions)

    def _add(self, entry: WebSession) -> None:
        with self._lock:
            self._sessions = _with(self._current(self._sessions), entry, MAX_SESSIONS, MAX_SESSIONS_PER_USER)
            self._save()

    def _keep(self, wanted: Callable[[WebSession], bool]) -> None:
        with self._lock:
            self._sessions = {key: each for key, each in self._sessions.items() if wanted(each)}
            self._save()

    def _current(self, entries: dict[str, WebSession]) -> dict[str, WebSession]:
        now = self._clock()
        return {key: each for key, each in entries.items() if each.until > now}

    def _save(self) -> None:
        with contextlib.suppress(DalsegnoError):  # operators must be able to log in even if the disk is full
            text = json.dumps(facts_to_json(_SavedSessions(tuple(self._sessions.values()))))
            write_atomic(self._path, text, 0o600, durable=False)


def _with(entries: dict[str, WebSession], entry: WebSession, most: int, most_per_user: int) -> dict[str, WebSession]:
    """Return the entries with a new one added. If there are too many, remove the oldest entry of this user or, above
    the total limit, the oldest entry of all."""
    own = [key for key, each in entries.items() if each.uid == entry.uid]
    dropped = set(own[: max(0, len(own) + 1 - most_per_user)])
    kept = {key: each for key, each in entries.items() if key not in dropped}
    while len(kept) >= most:
        del kept[next(iter(kept))]
    return {**kept, entry.digest: entry}


def _read(path: Path) -> tuple[WebSession, ...]:
    try:
        value = read_json(path)
        return facts_from_json(_SavedSessions, value).sessions if isinstance(value, dict) else ()
    except (DalsegnoError, OSError):
        return ()  # the file is damaged, so everybody must log in again
