"""Options of `dalsegno user`, which become fields of the cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.cluster.user import _as_json, _fingerprint, _given, _user
from dalsegno.errors import UsageError
from dalsegno.spec.facts import Cluster, Slurm, User
from dalsegno.targets.base import PeopleView

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ bea@laptop"
NOTHING = {
    "full_name": None, "groups": (), "allow_privileged": (), "ssh_keys": (), "accounts": (), "qos": (),
    "max_gpus": None,
}  # fmt: skip


def view(accounting: bool = True, directory: str = "") -> PeopleView:
    cluster = Cluster("one", "local", (), (), slurm=Slurm(accounting=accounting))
    return PeopleView(cluster, {"bea": 20001}, {}, Path("/homes"), directory)


def test_only_options_that_were_given_count():
    assert _given(NOTHING) == {}
    given = _given({**NOTHING, "groups": ("9876", "lab"), "max_gpus": "8", "full_name": ""})
    assert given == {"groups": ["privilege", "lab"], "max_gpus": 8, "full_name": ""}
    assert _given({**NOTHING, "groups": ("",), "ssh_keys": ("",), "max_gpus": "none"}) == {
        "groups": [],
        "ssh_keys": [],
        "max_gpus": None,
    }


@pytest.mark.parametrize("text", ["-1", "all", "1.5", "٣", "9" * 9])
def test_invalid_number_of_gpus_is_refused(text: str):
    with pytest.raises(UsageError, match="invalid number of GPUs"):
        _given({**NOTHING, "max_gpus": text})


def test_keys_are_read_from_a_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"# my keys\n\n{KEY}\n  {KEY}2\n")
    assert _given({**NOTHING, "ssh_keys": (str(file),)})["ssh_keys"] == [KEY, f"{KEY}2"]
    for text in ("", "# none\n"):
        file.write_text(text)
        with pytest.raises(UsageError, match="has no SSH public key"):
            _given({**NOTHING, "ssh_keys": (str(file),)})
    with pytest.raises(UsageError, match="cannot read"):
        _given({**NOTHING, "ssh_keys": (str(tmp_path / "absent"),)})


def test_keys_are_read_from_standard_input():
    with CliRunner().isolation(input=f"# my keys\n{KEY}\n"):
        assert _given({**NOTHING, "ssh_keys": ("-",)})["ssh_keys"] == [KEY]
    with CliRunner().isolation(input=""), pytest.raises(UsageError, match="- has no SSH public key"):
        _given({**NOTHING, "ssh_keys": ("-",)})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "Bea"}, "`name` cannot be `Bea`"),
        ({"name": "root"}, "`name` cannot be `root`"),
        ({"name": "daemon"}, "`name` cannot be `daemon`"),
        ({"name": "bea", "uid": 0}, "`uid` must be at least 1000"),
        ({"name": "*)(uid=*"}, "`name` cannot be `*)(uid=*`"),
        ({"name": "bea", "full_name": "a\u2028b"}, "`full_name` cannot be `a?b`"),
        ({"name": "bea", "full_name": "a:b"}, "`full_name` cannot be `a:b`"),
        ({"name": "bea", "ssh_keys": ["-----BEGIN OPENSSH PRIVATE KEY-----"]}, "`ssh_keys` is not an SSH public key"),
        ({"name": "bea", "groups": ["a,b"]}, "`groups` cannot be `a,b`"),
    ],
)
def test_fields_obey_the_rules_of_the_cluster_file(values: dict[str, object], says: str):
    with pytest.raises(UsageError) as refused:
        _user(values, view())
    assert refused.value.what.startswith(says) and refused.value.hint


def test_user_without_an_account_is_in_the_default_account():
    assert _user({"name": "bea"}, view()).accounts == ("users",)
    assert _user({"name": "bea"}, view(accounting=False)).accounts == ()


def test_user_is_shown_with_home_entry_and_fingerprints():
    shown = _as_json(
        User("bea", ("users",), "users", ssh_keys=(KEY,), added=True), view(directory="ou=People,dc=local")
    )
    assert (shown["home"], shown["entry"]) == ("/homes/bea", "uid=bea,ou=People,dc=local")
    # The fingerprint that `ssh-keygen -lf` prints for this key
    assert shown["ssh_keys"] == ["SHA256:T7SvZ2cslqpPj6nKzitCBHHlpVF3r3MvLwmFL0fk0IE bea@laptop"]
    of_machine = _as_json(User("cem", (), "", uid=1000), view())
    assert (of_machine["uid"], of_machine["home"], of_machine["from"]) == (1000, None, "file")


def test_unreadable_key_is_shown_as_such():
    assert _fingerprint("ssh-ed25519 A bea") == "ssh-ed25519 (unreadable) bea"
