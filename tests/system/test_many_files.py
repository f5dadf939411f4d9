"""Tests of the limit on open files."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os, resource, sys, time
from pathlib import Path
from dalsegno.system.children import allow_many_files, start
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 2000))
allow_many_files()
child = start(["sleep", "100"], os.environ)
lines = Path(f"/proc/{child.process.pid}/limits").read_text().splitlines()
limits = [line.split()[3:5] for line in lines if "open files" in line]
print(*resource.getrlimit(resource.RLIMIT_NOFILE), *limits[0])
child.kill()
"""


def test_children_get_the_previous_file_limit():
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["2000", "2000", "300", "2000"], done.stderr
