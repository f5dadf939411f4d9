"""Parse the index, the manifest and the configuration of an image."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.hardware.catalog import did_you_mean


class DamagedImage(DalsegnoError):
    """Raised if data does not match its digest, or is not an image."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint=hint or "build or copy the image again")


MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_JSON = 16 << 20
_MAX_LAYERS = 1000
_REF_NAME = "org.opencontainers.image.ref.name"
_ARCHITECTURES = {
    "x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64", "armv7l": "arm", "arm": "arm",
    "i386": "386", "i686": "386", "386": "386", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64",
}  # fmt: skip
_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Descriptor:
    """A reference to a blob by its digest."""

    digest: str  # digest of the content, as "sha256:…"
    size: int
    arch: str = ""
    os: str = ""
    ref_name: str = ""

    @property
    def hex(self) -> str:
        return self.digest.partition(":")[2]


@dataclass(frozen=True)
class Index:
    """One image for several architectures, or a layout's list of images."""

    manifests: tuple[Descriptor, ...]


@dataclass(frozen=True)
class ImageManifest:
    """One image: its configuration, and its layers from bottom to top."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True)
class Config:
    """The settings of an image, and the digests of its unpacked layers."""

    arch: str = ""
    env: tuple[str, ...] = ()  # entries of the form NAME=VALUE
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = ""
    volumes: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    diff_ids: tuple[str, ...] = ()
    created: str = ""


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_digest(data: bytes, digest: str, what: str) -> bytes:
    """Return the data unchanged; raise DamagedImage if the data does not have this digest."""
    if digest_of(data) != digest:
        raise DamagedImage(
            f"{what} does not match its digest {digest}", hint="try again; if it persists, ask the registry's operator"
        )
    return data


def parse_manifest(data: bytes) -> Index | ImageManifest:
    """Parse an index or a manifest, in OCI's or Docker's format."""
    value = _object(_json(data, "a manifest"), "a manifest")
    if "manifests" in value:
        return Index(tuple(_descriptor(each) for each in _list(value["manifests"], "the index")))
    if value.get("schemaVersion") == 1:
        raise DamagedImage("the image has a manifest of schema version 1, used before 2016", hint="push it again")
    if "layers" not in value or "config" not in value:
        raise DamagedImage(
            "not an image: its manifest has no layers",
            hint="registries also hold charts and other artifacts; check the name",
        )
    layers = tuple(_descriptor(each) for each in _list(value["layers"], "the manifest"))
    if len(layers) > _MAX_LAYERS:
        raise DamagedImage(f"the image has {len(layers)} layers, more than {_MAX_LAYERS}")
    return ImageManifest(_descriptor(value["config"]), layers)


def parse_config(data: bytes) -> Config:
    """Parse the configuration; missing settings are empty."""
    value = _object(_json(data, "the configuration"), "the configuration")
    config = value.get("config") or value.get("Config") or {}
    config = _object(config, "the configuration")
    rootfs = _object(value.get("rootfs") or {}, "the configuration")
    return Config(
        arch=_text(value.get("architecture")),
        env=_texts(config.get("Env")),
        entrypoint=_texts(config.get("Entrypoint")),
        cmd=_texts(config.get("Cmd")),
        workdir=_text(config.get("WorkingDir")),
        volumes=tuple(sorted(_object(config.get("Volumes") or {}, "the configuration"))),
        labels=tuple(
            sorted((k, _text(v)) for k, v in _object(config.get("Labels") or {}, "the configuration").items())
        ),
        diff_ids=_texts(rootfs.get("diff_ids")),
        created=_text(value.get("created")),
    )


def architecture(name: str = "") -> str:
    """Return the name that images use for an architecture, such as `amd64` for `x86_64`. "" means this machine's."""
    wanted = (name or platform.machine()).lower()
    if wanted in _ARCHITECTURES:
        return _ARCHITECTURES[wanted]
    raise UsageError(
        f"unknown architecture `{name or wanted}`",
        hint=did_you_mean(wanted, _ARCHITECTURES, "use `amd64` or `arm64`"),
    )


def choose_platform(index: Index, arch: str, what: str) -> Descriptor:
    """Return the image for this architecture."""
    runnable = [each for each in index.manifests if each.os in ("", "linux") and each.arch not in ("unknown",)]
    for each in runnable:
        if each.arch in (arch, ""):
            return each
    there = sorted({each.arch for each in runnable})
    hint = f"available for {', '.join(there)}; choose one with `--arch`" if there else "it has no image for Linux"
    raise NotThere(f"{what} has no image for {arch}", hint=hint)


def check_arch(config: Config, arch: str, what: str) -> None:
    """Raise if an image was built for another architecture; accept an image that names no architecture.

    Call this only for an image that no index lists.
    """
    made_for = _ARCHITECTURES.get(config.arch, config.arch)
    if made_for not in ("", arch):
        raise NotThere(f"{what} has no image for {arch}", hint=f"it is for {made_for}; use `--arch {made_for}`")


def find_tag(index: Index, tag: str, what: str) -> Descriptor:
    """Return the image with this tag in a layout's index; without a tag, the only image in it."""
    named = {each.ref_name: each for each in index.manifests}
    if tag in named and tag:
        return named[tag]
    if not tag and len(index.manifests) == 1:
        return index.manifests[0]
    tags = sorted(name for name in named if name)
    if not tag:
        raise UsageError(f"{what} has {len(index.manifests)} images", hint=_any_of(tags))
    raise NotThere(f"{what} has no image `{tag}`", hint=did_you_mean(tag, tags, _any_of(tags)))


def _any_of(tags: Sequence[str]) -> str:
    return (
        f"name one of them: {', '.join(tags[:8])}{', …' if len(tags) > 8 else ''}"
        if tags
        else "none of them has a name"
    )


def _descriptor(value: object) -> Descriptor:
    found = _object(value, "a manifest")
    digest, size = _text(found.get("digest")), found.get("size")
    kind, _, digits = digest.partition(":")
    if kind != "sha256" or len(digits) != 64 or not set(digits) <= _DIGITS:
        raise DamagedImage(f"invalid digest in the manifest: `{digest[:80]}`", hint="only sha256 is supported")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise DamagedImage("a size in the manifest is not a number")
    where = _object(found.get("platform") or {}, "a manifest")
    notes = _object(found.get("annotations") or {}, "a manifest")
    return Descriptor(
        digest, size, _text(where.get("architecture")), _text(where.get("os")), _text(notes.get(_REF_NAME))
    )


def _json(data: bytes, what: str) -> object:
    try:
        value: object = json.loads(data)
        return value
    except (ValueError, RecursionError):
        raise DamagedImage(f"{what} of the image is not valid JSON") from None


def _object(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DamagedImage(f"{what} of the image cannot be read")
    return value


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise DamagedImage(f"{what} of the image cannot be read")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
