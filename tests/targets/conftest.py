"""The emulator of AWS that the tests of several targets share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.targets.hyperpod.emulator import Emulator, serving


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Emulator]:
    pytest.importorskip("moto.server")
    with serving() as emulator:
        yield emulator
