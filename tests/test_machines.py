"""The tests that `./test --long` runs on machines exist."""

from tests.machines.__main__ import HANDFUL
from tests.machines.chroot import CLONE


def test_the_cluster_tests_chosen_for_the_emulated_machine_exist():
    for name in HANDFUL:
        file, _, test = name.partition("[")[0].partition("::")
        assert f"\ndef {test}(" in (CLONE / file).read_text(), name
