"""Write the field tables of docs/cluster-file.md from the model, so that they cannot go stale.

    .venv/bin/python docs/field_tables.py

Each table is between `<!-- fields: Partition -->` and `<!-- end of fields -->`. A test compares them with the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dalsegno.spec.checks.targets import UNBUILT_FIELDS
from dalsegno.spec.model import ClusterSpec, json_schema
from dalsegno.spec.values import Minutes, Seconds, Share, SizeMiB

PAGE = Path(__file__).with_name("cluster-file.md")
TABLE = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
NAMES: list[Schema] = [TEXT, {"type": "array", "items": TEXT}]
TIMES, SIZES, SHARES = ["30m", "2h", "1-00:00:00"], ["512M", "64G", "2T"], ["25%", 0.25]
SPANS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
MANY_CHOICES = 10
LARGE = 10**6


def fill(page: str) -> str:
    """Return the page with all its tables generated from the present model."""
    schema = json_schema()
    models = {model.__name__: model for model in sections(ClusterSpec)}
    links = {name: _link(page, at) for name, at in marked(page).items()}
    return TABLE.sub(lambda found: f"{found[1]}\n{_table(schema, models[found[2]], links)}\n\n{found[3]}", page)


def marked(page: str) -> dict[str, int]:
    """Return the sections that have a table on the page, with the position of each."""
    return {found[2]: found.start() for found in TABLE.finditer(page)}


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the model and the models that it contains, in the order of the file."""
    seen: dict[type[BaseModel], None] = {model: None}
    waiting = [model]
    while waiting:
        for inner in _models_in(list(waiting.pop(0).model_fields.values())):
            if inner not in seen:
                seen[inner] = None
                waiting.append(inner)
    yield from seen


def _models_in(parts: list[Any]) -> Iterator[type[BaseModel]]:
    for part in parts:
        if isinstance(part, FieldInfo):
            yield from _models_in([part.annotation])
        elif isinstance(part, type) and issubclass(part, BaseModel):
            yield part
        else:
            yield from _models_in(list(getattr(part, "__args__", ())))


def _link(page: str, at: int) -> str:
    """Return a link, in GitHub's form, to the heading above a position."""
    heading = HEADING.findall(page[:at])[-1]
    slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}](#{slug})"


def _table(schema: Schema, model: type[BaseModel], links: Mapping[str, str]) -> str:
    properties = schema["properties"] if model is ClusterSpec else schema["$defs"][model.__name__]["properties"]
    fields = sorted(model.model_fields.items(), key=lambda item: item[0] != "name")  # a name comes first
    rows = [_row(name, field, properties[name], links, _unbuilt(model, name)) for name, field in fields]
    return "\n".join(["| field | takes | default | what |", "|---|---|---|---|", *rows])


def _row(name: str, field: FieldInfo, schema: Schema, links: Mapping[str, str], unbuilt: str) -> str:
    what = _escape(field.description or "") + unbuilt
    return f"| `{name}` | {takes(schema, links)} | {default(field, schema)} | {what} |"


def _unbuilt(model: type[BaseModel], name: str) -> str:
    """Return the remark on a field that is refused, because no code acts on it yet."""
    for each in UNBUILT_FIELDS:
        block, _, inner = each.path.partition(".")
        owners = list(_models_in([ClusterSpec.model_fields[block]])) if inner else [ClusterSpec]
        if model in owners and name == (inner or block):
            return f" **Not built yet**{''.join(f' on `{target}`' for target in each.targets)}."
    return ""


def _escape(text: str) -> str:
    return re.sub(r"<(\w+)>", r"`<\1>`", text).replace("|", "\\|")


def takes(schema: Schema, links: Mapping[str, str]) -> str:
    """Describe the values that a field accepts."""
    choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
    if len(choices) == 1:
        return takes(choices[0], links) if "anyOf" in choices[0] else _single(choices[0], links)
    examples = schema.get("examples", [])
    if examples in (TIMES, SHARES):
        return "time" if examples == TIMES else "share"
    if choices == NAMES:
        return "names"
    return "number, or names" if choices[1:] == NAMES else " or ".join(_single(choice, links) for choice in choices)


def _single(schema: Schema, links: Mapping[str, str]) -> str:
    if "$ref" in schema:
        return links[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return _choices(schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return f"list: {takes(schema['items'], links)}"
    if kind == "object":
        return f"mapping to {takes(schema['additionalProperties'], links)}"
    if kind in ("integer", "number"):
        return _number(schema)
    if isinstance(kind, list):
        return "text"
    return {"boolean": "true or false", "string": "size" if schema.get("examples") == SIZES else "text"}[kind]


def _choices(choices: list[Any]) -> str:
    """List the choices. The schema has Slurm's keywords in both cases; one is enough here."""
    lower = [str(choice).lower() for choice in choices]
    once = [choice for at, choice in enumerate(choices) if lower[at] not in lower[:at]]
    return "Slurm's keywords" if len(once) > MANY_CHOICES else ", ".join(f"`{choice}`" for choice in once)


def _number(schema: Schema) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and most is not None and most < LARGE:
        return f"number, {least} to {most}"
    return f"number, {least} or more" if least else "number"


def default(field: FieldInfo, schema: Schema) -> str:
    """Return the default of a field, or an empty string if it has none."""
    if field.is_required():
        return "required"
    value = field.default
    if field.default_factory is not None or value is None or value in ("", [], {}):
        return ""
    choices = schema.get("enum", [])
    return f"`{value.lower() if value.lower() in choices else value}`" if choices else f"`{_format(field, value)}`"


def _format(field: FieldInfo, value: Any) -> str:
    """Format a value as it is written in the cluster file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if _has_type(field, Seconds) or _has_type(field, Minutes):
        return _span(value * (60 if _has_type(field, Minutes) else 1))
    if _has_type(field, SizeMiB):
        return f"{value // 1024}G"
    return f"{value:.0%}" if _has_type(field, Share) else str(value)


def _has_type(field: FieldInfo, alias: Any) -> bool:
    """Return whether the field has this annotated type, recognized by its validator."""
    return get_args(alias)[1] in field.metadata


def _span(seconds: int) -> str:
    return next(f"{seconds // unit_s}{unit}" for unit, unit_s in SPANS if seconds % unit_s == 0)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
