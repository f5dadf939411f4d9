"""Tests of releasing unused memory, such as a library's large zeroed table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TABLE = """
#include <string.h>
static char table[8 << 20];
void clear(void) { memset(table, 0, sizeof table); table[0] = 1; table[5 << 20] = 2; table[(8 << 20) - 1] = 3; }
unsigned kept(void) { unsigned sum = 0; for (long at = 0; at < 8 << 20; at++) sum = sum * 3 + table[at]; return sum; }
"""
USER = """
import ctypes, re, sys
from pathlib import Path
from dalsegno.system.memory import give_back_cleared

def own_kib():
    return int(re.search(r"Anonymous:\\s+(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

table = ctypes.CDLL(sys.argv[1])
table.clear()
before, kept = own_kib(), table.kept()
print(give_back_cleared("libtable.so"), before - own_kib(), table.kept() == kept)
print(give_back_cleared("libother.so"))
"""


def test_zero_pages_are_released_and_others_kept(tmp_path: Path) -> None:
    (tmp_path / "table.c").write_text(TABLE)
    library = tmp_path / "libtable.so.1.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "table.c")], check=True)
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", USER, str(library)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given, less_kib, same, nothing = done.stdout.split()
    assert 7 << 20 < int(given) < 8 << 20 and int(less_kib) > 7 << 10
    assert same == "True" and nothing == "0"


def test_module_is_compiled_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("answer = 42\n")
    user = (
        "import importlib.util, os, sys; from dalsegno.system.memory import compile_apart;"
        "[compile_apart(name) for name in ('large', 'large', 'none')];"
        "print(os.path.exists(importlib.util.find_spec('large').cached), 'large' in sys.modules);"
        "import large; print(large.answer)"
    )
    env = {"PYTHONPATH": f"{Path(__file__).parents[2] / 'src'}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-B", "-c", user], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "42"], done.stderr
