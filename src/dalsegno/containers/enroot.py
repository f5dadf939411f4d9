"""Where Enroot is installed it imports images of registries itself: the site has set it up as it wants it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dalsegno.containers.http_client import PLAIN_HINT
from dalsegno.errors import DalsegnoError
from dalsegno.image_name import DOCKER_HUB, ImageName
from dalsegno.system.files import explain, remove_tree
from dalsegno.system.processes import Runner

_HINT = "this import used Enroot, which is installed here; `--own` imports without it"
_NO_TLS = re.compile(r"wrong version number|SSL_connect|SSL routines|[Pp]rotocol .http. (not supported|disabled)")


def uri(name: ImageName) -> str:
    """As Enroot writes it; Docker Hub is what it means without a registry."""
    user = f"{name.user}@" if name.user else ""
    registry = "" if name.registry == DOCKER_HUB else f"{name.registry}#"
    tag = f"@{name.digest}" if name.digest else f":{name.tag}"
    return (
        f"docker://{user}{registry}{name.repository.removeprefix('library/') if not registry else name.repository}{tag}"
    )


def import_by_enroot(enroot: str, name: ImageName, arch: str, target: Path, runner: Runner, own: bool = False) -> None:
    """`enroot import` into a folder of its own beside the target, and the file gets its name when it is whole."""
    aside = target.with_name(f".{target.name}.enroot")
    if aside.is_symlink():
        raise DalsegnoError(f"{aside} is a symbolic link, and is not followed", hint="remove it, or name another file")
    remove_tree(aside)  # of a call that was killed
    try:
        aside.mkdir(0o700)  # never one that is there: another user's link would lead elsewhere
        made = aside / "image.sqsh"
        argv = [enroot, "import", "--arch", arch, "--output", str(made), uri(name)]
        done = runner.run(argv)
        done.checked(hint=PLAIN_HINT if _NO_TLS.search(done.stderr) else _HINT)
        if own:
            made.chmod(made.stat().st_mode & ~0o022 & 0o777)
        os.replace(made, target)
    except OSError as error:
        raise explain(error, target) from error
    finally:
        remove_tree(aside)
