"""Tests of the table of CPU times."""

from tests.cpu_times import table


def test_times_are_summed_by_file_and_by_test():
    lines = ['["a.py::test_x", "setup", 2.0]', '["a.py::test_x", "call", 0.5]', '["b.py::test_y", "call", 1.0]']
    assert table(lines).splitlines() == [
        "     3.5  all",
        "     2.5  a.py",
        "     1.0  b.py",
        "     2.0  a.py::test_x (setup)",
        "     1.0  b.py::test_y",
        "     0.5  a.py::test_x",
    ]
