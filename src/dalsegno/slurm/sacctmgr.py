"""Several sacctmgr commands through one process, and what it makes of each."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.errors import DalsegnoError

# What sacctmgr says, with exit code 1, when the database already is as asked.
# ("Nothing modified" is not among them: it means that what was to be modified does not exist.)
NOTHING_TO_DO = ("Nothing new added", "Nothing deleted", "already exists.  Not adding")

_DONE = ("Adding", "Associations", "Modified", "Deleting", *NOTHING_TO_DO)
_PROMPT = "sacctmgr: "


def script(commands: Sequence[Sequence[str]]) -> str:
    """The commands as lines for sacctmgr's own prompt."""
    return "".join(f"{_line(command)}\n" for command in commands)


def failures(commands: Sequence[Sequence[str]], stdout: str, stderr: str) -> list[str]:
    """The commands that were not done, and all that was said against them.

    The exit code tells nothing here: it is 1 as soon as one thing was there already. So each command must have been
    answered, after its echo at the prompt, with one of sacctmgr's words for success.
    """
    answers = {line: answer for line, answer in _answers(stdout)}
    undone = [line for line in map(_line, commands) if not _is_done(answers.get(line, ""))]
    return [f"not done: sacctmgr {line}" for line in undone] + (stderr.strip().splitlines() if undone else [])


def _is_done(answer: str) -> bool:
    """Its word for success may come after a remark, such as that this machine has no such user."""
    return any(said.strip().startswith(_DONE) for said in answer.splitlines())


def _answers(stdout: str) -> list[tuple[str, str]]:
    """Each echoed command with the answer below it."""
    blocks = f"\n{stdout}".split(f"\n{_PROMPT}")[1:]
    split = (block.partition("\n") for block in blocks)
    return [(line.strip(), answer.strip()) for line, _, answer in split]


def _line(command: Sequence[str]) -> str:
    return " ".join(_word(word) for word in command)


def _word(word: str) -> str:
    """`Description=a b` → `Description="a b"`: the prompt knows quotes, but no way to write one inside."""
    if any(letter in word for letter in "\"'\n\r"):
        raise DalsegnoError(f"sacctmgr cannot take {word!r}", hint="leave out quotes and line ends")
    key, equals, value = word.partition("=")
    return f'{key}{equals}"{value}"' if equals and any(letter.isspace() for letter in value) else word
