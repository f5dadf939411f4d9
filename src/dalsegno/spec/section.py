"""What every block of the cluster file has in common: it is strict, it is frozen, and it knows where it stands."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from dalsegno.spec.document import Path, Table

_S = TypeVar("_S", bound="Section")


class Section(BaseModel):
    """A block of the cluster file. Unknown keys are refused; nothing is quietly turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    _path: Path = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _remember_place(cls: type[_S], data: Any, handler: ModelWrapValidatorHandler[_S]) -> _S:
        section = handler(data)
        if isinstance(data, Table):
            section._path = data.path
        return section


def place(section: Section) -> Path:
    """The path of a section in its file; () for the root or for one that came from no file."""
    return section._path


def fault(what: str, hint: str = "") -> PydanticCustomError:
    """A validator's complaint. `what` goes on after the name of the value: "must be …, not …"."""
    return PydanticCustomError("fault", "{what}", {"what": what, "hint": hint})


def show(value: object) -> str:
    """A value as it may stand in a message: short, on one line, in backticks."""
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = one_line(str(value)[:60])
    return f"`{text}…`" if len(str(value)) > 60 else f"`{text}`"


def one_line(text: str) -> str:
    """Text from a file as it may stand in a terminal: no line breaks, no escape codes."""
    return "".join(c if c.isprintable() else "\\n" if c == "\n" else "?" for c in text)
