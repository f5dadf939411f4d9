"""Run new setup scripts on machines that already run. The platforms run these scripts only on new machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.system.processes import Completed
from dalsegno.targets.base import Say, counted

REFRESH = "/usr/local/sbin/dalsegno-refresh"
REFRESH_S = 900.0
_AT_ONCE = 16
Execute = Callable[[Sequence[str]], Completed]


def refresh_script(fetch: str, entry: str) -> str:
    """Return the text of the program `dalsegno-refresh`.

    `fetch` is a shell command that puts the scripts into the folder "$work". `entry` is the script there to run.
    """
    return (
        "#!/bin/bash\n# Written by Dal Segno. It gets the newest set-up scripts and runs them.\nset -euo pipefail\n"
        "cd / # a program must not load modules from the caller's folder\n"
        'work="$(mktemp -d /var/tmp/dalsegno-refresh.XXXXXX)"\n'
        "trap 'rm -rf \"$work\"' EXIT\n"
        f"{fetch}\n"
        f'bash "$work/{entry}"\n'
    )


def refresh_machines(commands: Mapping[str, Sequence[str]], execute: Execute, say: Say) -> None:
    """Run the command of each machine. Raise TargetError if one of them fails.

    `commands` maps the name of each machine to its command.
    """
    from concurrent.futures import ThreadPoolExecutor

    def run(name: str) -> str:
        try:
            done = execute(commands[name])
        except DalsegnoError as error:
            return f"{name}: {error.what}"
        return "" if done.exit_code == 0 else f"{name}: {(done.stderr or done.stdout).strip()[-300:]}"

    if not commands:
        return
    say(f"running the new scripts on {counted(len(commands), 'machine')}")
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        failed = [text for text in threads.map(run, commands) if text]
    if failed:
        raise TargetError(
            f"the new scripts failed on {len(failed)} of {len(commands)} machines; the first: {failed[0]}",
            hint="`dalsegno ssh NODE -- sudo dalsegno-refresh` runs them again",
        )
