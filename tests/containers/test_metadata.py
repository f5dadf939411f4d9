"""Image settings, written into an image and parsed back."""

import subprocess

from hypothesis import given
from hypothesis import strategies as st

from dalsegno.containers.image_metadata import (
    parse_environment,
    parse_program,
    parse_workdir,
    render_files,
    render_layer,
)
from dalsegno.containers.manifest import Config


def test_files_have_the_format_of_enroot():
    config = Config(
        env=("A=1", "B=two words", "BAD=two\nlines"), entrypoint=("/entry point", "-x"), cmd=("run", "it's"),
        workdir="/w", volumes=("/data", "/no space"), labels=(("maker", "me"),),
    )  # fmt: skip
    made = render_files(config)
    assert made["etc/environment"] == "A=1\nB=two words\n"
    assert made["etc/fstab"] == "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    assert made["etc/rc"] == (
        "# maker me\n\n"
        'mkdir -p "/w" 2> /dev/null\n'
        'cd "/w" && unset OLDPWD || exit 1\n\n'
        "if [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n\n"
        "if [ $# -gt 0 ]; then\n    exec '/entry point' -x \"$@\"\n"
        "else\n    exec '/entry point' -x run 'it'\"'\"'s'\nfi\n"
    )


def test_image_without_a_program_runs_a_shell():
    assert "exec /bin/sh\n" in render_files(Config())["etc/rc"]
    assert "exec /entry \n" in render_files(Config(entrypoint=("/entry",)))["etc/rc"]


def test_layer_holds_the_files_in_order():
    entries, content = render_layer(Config(env=("A=1",)))
    texts = {entry.path: content[entry.offset : entry.offset + entry.size].decode() for entry in entries}
    assert texts == render_files(Config(env=("A=1",)))


FOLDERS = st.text(st.sampled_from("ab/ \"'$`\\(){};&|<>é*?~!#-."), max_size=20).map(lambda text: f"/{text}")


@given(FOLDERS)
def test_any_working_directory_is_read_back_and_runs_nothing(folder: str):
    usable = ".." not in folder.split("/")
    assert parse_workdir(render_files(Config(workdir=folder))["etc/rc"]) == (folder if usable else "/")


WORDS = st.lists(st.text(st.sampled_from("ab '\"$@\n\\`;#"), max_size=6), max_size=3)


@given(WORDS, WORDS)
def test_any_program_is_read_back(entrypoint: list[str], cmd: list[str]):
    rc = render_files(Config(entrypoint=tuple(entrypoint), cmd=tuple(cmd)))["etc/rc"]
    assert parse_program(rc) == (entrypoint, cmd or ([] if entrypoint else ["/bin/sh"]))


def test_program_is_parsed_from_enroot_images_and_empty_for_other_scripts():
    enroots = """cd "/w" && unset OLDPWD || exit 1\n\nif [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi

if [ $# -gt 0 ]; then\n    exec '/entry' '-x' "$@"\nelse\n    exec '/entry' '-x' 'it'\\''s' 'b'\nfi\n"""
    assert parse_program(enroots) == (["/entry", "-x"], ["it's", "b"])
    for rc in ("", "exec /bin/sh\n", enroots.replace("'b'", "'b"), enroots.replace("exec '/entry'", "exec '/x'", 1)):
        assert parse_program(rc) == ([], [])


def test_working_directory_is_not_run_as_a_command():
    rc = render_files(Config(workdir='/$(echo no)"`echo no`', cmd=("pwd",)))["etc/rc"]
    line = next(line for line in rc.splitlines() if line.startswith("cd"))
    done = subprocess.run(
        ["sh", "-c", line.replace("cd", "echo", 1).partition("&&")[0]], capture_output=True, text=True
    )
    assert done.stdout == '/$(echo no)"`echo no`\n'


def test_environment_of_any_image_is_parsed():
    assert parse_environment("A=1\n# B=2\nPATH=/a:/b\nnonsense\n1X=3\nC=\n") == {"A": "1", "PATH": "/a:/b", "C": ""}
    assert parse_workdir("exec sh\n") == "/"
