"""Process groups that are never destroyed: torch can deadlock when one is.

When the last reference to a gloo group goes, its destructor joins the group's threads while it holds Python's lock,
which one of them may be waiting for. That happens in the middle of a script: a DDP model that goes out of scope after
`destroy_process_group` held that last reference. One more reference, which nobody ever gives up, is all it takes.
`destroy_process_group` still shuts the group down, so its connections and its GPU memory are given back.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

_MAKE = "_new_process_group_helper"  # every group of torch's is made there: the default one, new_group, split_group
_kept: set[int] = set()


def keep_new_groups() -> None:
    """Keep every group that this process makes from now on. Does nothing where torch.distributed is not loaded."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    make = getattr(c10d, _MAKE, None)
    if c10d is None or make is None or hasattr(make, "keeps_groups"):
        return

    @functools.wraps(make)
    def make_and_keep(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        for each in made if isinstance(made, tuple) else (made,):
            keep(each)
        return made

    make_and_keep.keeps_groups = True  # type: ignore[attr-defined]
    setattr(c10d, _MAKE, make_and_keep)


def keep(group: Any) -> None:
    """Give the group a reference that not even the interpreter's end takes away."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    kind = getattr(c10d, "ProcessGroup", None)
    if kind is not None and isinstance(group, kind) and id(group) not in _kept:
        _kept.add(id(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
