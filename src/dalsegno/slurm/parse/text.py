"""The grammar of Slurm's output: separated fields, `Key=Value`, numbers, times."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dalsegno.errors import DalsegnoError


@dataclass(frozen=True)
class Separators:
    """The field and record separators in the output of squeue or sinfo."""

    field: str = "\x1f"
    record: str = "\x1e"

    @classmethod
    def fresh(cls) -> Separators:
        """Return random separators, which no user could have put into a job's name or comment.

        Pass them in the environment, because other users can read the command line of a running command.
        """
        nonce = secrets.token_hex(16)
        return cls(f"\x1f{nonce}", f"\x1e{nonce}")

    @classmethod
    def fresh_record(cls) -> Separators:
        """Return a random record separator together with the plain field separator. They suit records whose free text
        comes last."""
        return cls(record=f"\x1e{secrets.token_hex(16)}")


# Separators for output that contains only text from administrators
PLAIN = Separators()

# This variable is set for every command, so that Slurm prints Unix times, whatever the time zone and the user's
# settings are.
TIME_ENV = {"SLURM_TIME_FORMAT": "%s"}

_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=")
_DURATION = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", re.ASCII)
_EMPTY = frozenset({"", "(null)", "null", "n/a", "none", "unknown", "n/s", "invalid", "not_set", "partition_limit"})


class ParseError(DalsegnoError):
    """Raised if the output of a Slurm command has an unexpected format."""


def malformed(command: str, text: str) -> ParseError:
    shown = " ".join(text.split())[:120]
    return ParseError(f"unexpected output of `{command}`: {shown!r}", hint="check that Slurm is 20.11 or newer")


def long_format(fields: Sequence[str], marks: Separators = PLAIN) -> str:
    """Return the -O argument for squeue and sinfo. A suffix without a width makes Slurm print the whole field."""
    return ",".join(f"{field}:{marks.field}" for field in fields[:-1]) + f",{fields[-1]}:{marks.record}"


def rows(command: str, text: str, marks: Separators = PLAIN) -> list[list[str]]:
    """Return the fields of each record. Their number is not checked. Raise ParseError if the output is truncated."""
    if not text.strip():
        return []
    *found, rest = text.split(marks.record)
    if rest.strip() or not found:
        raise malformed(command, rest)
    return [[field.strip() for field in row.lstrip("\n").split(marks.field)] for row in found]


def records(command: str, text: str, width: int) -> Iterator[list[str]]:
    """Yield the fields of each record. Raise ParseError if a record does not have `width` fields."""
    for row in rows(command, text):
        if len(row) != width:
            raise malformed(command, " ".join(row))
        yield row


def paragraphs(command: str, text: str, first_key: str) -> list[str]:
    """Split the output of `scontrol --oneliner` into records.

    A record begins at each line that starts with `first_key`. A record may span several lines, because a reason may
    contain line breaks.
    """
    starts = [match.start() for match in re.finditer(rf"^{first_key}=", text, re.MULTILINE)]
    if not starts or text[: starts[0]].strip() or not text.endswith("\n"):
        raise malformed(command, text)  # the format differs, or the output is truncated
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def pairs(text: str) -> dict[str, str]:
    """Parse `Key=Value Key=Value`.

    Values may contain blanks. If a key repeats, its first value is used, because free text comes last.
    """
    found: dict[str, str] = {}
    keys = list(_KEY.finditer(text))
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        value = text[key.end() : following.start() if following else len(text)]
        found.setdefault(key[1], value.strip())
    return found


def known(text: str) -> str:
    """Return the text, or "" if it is one of Slurm's words for a missing value."""
    return "" if text.strip().lower() in _EMPTY else text.strip()


def integer(text: str, default: int = 0) -> int:
    """Return the leading number of a value such as `8`, `8K` or `8.00`. If there is none, return the default."""
    found = re.match(r"\s*(-?\d{1,18})", text, re.ASCII)
    return int(found[1]) if found else default


def optional_integer(text: str) -> int | None:
    bare = text.strip()
    return int(bare) if re.fullmatch(r"-?\d{1,18}", bare, re.ASCII) else None


def epoch(text: str) -> int | None:
    """Return the Unix time that Slurm prints with TIME_ENV; None if the time is not set."""
    seconds = optional_integer(text)
    return seconds if seconds else None


def duration_s(text: str) -> int | None:
    """Return `1-02:03:04`, `02:03:04` or `03:04` in seconds; None for no limit or no value."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or len(text) > 40:
        return None
    days, *parts = (int(part) if part else None for part in found.groups())
    numbers = [part for part in parts if part is not None]
    # With days, the first number is hours. Without days, the last number is seconds.
    padded = numbers + [0] * (3 - len(numbers)) if days is not None else [0] * (3 - len(numbers)) + numbers
    hours, minutes, seconds = padded
    return (days or 0) * 86_400 + hours * 3_600 + minutes * 60 + seconds


# GPUs and memory in Slurm's two notations: gres (`gpu:h100:8(S:0-1)`) and TRES (`gres/gpu=8`)
_GPU = re.compile(r"gpu(?::([^:()]+))?:(\d{1,9})(?:\(.*\))?$")
_INDEXES = re.compile(r"\(.*?IDX:([0-9,-]+)", re.ASCII)
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
MAX_GPU_RANGES = 1024
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)", re.ASCII)
_MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


def gpus_in_gres(gres: str) -> int:
    """Return the number of GPUs: `gpu:h100:8(S:0-1),nic:2` → 8."""
    found = (_GPU.match(entry.removeprefix("gres:").replace("gres/", "")) for entry in _entries(gres))
    return sum(int(match[2]) for match in found if match)


def gpu_indexes_in_gres(gres: str) -> tuple[int, ...]:
    """Return the indexes of GPUs in use: `gpu:h100:3(IDX:0-1,5)` → 0, 1, 5. The result is empty if Slurm does not list
    them."""
    found: set[int] = set()
    for entry in _entries(gres):
        if _GPU.match(entry) and (listed := _INDEXES.search(entry)):
            for first, last in _RANGE.findall(listed[1])[:MAX_GPU_RANGES]:
                found.update(range(int(first), min(int(last or first), int(first) + MAX_GPU_RANGES) + 1))
    return tuple(sorted(found))


def gpu_type_in_gres(gres: str) -> str:
    found = (_GPU.match(entry) for entry in _entries(gres))
    return next((match[1] for match in found if match and match[1]), "")


def parse_tres(tres: str) -> dict[str, str]:
    """Parse `cpu=8,gres/gpu=2`."""
    entries = (entry.partition("=") for entry in tres.split(","))
    return {name.strip(): count.strip() for name, equals, count in entries if equals}


def gpus_in_tres(tres: str) -> int:
    """Return the number of GPUs. The entry without a type counts the GPUs of all types."""
    counts = parse_tres(tres)
    if "gres/gpu" in counts:
        return _count(counts["gres/gpu"])
    return sum(_count(count) for name, count in counts.items() if name.startswith("gres/gpu:"))


def memory_mib(text: str) -> int:
    """Return the MiB in `62.50G`, `16000M`, or a bare number of MiB; 0 if the text is not a size."""
    found = _MEMORY.match(text.strip())
    return round(float(found[1]) * _MIB[found[2]]) if found and len(found[1]) < 19 else 0


def _count(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else 0


def _entries(gres: str) -> list[str]:
    """Split at the commas outside parentheses: `gpu:2(IDX:0,3),nic:1` has two entries."""
    return [entry.strip() for entry in re.split(r",(?![^(]*\))", gres)]
