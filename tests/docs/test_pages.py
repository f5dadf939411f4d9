"""The pages agree with the program: commands, fields, rooms, variables, links."""

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from docs.field_tables import PAGE, fill, marked, sections

from dalsegno.cli.main import COMMANDS
from dalsegno.spec.model import ClusterSpec
from tests.docs.blocks import FENCE, PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"\bDALSEGNO_[A-Z_]+")
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)


def text_of(page: Path) -> str:
    """Return the text of a page without its blocks, whose brackets are not links."""
    return FENCE.sub("", page.read_text())


def test_the_readme_lists_the_commands_of_the_program():
    readme = text_of(ROOT / "README.md").partition("## Commands")[2].partition("\n## ")[0]
    shown = dict(ROW.findall(readme))
    assert list(shown) == [*COMMANDS, "setup"]
    assert {name: shown[name] for name in COMMANDS} == COMMANDS


def test_the_field_tables_match_the_model():
    page = PAGE.read_text()
    assert fill(page) == page, "run: .venv/bin/python docs/field_tables.py"


def test_every_section_of_the_cluster_file_has_a_table():
    assert set(marked(PAGE.read_text())) == {section.__name__ for section in sections(ClusterSpec)}


def test_the_architecture_page_names_every_room():
    page = (ROOT / "docs/architecture.md").read_text()
    folder = ROOT / "src/dalsegno"
    rooms = [f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()]
    files = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
    assert [room for room in (*rooms, *files) if f"`{room}`" not in page] == []


def test_every_environment_variable_is_on_a_page():
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    known = {name for name in VARIABLE.findall(sources) if not name.endswith("_")}  # a prefix of several variables
    documented = {name for page in PAGES for name in VARIABLE.findall(page.read_text())}
    assert "DALSEGNO_HOME" in known and known - documented == set()


def test_the_readme_lists_every_page():
    listed = set(LINK.findall(text_of(ROOT / "README.md")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - listed == set()


def test_the_changelog_has_each_release_and_each_part_of_the_next_one_once():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^##? (.+)$", changelog, re.MULTILINE)
    parts = re.findall(r"^### (.+)$", changelog.split("\n## ")[1], re.MULTILINE)
    assert titles[:2] == ["Changelog", "[Unreleased]"] and "Fixed" in parts
    assert [heading for heading, count in Counter([*titles, *parts]).items() if count > 1] == []


def test_the_security_page_has_its_three_main_sections():
    sections = re.findall(r"^##+ (.+)$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert {"Who is trusted", "What runs with root's rights", "Reporting a vulnerability"} <= set(sections)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_link_has_a_target(page: Path):
    inside = [link for link in LINK.findall(text_of(page)) if "://" not in link]
    assert [link for link in inside if not has_target(page, link)] == []


def has_target(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else []
    return not anchor or anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("table")


@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("up", "| 4 virtual hosts"),
        ("restart", "| worker killed"),
        ("recovery", "| power cut: detected"),
        ("exporter", "| 10,000 nodes"),
    ],
)
def test_the_performance_page_has_the_measured_tables(table: ModuleType, script: str, row: str):
    page = (ROOT / "docs/performance.md").read_text()
    begin, end = marks(table, script)
    measured = page.partition(begin)[2].partition(end)[0]
    assert "Measured on 20" in measured and row in measured


def marks(table: ModuleType, script: str) -> tuple[str, str]:
    return tuple(table.MARK.format(script=script, which=which) for which in ("begin", "end"))


def test_a_new_table_replaces_the_old_one(table: ModuleType):
    begin, end = marks(table, "up")
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert table.put_between_markers(page, "new", "up") == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    with pytest.raises(ValueError, match="markers"):
        table.put_between_markers(page, "new", "restart")


def test_a_row_is_judged_by_its_median(table: ModuleType):
    assert table.Row("up", 3.0, (2.0, 2.9, 9.0)).verdict == "met"
    assert table.Row("up", 3.0, (2.0, 3.1, 9.0)).verdict == "**missed**"
    assert table.Row("up", None, (15.0,), note="takes 9 MiB", required="starts").verdict == "met; takes 9 MiB"
    assert table.Row("up", None, (15.0,), required="starts", held=False).verdict == "**missed**"
    assert table.Row("up", None, (), note="needs root").verdict == "not measured: needs root"
