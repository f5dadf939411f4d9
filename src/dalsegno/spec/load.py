"""Reading a cluster file: everything that is wrong with it, at once."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from dalsegno.errors import Problem, SpecError
from dalsegno.spec.checks import run_checks
from dalsegno.spec.checks.report import Report
from dalsegno.spec.document import Document, Table, read_document
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.salvage import salvage
from dalsegno.spec.section import one_line

_MAX_BYTES = 1024 * 1024
_INIT = "`dalsegno init` writes a starter file"


def load_spec(path: str | os.PathLike[str]) -> ClusterSpec:
    """The cluster file at `path`. Raises SpecError with all its problems."""
    name = os.fspath(path)
    return parse_spec(_read(name), name)


def parse_spec(text: str, filename: str = "cluster.yaml") -> ClusterSpec:
    """The cluster file in `text`; `filename` is for messages. Raises SpecError with all its problems."""
    document = read_document(text, filename)
    if not isinstance(document.data, Table):
        raise SpecError([_not_a_mapping(document)])
    # `x-…` at the top is the user's own: a place for anchors.
    for key in [key for key in document.data if key.startswith("x-")]:
        del document.data[key]
    written = copy.deepcopy(document.data)
    salvaged = salvage(document)
    if salvaged.spec is not None:
        run_checks(salvaged.spec, Report(document, salvaged.cut, written))
    if document.problems or salvaged.spec is None:
        raise SpecError(_in_order(document.problems))
    return salvaged.spec


def _read(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise SpecError([Problem("the file is larger than 1 MiB", name, "is this a cluster file?")])
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError([Problem("there is no such file", name, _INIT)]) from None
    except IsADirectoryError:
        raise SpecError([Problem("that is a folder, not a file", name, "name the cluster file in it")]) from None
    except UnicodeDecodeError:
        raise SpecError([Problem("that is not a text file (UTF-8)", name, _INIT)]) from None
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError(
            [Problem(f"the file cannot be read: {said}", name, "is it the right file, and may you read it?")]
        ) from None


def _not_a_mapping(document: Document) -> Problem:
    if document.data is None and not document.lines:
        return Problem("the file is empty", document.filename, _INIT)
    what = "a cluster file is a mapping with `name`, `target` and `partitions`"
    return Problem(what, document.where(()), _INIT)


def _in_order(problems: list[Problem]) -> list[Problem]:
    """By line; each once. Whatever the file holds, a message is one line."""
    clean = (Problem(one_line(each.what), each.where, one_line(each.hint)) for each in problems)
    return sorted(dict.fromkeys(clean), key=lambda problem: int(problem.where.rpartition(":")[2]))
