"""Strict parsing of container image names.

| name | meaning |
|---|---|
| `/fsx/pytorch.sqsh`, `./pytorch.sqsh`, `../rootfs` | a file, or a folder |
| `[USER@][REGISTRY#]IMAGE[:TAG][@sha256:…]`; the prefix `docker://` is optional | an image in a registry, in the notation of Enroot and Pyxis |
| `[USER@]REGISTRY/IMAGE[:TAG][@sha256:…]`, with a `.` or `:` in REGISTRY, or `localhost`; the prefix `docker://` is optional | the same, in Docker's notation |
| `dockerd://IMAGE[:TAG]`, `podman://IMAGE[:TAG]` | an image in the local storage of Docker or Podman |
| `oci:DIR[:TAG]` | an image in an OCI layout |
| `docker-archive:FILE[:IMAGE:TAG]` | an archive from `docker save` |
"""  # noqa: E501

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass, replace

from dalsegno.errors import UsageError
from dalsegno.hardware.catalog import closest

DOCKER_HUB = "registry-1.docker.io"
_HUB_NAMES = ("docker.io", "index.docker.io", "registry.hub.docker.com", DOCKER_HUB)
_MAX_NAME = 1024

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_WORD}(?:\.{_WORD})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_USER = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$+|-]{0,127}")


class ImageKind(enum.Enum):
    """The source of an image. The value is the prefix of its name."""

    PATH = ""
    REGISTRY = "docker://"
    DOCKERD = "dockerd://"
    PODMAN = "podman://"
    OCI = "oci:"
    ARCHIVE = "docker-archive:"


@dataclass(frozen=True)
class ImageName:
    """A parsed image name. Fields that its kind does not have are empty."""

    kind: ImageKind
    path: str = ""  # path to the file or folder
    user: str = ""
    registry: str = ""  # host[:port] of the registry, also for Docker Hub
    repository: str = ""  # for example "nvidia/pytorch"; "library/ubuntu" for Docker Hub's `ubuntu`
    tag: str = ""
    digest: str = ""  # "sha256:…"; it takes precedence over the tag

    @property
    def is_path(self) -> bool:
        return self.kind is ImageKind.PATH

    @property
    def reference(self) -> str:
        """The digest or tag to request from a registry."""
        return self.digest or self.tag

    def absolute(self) -> ImageName:
        """Return the name with an absolute path, so that it means the same file in every working directory."""
        return replace(self, path=os.path.abspath(os.path.expanduser(self.path))) if self.path else self

    def __str__(self) -> str:
        """Return the full name without the user name, which is private. `parse_name` accepts the result."""
        if self.is_path:
            return self.path
        tag = (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")
        if self.kind in (ImageKind.OCI, ImageKind.ARCHIVE):
            repository = f":{self.repository}" if self.repository else ""
            return f"{self.kind.value}{self.path}{repository}{tag}"
        registry = f"{self.registry}#" if self.registry else ""
        return f"{self.kind.value}{registry}{self.repository}{tag}"


def parse_name(text: str) -> ImageName:
    """Parse an image name. If it is invalid, raise a UsageError that says what to write instead."""
    if not text or len(text) > _MAX_NAME or not text.isprintable() or text != text.strip():
        raise _wrong(text, "write a path or `[REGISTRY#]IMAGE[:TAG]`, without spaces around it")
    if text.startswith(("/", "./", "../")) or text in (".", ".."):
        return ImageName(ImageKind.PATH, path=text)
    scheme, separator, rest = _scheme(text)
    if separator == "://":
        kind = _kind(text, scheme, separator)
        return _in_registry(rest, text) if kind is ImageKind.REGISTRY else _in_daemon(kind, rest, text)
    if separator == ":":
        return _in_layout(rest, text) if scheme == "oci" else _in_archive(rest, text)
    return _in_registry(text, text)


def _scheme(text: str) -> tuple[str, str, str]:
    before, separator, rest = text.partition("://")
    if separator:
        return before, separator, rest
    before, separator, rest = text.partition(":")
    if before in ("oci", "docker-archive"):
        return before, separator, rest
    return "", "", text


def _kind(text: str, scheme: str, separator: str) -> ImageKind:
    try:
        return ImageKind(scheme + separator)
    except ValueError:
        schemes = [kind.value for kind in ImageKind if kind.value]
        near = closest(scheme + separator, schemes)
        known = f"start it with {', '.join(f'`{each}`' for each in schemes)}, or write a path"
        rest = text.partition("://")[2]
        raise _wrong(text, f"did you mean `{near}{rest}`?" if near and scheme != "https" else known) from None


def _in_registry(rest: str, text: str) -> ImageName:
    body, digest = _take_digest(rest, text)
    user, at, body = body.rpartition("@")
    if (at and not user) or (user and not _USER.fullmatch(user)):
        raise _wrong(text, "write the user name before `@`: `USER@REGISTRY#IMAGE`")
    registry, hash_sign, body = body.rpartition("#")
    if not hash_sign:
        _refuse_other_spellings(body, text)
        registry, body = _docker_registry(body)
    if (hash_sign and not registry) or (registry and not _HOST.fullmatch(registry)):
        raise _wrong(text, "write the registry, HOST or HOST:PORT, before `#`: `nvcr.io#nvidia/pytorch:24.01`")
    repository, tag = _repository_and_tag(body, text)
    hub = not registry or registry in _HUB_NAMES
    if hub and "/" not in repository:
        repository = f"library/{repository}"
    tag = tag or ("" if digest else "latest")
    return ImageName(
        ImageKind.REGISTRY,
        user=user,
        registry=DOCKER_HUB if hub else registry,
        repository=repository,
        tag=tag,
        digest=digest,
    )


def _docker_registry(body: str) -> tuple[str, str]:
    """Split `host/image` as Docker and Enroot do. The first part is a host if it contains `.` or `:` or is `localhost`.

    Otherwise it is a part of the image's name on Docker Hub, such as a namespace.
    """
    first, slash, rest = body.partition("/")
    is_host = slash and ("." in first or ":" in first or first == "localhost")
    return (first, rest) if is_host else ("", body)


def _refuse_other_spellings(body: str, text: str) -> None:
    """Raise UsageError for a file name without `./` and for a scheme without `//`: both look like Docker Hub images."""
    scheme, colon, name = body.partition(":")
    if scheme in ("docker", "dockerd", "podman") and colon and ("/" in name or ":" in name):
        raise _wrong(text, f"did you mean `{scheme}://{name.lstrip('/')}`?")
    if body.endswith((".sqsh", ".squashfs", ".sqfs", ".img")):
        raise _wrong(text, f"did you mean the file `./{body}`?")
    if body.endswith((".tar", ".tar.gz", ".tgz")):
        raise _wrong(text, f"did you mean `docker-archive:{body}`?")


def _in_daemon(kind: ImageKind, rest: str, text: str) -> ImageName:
    """Parse a name for Docker or Podman, which also accept a registry prefix (`host:5000/a:b`) and ids."""
    body, digest = _take_digest(rest, text)
    repository, tag = body, ""
    if ":" in body.rpartition("/")[2]:
        repository, _, tag = body.rpartition(":")
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", repository)
    if not plain or (tag and not _TAG.fullmatch(tag)):
        raise _wrong(text, f"write it as `{kind.value}IMAGE:TAG`")
    return ImageName(kind, repository=repository, tag=tag or ("" if digest else "latest"), digest=digest)


def _in_layout(rest: str, text: str) -> ImageName:
    path, colon, tag = rest.rpartition(":")
    if not colon:
        path, tag = rest, ""
    if not path or "\0" in path or (colon and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.\-+@/]{0,255}", tag)):
        raise _wrong(text, "write it as `oci:FOLDER:TAG`")
    return ImageName(ImageKind.OCI, path=path, tag=tag)


def _in_archive(rest: str, text: str) -> ImageName:
    path, colon, reference = rest.partition(":")
    if not path or (colon and not reference):
        raise _wrong(text, "write it as `docker-archive:FILE` or `docker-archive:FILE:IMAGE:TAG`")
    if not reference:
        return ImageName(ImageKind.ARCHIVE, path=path)
    image = _in_daemon(ImageKind.ARCHIVE, reference, text)
    return ImageName(ImageKind.ARCHIVE, path=path, repository=image.repository, tag=image.tag)


def _take_digest(rest: str, text: str) -> tuple[str, str]:
    before, at, last = rest.rpartition("@")
    if not at or ":" not in last or not re.fullmatch(r"[a-z0-9]+:.*", last) or "#" in last:
        return rest, ""
    if _DIGEST.fullmatch(last):
        return before, last
    if last.startswith("sha") or re.fullmatch(r".*:[0-9a-fA-F]{32,}", last):
        raise _wrong(text, "write a digest as `@sha256:` and 64 lower-case hexadecimal digits")
    return rest, ""


def _repository_and_tag(body: str, text: str) -> tuple[str, str]:
    repository, colon, tag = body.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _wrong(text, "write a tag after `:`: letters, digits, `_`, `.` and `-`, at most 128")
    if not _REPOSITORY.fullmatch(repository):
        raise _wrong(text, _repository_hint(repository, colon + tag))
    return repository, tag


def _repository_hint(repository: str, tag: str) -> str:
    lower = repository.lower()
    if lower != repository and _REPOSITORY.fullmatch(lower):
        return f"image names are lower case: did you mean `{lower}{tag}`?"
    if not repository:
        return "write `IMAGE:TAG`, as in `ubuntu:24.04`"
    return "use lower-case letters and digits, separated by `.`, `_`, `-` or `/`"


def _wrong(text: str, hint: str) -> UsageError:
    shown = text if len(text) <= 120 else f"{text[:120]}…"
    return UsageError(f"invalid image name {shown!r}" if text else "the image name is empty", hint=hint)
