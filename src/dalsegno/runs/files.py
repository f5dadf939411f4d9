"""Read the files of a run. Their content is not trusted, because root may read the runs of other users."""

from __future__ import annotations

import json
from pathlib import Path

from dalsegno.runs.folder import RunFolder, repair_hint
from dalsegno.system.files import Json, damaged
from dalsegno.system.ownership import list_beneath, open_beneath, read_beneath

MAX_FILE_BYTES = 8 << 20


def read_value(path: Path) -> Json:
    """Return the JSON value in a file of a run folder; None if there is no such file.

    Raise DalsegnoError if the JSON is invalid, the file is too long, or it is not a regular file owned by the folder's
    owner.
    """
    text = read_beneath(path.parent, path.name, MAX_FILE_BYTES)
    if text is None:
        return None
    try:
        value: Json = json.loads(text)
        return value
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error), repair_hint(path)) from error


def open_log(run: RunFolder, path: Path) -> int:
    """Open a file of the run for reading, without following links out of its folder."""
    return open_beneath(run.root, str(path.relative_to(run.root)))


def names_in(run: RunFolder, folder: Path) -> list[str]:
    """Return the names in a folder of the run; empty if the folder does not exist."""
    return list_beneath(run.root, str(folder.relative_to(run.root)))
