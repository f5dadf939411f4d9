"""Images in words and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dalsegno.cli.sizes import size
from dalsegno.printable import one_line

if TYPE_CHECKING:
    from dalsegno.containers.image_metadata import Inside
    from dalsegno.containers.store import Stored

HEADERS = ("IMAGE", "DIGEST", "ARCH", "SIZE", "AGE")


def rows(stored: Stored) -> list[list[str]]:
    """One for each of its names."""
    record = stored.record
    about = [record.hex[:12], record.arch or "?", size(record.size), age(time.time() - record.imported)]
    return [[name, *about] for name in stored.names or ("-",)]


def as_json(stored: Stored) -> dict[str, object]:
    record = stored.record
    return {
        "names": list(stored.names), "digest": record.digest, "arch": record.arch, "size": record.size,
        "compression": record.compression, "sha256": record.sha256, "imported": record.imported,
        "created": record.created, "path": str(stored.path), "layers": list(record.layers), "env": list(record.env),
        "entrypoint": list(record.entrypoint), "cmd": list(record.cmd), "workdir": record.workdir,
    }  # fmt: skip


def lines(stored: Stored) -> list[str]:
    """All that is known of one."""
    import shlex

    record = stored.record
    pairs = {
        "image": ", ".join(stored.names) or "-", "digest": record.digest, "file": str(stored.path),
        "size": f"{size(record.size)} ({record.compression})", "arch": record.arch or "?", "created": record.created,
        "workdir": record.workdir, "entrypoint": shlex.join(record.entrypoint), "cmd": shlex.join(record.cmd),
    }  # fmt: skip
    env = [("env" if not number else "", each) for number, each in enumerate(record.env)]
    return _aligned([*((key, value) for key, value in pairs.items() if value), *env])


def inside_as_json(path: str, inside: Inside) -> dict[str, object]:
    return {
        "path": path, "env": inside.env, "workdir": inside.workdir, "entrypoint": inside.entrypoint, "cmd": inside.cmd,
    }  # fmt: skip


def inside_lines(path: str, inside: Inside) -> list[str]:
    import shlex

    pairs = [("file", path), ("workdir", inside.workdir)]
    pairs += [("entrypoint", shlex.join(inside.entrypoint))] if inside.entrypoint else []
    pairs += [("cmd", shlex.join(inside.cmd))] if inside.cmd else []
    pairs += [("env" if not number else "", f"{k}={v}") for number, (k, v) in enumerate(inside.env.items())]
    return _aligned(pairs)


def _aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each: what an image says of itself must not look like more of them."""
    return [f"{key:<12}{one_line(value)}" for key, value in pairs]


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
