"""Sentences are short, pages have one order, and the glossary is small."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.blocks import PAGES, ROOT

OTHER_PAGES = [ROOT / name for name in ("CHANGELOG.md", "src/dalsegno/native/README.md", "examples/ladder/README.md")]
MOST_WORDS = 25
MOST_TERMS = 20
PARTS = ("Using ", "What can go wrong", "Reference")

NOT_PROSE = re.compile(
    r"^```.*?^```$"  # code blocks
    r"|<!-- written by \S+ --write: begin -->.*?: end -->"  # measured tables
    r"|<!--.*?-->",
    re.MULTILINE | re.DOTALL,
)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) +")
CELL_EDGE = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?])[*_)\"]*\s+(?=[*_(\"]*[A-Z0-9])")


class Sentence(NamedTuple):
    line: int
    text: str

    @property
    def words(self) -> int:
        """Return the number of words; an inline code span counts as one."""
        return sum(any(letter.isalnum() for letter in word) for word in self.text.split())


def sentences(page: str) -> Iterator[Sentence]:
    """Yield the sentences of paragraphs, list items and table cells, without code and headings."""
    for line, paragraph in paragraphs(NOT_PROSE.sub(lambda found: "\n" * found[0].count("\n"), page)):
        plain = LINK.sub(r"\1", CODE.sub("Code", paragraph))
        yield from (Sentence(line, each) for each in SENTENCE_END.split(plain))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items and table cells, each with the number of its first line."""
    first, parts, listed = 0, list[str](), False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        ended = not line.strip() or line.startswith(("#", "|")) or ITEM.match(line)
        if parts and ended:
            yield first, " ".join(parts)
            parts = []
        if ended:
            listed = bool(ITEM.match(line))
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in CELL_EDGE.split(line) if cell.strip(" -:"))
        elif line.strip() and not line.startswith("#") and (listed or not line.startswith("    ")):
            first = first if parts else number
            parts.append(ITEM.sub("", line).strip())


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_has_more_than_25_words(page: Path):
    found = [each for each in sentences(page.read_text()) if each.words > MOST_WORDS]
    assert [f"{page.name}:{each.line}: {each.words} words: {each.text}" for each in found] == []


TEXT = """# A heading is not a sentence

Run `dalsegno up --yes` first.
It creates *one* cluster. `plan` shows (see [the page](local.md#plan)) more.

    indented code

| a cell | Two sentences. In a \\| cell |
|---|--:|

```sh
neither is code
```

1. An item
    of two lines
- Another - 2.5 s long: nothing ends here
<!-- a comment -->
"""


def test_sentences_are_found_in_paragraphs_list_items_and_cells():
    assert [(each.line, each.text, each.words) for each in sentences(TEXT)] == [
        (3, "Run Code first.", 3),
        (3, "It creates *one* cluster.", 4),
        (3, "Code shows (see the page) more.", 6),
        (8, "a cell", 2),
        (8, "Two sentences.", 2),
        (8, "In a \\| cell", 3),
        (15, "An item of two lines", 5),
        (17, "Another - 2.5 s long: nothing ends here", 7),
    ]


@pytest.mark.parametrize("name", sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.stem != "glossary"))
def test_pages_say_what_it_is_how_to_use_it_and_what_can_go_wrong(name: str):
    page = (ROOT / "docs" / name).read_text()
    headings = HEADING.findall(page)
    assert len(list(sentences(page.partition("\n## ")[0]))) >= 2, "say first what it is"
    assert [next((each for each in headings if each.startswith(start)), "") for start in PARTS] == [
        each for each in headings if each.startswith(PARTS)
    ], f"each of {PARTS} once, in this order"


def test_glossary_has_one_sentence_for_each_of_few_terms():
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)[1:]
    assert 10 < len(rows) <= MOST_TERMS
    assert [term for term, meaning in rows if len(SENTENCE_END.split(meaning)) > 1] == []
