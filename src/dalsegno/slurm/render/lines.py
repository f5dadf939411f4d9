"""The grammar of Slurm's files: comments, `Key=Value`, quotes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dalsegno.errors import DalsegnoError

Settings = dict[str, str]


def header(file: str, cluster: str, spec: str) -> str:
    """Who made the file and from what, so that nobody edits it in vain."""
    made = f"Made by Dal Segno from {one_line(spec)}: change that, then `dalsegno up`."
    return f"# {file} of cluster {one_line(cluster)}\n# {made}\n"


def setting(key: str, value: str) -> str:
    return f"{key}={quoted(value)}"


def line(settings: Mapping[str, str]) -> str:
    """Several settings on one line, as nodes and partitions are written; empty values are left out."""
    return " ".join(setting(key, value) for key, value in settings.items() if value)


def lines(settings: Mapping[str, str]) -> str:
    """One setting a line; empty values are left out."""
    return "".join(f"{setting(key, value)}\n" for key, value in settings.items() if value)


def quoted(value: str) -> str:
    """The value as Slurm's parser reads it back. It has no way to write a quote or a line end inside one."""
    bare = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    if '"' in bare or "\n" in bare or bare.endswith("\\"):
        raise DalsegnoError(f"Slurm's files cannot hold the value {value!r}", hint="leave out quotes and line ends")
    escaped = bare.replace("#", "\\#")
    return f'"{escaped}"' if bare != value or any(letter.isspace() for letter in bare) else escaped


def merged(ours: Mapping[str, str], extra: Mapping[str, str]) -> Settings:
    """`extra` over `ours`. Slurm's keys know no case, and a key that stands twice is a warning or worse."""
    given = {key.lower(): (key, value) for key, value in extra.items()}
    kept = {key: value for key, value in ours.items() if key.lower() not in given}
    return kept | dict(given.values())


def without(settings: Mapping[str, str], keys: Iterable[str]) -> Settings:
    gone = {key.lower() for key in keys}
    return {key: value for key, value in settings.items() if key.lower() not in gone}


def yes(flag: bool) -> str:
    return "YES" if flag else ""


def number(value: int | float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def tres(counts: Mapping[str, int]) -> str:
    """`{"gres/gpu": 8, "cpu": 4}` as Slurm writes it."""
    return ",".join(f"{name}={count}" for name, count in counts.items())


def one_line(text: str) -> str:
    return " ".join(text.split())
