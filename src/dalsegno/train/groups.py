"""Keep the objects of process groups alive, because torch can deadlock when it frees one.

When the last reference to a gloo group is dropped, its destructor joins the group's threads while it holds the GIL. One
of those threads may be waiting for the GIL. This can happen in the middle of a script, for example when a DDP model
with the last reference goes out of scope after `destroy_process_group`. One reference that is never released prevents
the deadlock. `destroy_process_group` still shuts the group down and releases its connections and GPU memory.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

_MAKE = "_new_process_group_helper"  # creates every group: the default group, and those of new_group and split_group
_kept: set[int] = set()


def keep_new_groups(on_new: Callable[[Any], None] = lambda group: None) -> None:
    """Keep alive every group that this process creates from now on, and call `on_new` for each.

    Do nothing if torch.distributed is not loaded, or if this function was called before.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    make = getattr(c10d, _MAKE, None)
    if c10d is None or make is None or hasattr(make, "keeps_groups"):
        return

    @functools.wraps(make)
    def make_and_keep(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        for each in made if isinstance(made, tuple) else (made,):
            if keep(each):
                on_new(each)
        return made

    make_and_keep.keeps_groups = True  # type: ignore[attr-defined]
    setattr(c10d, _MAKE, make_and_keep)


def keep(group: Any) -> bool:
    """Keep the group alive with a reference that is never released, even at interpreter exit.

    Return whether the reference was added now. A group that is kept already gets no second one.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    kind = getattr(c10d, "ProcessGroup", None)
    if kind is None or not isinstance(group, kind) or id(group) in _kept:
        return False
    _kept.add(id(group))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return True
