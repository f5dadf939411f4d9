"""Subjects of commits have at most 72 characters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SINCE = "72ecb6d03cf64f8667d2a25335f8014f8c8310da"  # later commits follow the rule
MOST = 72


def long_subjects(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > MOST]


def test_subjects_of_commits_fit_into_72_characters():
    try:
        log = ["git", "-C", str(ROOT), "log", "--format=%s", f"{SINCE}..HEAD"]
        done = subprocess.run(log, capture_output=True, text=True, check=False, timeout=100)
    except OSError:
        pytest.skip("git is not installed")
    if done.returncode:
        pytest.skip("this is not a clone with the history since then")
    assert long_subjects(done.stdout) == []


def test_long_subject_is_found():
    assert long_subjects(f"Fix it\n{'x' * 73}\n{'y' * 72}\n") == ["x" * 73]
