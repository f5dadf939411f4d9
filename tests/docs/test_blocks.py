"""The examples on the pages are true: files validate, and commands print what is shown."""

import os
from pathlib import Path

import pytest
import yaml

from dalsegno.errors import SpecError
from dalsegno.runs.submit.job_file import parse_job
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from tests.docs.blocks import (
    NOT_RUN,
    PAGES,
    ROOT,
    Block,
    blocks,
    every_block,
    lines,
    matches,
    needs_cluster,
    needs_torch,
    run_page,
)

BASE = {"name": "name: demo", "target": "target: local", "partitions": "partitions: [{name: train, nodes: 2}]"}


def whole(block: Block) -> str:
    """Return a whole cluster file for an example, which may show only one section."""
    keys = yaml.safe_load(block.text)
    return "\n".join([block.text, *(line for key, line in BASE.items() if key not in keys)])


@pytest.mark.parametrize("block", every_block("yaml"), ids=lambda block: block.where)
def test_every_cluster_file_is_valid_unless_marked_faulty(block: Block):
    if block.file == "job.yaml":
        assert parse_job(block.text, block.where).script
    elif "faulty" in block.words:
        with pytest.raises(SpecError):
            parse_spec(whole(block), block.where)
    else:
        assert resolve(parse_spec(whole(block), block.where)).nodes


@pytest.mark.parametrize("block", every_block("sh"), ids=lambda block: block.where)
def test_a_block_is_run_completely_or_not_at_all(block: Block):
    known = [line for line in lines(block) if line in NOT_RUN]
    assert known in ([], lines(block)), "add the rest to NOT_RUN with a reason, or move it to a separate block"


def test_every_line_in_not_run_is_still_on_a_page():
    assert set(NOT_RUN) <= {line for block in every_block("sh") for line in lines(block)}


def test_every_block_has_a_language_that_is_tested():
    assert {block.language for page in PAGES for block in blocks(page)} == {"yaml", "sh", "console", "python"}
    assert all(block.file for block in every_block("python")), (
        "every script has a file name, so that the commands of the page can run it"
    )


def without_cluster(torch: bool) -> list[Path]:
    return [page for page in PAGES if not needs_cluster(page) and needs_torch(page) == torch]


@pytest.mark.cluster  # this needs no cluster, but several processes that import torch
@pytest.mark.long  # tests/train/disk/test_ckpt_command.py runs these commands
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", without_cluster(torch=True), ids=lambda page: page.name)
def test_commands_that_need_torch_print_what_the_page_shows(page: Path, tmp_path: Path):
    pytest.importorskip("torch")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "DALSEGNO_HOME": str(tmp_path / "home")}
    assert run_page(page, tmp_path, env) == []


@pytest.mark.cluster  # a process is started for each command
@pytest.mark.parametrize("page", without_cluster(torch=False), ids=lambda page: page.name)
def test_commands_that_need_no_cluster_print_what_the_page_shows(page: Path, tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "DALSEGNO_HOME": str(tmp_path / "home")}
    assert run_page(page, tmp_path, env) == []


def test_output_is_compared_without_numbers_spacing_and_omitted_lines():
    assert matches("up after 1.0 s\n", "up after 12.34 s\n")
    assert matches("a\n…\nz\n", "a\nb\nc\nz\n") and matches("a\n…\nz\n", "a\nz\n")
    assert not matches("a\n…\nz\n", "a\nb\n")
    assert not matches("train-1 idle\n", "train-1 down\n")
    assert matches("", "") and not matches("", "words\n")
