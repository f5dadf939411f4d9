"""Expand and compress Slurm host lists such as `n[1-4,7],gpu-[01-03]x[1-2]`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from dalsegno.errors import DalsegnoError

MAX_NODES = 65_536  # Slurm's limit for one range; it also prevents `n[0-999999999]` from exhausting memory

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_DIGITS = "0123456789"
_TAIL = re.compile(r"(.*?)(\d{1,18})$", re.DOTALL)


class HostlistError(DalsegnoError, ValueError):
    """The host list is invalid. Slurm would reject it too."""


def expand(text: str) -> list[str]:
    """Return all names in order: `n[1-2],x` → n1, n2, x. The last bracket of a name varies fastest."""
    names: list[str] = []
    for word in _words(text):
        pieces = [_choices(piece, word) for piece in _pieces(word)]
        _bound(len(names) + _product_size(pieces), text)
        names.extend("".join(choice) for choice in product(*pieces))
    return names


def compress(names: Iterable[str]) -> str:
    """Return the short form that expands to the same names in the same order: n1, n2, x → `n[1-2],x`."""
    groups: list[tuple[str, list[_NumberRange]]] = []
    for name in names:
        prefix, digits = _split_number(name)
        if groups and digits and groups[-1][0] == prefix and groups[-1][1]:
            _add(groups[-1][1], digits)
        else:
            groups.append((prefix, [_NumberRange(digits)] if digits else []))
    return ",".join(_written(prefix, runs) for prefix, runs in groups)


class _NumberRange:
    """A range of consecutive numbers, all padded to the same width."""

    def __init__(self, digits: str) -> None:
        self.first = digits
        self.last = digits

    def takes(self, digits: str) -> bool:
        follows = int(digits) == int(self.last) + 1
        # [09-10] and [9-10] are ranges in Slurm. 010 continues neither 09 nor 9, because its padding is different.
        return follows and digits == str(int(digits)).zfill(len(self.first))

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name closest to a misspelt one; "" if none is close. A name that differs only in its number does
    not count."""
    from difflib import get_close_matches

    stem = name.rstrip(_DIGITS)
    found = get_close_matches(name, [each for each in known if stem == name or each.rstrip(_DIGITS) != stem], 1)
    return found[0] if found else ""


def _add(runs: list[_NumberRange], digits: str) -> None:
    if runs[-1].takes(digits):
        runs[-1].last = digits
    else:
        runs.append(_NumberRange(digits))


def _written(prefix: str, runs: list[_NumberRange]) -> str:
    if not runs:
        return prefix
    if len(runs) == 1 and runs[0].first == runs[0].last:
        return prefix + runs[0].first
    return f"{prefix}[{','.join(map(str, runs))}]"


def _split_number(name: str) -> tuple[str, str]:
    if not name or any(letter in name for letter in "[], \t\n"):
        raise HostlistError(f"{name!r} is not a host name")
    found = _TAIL.match(name)
    return (found[1], found[2]) if found else (name, "")


def _words(text: str) -> list[str]:
    """Split a host list at the commas outside brackets."""
    if re.search(r"\[[^\]]*(\[|$)|^[^\[]*\]|\][^\[]*\]", text):
        raise HostlistError(f"brackets do not match in host list {text[:80]!r}")
    words = re.split(r",(?![^\[\]]*\])", text.strip())
    return [word.strip() for word in words if word.strip()]


def _pieces(word: str) -> list[re.Match[str]]:
    pieces = list(_PIECE.finditer(word))
    if "".join(piece[0] for piece in pieces) != word:
        raise HostlistError(f"host list {word[:80]!r} has a blank inside a name", hint="separate names by commas")
    if len(pieces) > 1 and pieces[-1][1] is None:
        raise HostlistError(
            f"host list {word[:80]!r} has text after its last bracket", hint="end names with the bracket"
        )
    return pieces


def _choices(piece: re.Match[str], word: str) -> list[str]:
    if piece[1] is None:
        return [piece[2]]
    return [number for part in piece[1].split(",") for number in _numbers(part.strip(), word)]


def _numbers(part: str, word: str) -> list[str]:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise HostlistError(f"`{part[:40]}` in host list {word[:80]!r} is not a number or a range like 1-4")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise HostlistError(f"range `{part[:40]}` in host list {word[:80]!r} runs backwards")
    _bound(last - first + 1, word)
    return [str(number).zfill(len(found[1])) for number in range(first, last + 1)]


def _product_size(pieces: list[list[str]]) -> int:
    size = 1
    for piece in pieces:
        size *= len(piece)
    return size


def _bound(count: int, text: str) -> None:
    if count > MAX_NODES:
        raise HostlistError(f"host list {text[:80]!r} names {count:,} hosts; the limit is {MAX_NODES:,}")
