"""Files for hosts that use a directory, and for nodes that admit only users with a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dalsegno.users.login_files import DirectoryClient, render_nslcd_conf, render_nsswitch, render_pam_sshd, restore_pam
from dalsegno.users.slapd import SlapdLayout, render_rootpw, render_slapd_conf, slapd_args

CLIENT = DirectoryClient("one", "ldaps://10.0.0.1/", "dc=local", "/etc/dalsegno/ldap-ca.pem")
DEBIAN_SSHD = """\
# PAM configuration for the Secure Shell service
@include common-auth
account    required     pam_nologin.so
@include common-account
session [success=ok ignore=ignore module_unknown=ignore default=bad]        pam_selinux.so close
@include common-session
@include common-password
"""
COMMON_SESSION = """\
# here are the per-package modules (the "Primary" block)
session required pam_unix.so
session optional pam_systemd.so
"""
RHEL_SSHD = """\
#%PAM-1.0
auth       substack     password-auth
account    required     pam_sepermit.so
account    include      password-auth
session    include      password-auth
-session   optional     pam_systemd.so
"""
NSSWITCH = """\
# /etc/nsswitch.conf
passwd:         files systemd
group:          files [SUCCESS=merge] systemd
hosts:          files dns
"""
FILES = {
    "nslcd.conf": lambda: render_nslcd_conf(CLIENT),
    "nsswitch.conf": lambda: render_nsswitch(NSSWITCH),
    "pam-sshd-debian": lambda: render_pam_sshd(DEBIAN_SSHD, {"/etc/pam.d/common-session": COMMON_SESSION}, ["ops"]),
    "pam-sshd-rhel": lambda: render_pam_sshd(RHEL_SSHD, {}),
    "slapd.conf": lambda: render_slapd_conf(SlapdLayout("one", "dc=local", "/state/ldap")),
}


@pytest.mark.parametrize("name", FILES)
def test_files_match_the_golden_files(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"users/{name}", FILES[name]())


@pytest.mark.parametrize("found", [DEBIAN_SSHD, RHEL_SSHD])
def test_pam_files_can_be_rendered_again_and_restored(found: str) -> None:
    files = {"/etc/pam.d/common-session": COMMON_SESSION}
    once = render_pam_sshd(found, files)
    assert not any(" pam_systemd.so" in line for line in once.splitlines() if not line.startswith("#"))
    assert render_pam_sshd(once, files) == once
    assert restore_pam(once) == found


def test_nsswitch_is_rendered_once() -> None:
    once = render_nsswitch(NSSWITCH)
    assert render_nsswitch(once) == once


def test_secrets_of_slapd_are_not_in_its_arguments_or_its_main_file() -> None:
    layout = SlapdLayout("one", "dc=local", "/state with blank/ldap")
    assert slapd_args(layout, ["10.0.0.2"], "openldap") == [
        "-d", "stats", "-h", "ldap://10.0.0.2/ ldaps://10.0.0.2/", "-f", "/state with blank/ldap/slapd.conf",
        "-u", "openldap", "-g", "openldap",
    ]  # fmt: skip
    assert "rootpw " not in render_slapd_conf(layout)
    assert "hunter" not in render_rootpw("hunter", b"salt")
