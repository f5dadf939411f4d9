"""Where the rungs are: the example `ladder`, packed with us, or at the root of a clone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from dalsegno.errors import DalsegnoError

_HERE = Path(__file__).resolve()


def examples_folder() -> Path:
    """The folder that holds `ladder`."""
    places = (_HERE.parent / "examples", _HERE.parents[3] / "examples")
    found = next((place for place in places if (place / "ladder" / "__init__.py").exists()), None)
    if found is None:
        raise DalsegnoError("the example `ladder` is missing", hint="install dalsegno again, or take a whole clone")
    return found


def make_importable() -> None:
    """`import ladder` finds the example, before anything else of that name."""
    sys.path.insert(0, str(examples_folder()))


def check_torch(find: Callable[[str], object] = find_spec) -> None:
    """Without importing it: that takes seconds."""
    if find("torch") is None:
        raise DalsegnoError(
            "`dalsegno bench ddp` needs PyTorch, which this Python does not have",
            hint="pip install 'dalsegno[torch]', or in a clone: ./dalsegno setup --torch",
        )
