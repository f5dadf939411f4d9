"""Render the files of an OpenLDAP server (slapd) that keeps the accounts of one cluster. Pure.

Only the administrator can change entries, but users can change their own password and SSH keys. Hosts read accounts
without a password, and see only what /etc/passwd and /etc/group would show. Passwords are accepted only over TLS.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

LDAP_PORT, LDAPS_PORT = 389, 636
SCHEMA_FOLDERS = ("/etc/ldap/schema", "/etc/openldap/schema")  # on Debian and Ubuntu; on the RHEL family
MODULE_FOLDERS = ("/usr/lib/ldap", "/usr/lib64/openldap")
SCHEMAS = ("core", "cosine", "nis", "inetorgperson")
DATABASE_BYTES = 1 << 30  # the maximum size of the database; it uses disk space only as it grows
# Everyone may read these attributes: those that /etc/passwd and /etc/group show, and those of the parent entries.
PUBLIC = (
    "entry", "children", "objectClass", "uid", "cn", "uidNumber", "gidNumber", "homeDirectory", "loginShell", "gecos",
    "memberUid", "ou", "dc", "o",
)  # fmt: skip
# The names and object ids are those of the OpenSSH-LPK schema, which sssd and other programs support.
SSH_KEY_SCHEMA = """\
attributetype ( 1.3.6.1.4.1.24552.500.1.1.1.13 NAME 'sshPublicKey'
    DESC 'public key of OpenSSH' EQUALITY octetStringMatch SYNTAX 1.3.6.1.4.1.1466.115.121.1.40 )
objectclass ( 1.3.6.1.4.1.24552.500.1.1.2.0 NAME 'ldapPublicKey'
    DESC 'an account with public keys of OpenSSH' SUP top AUXILIARY MAY ( sshPublicKey $ uid ) )
"""


@dataclass(frozen=True)
class SlapdLayout:
    """The cluster, the base DN and the folders of a slapd."""

    cluster: str
    base: str
    folder: str  # folder of this server, which writes only to its subfolder `db`
    schemas: str = SCHEMA_FOLDERS[0]
    modules: str = MODULE_FOLDERS[0]

    @property
    def admin(self) -> str:
        return f"cn=admin,{self.base}"

    @property
    def config(self) -> str:
        return f"{self.folder}/slapd.conf"


def render_slapd_conf(layout: SlapdLayout) -> str:
    """Return slapd.conf. The hash of the administrator's password is in a separate file, which is generated once."""
    folder = layout.folder
    lines = [
        f"# Written by Dal Segno for {layout.cluster}'s cluster file; `dalsegno up` overwrites it.",
        *(f"include {_quoted(f'{layout.schemas}/{name}.schema')}" for name in SCHEMAS),
        f"include {_quoted(f'{folder}/ssh-key.schema')}",
        f"pidfile {_quoted(f'{folder}/db/slapd.pid')}",
        f"argsfile {_quoted(f'{folder}/db/slapd.args')}",
        f"modulepath {layout.modules}",
        "moduleload back_mdb",
        "moduleload ppolicy",
        "loglevel stats",
        "threads 4",
        "idletimeout 300",
        f"TLSCACertificateFile {_quoted(f'{folder}/tls/ca.pem')}",
        f"TLSCertificateFile {_quoted(f'{folder}/tls/server.pem')}",
        f"TLSCertificateKeyFile {_quoted(f'{folder}/tls/server.key')}",
        "TLSVerifyClient never",
        "security simple_bind=128",
        "",
        "database mdb",
        f"suffix {_quoted(layout.base)}",
        f"rootdn {_quoted(layout.admin)}",
        f"include {_quoted(f'{folder}/rootpw.conf')}",
        f"directory {_quoted(f'{folder}/db')}",
        f"maxsize {DATABASE_BYTES}",
        "index objectClass,uid,cn,uidNumber,gidNumber,memberUid eq",
        "access to attrs=userPassword by self =xw by anonymous auth by * none",
        "access to attrs=sshPublicKey by self write by users read by * none",
        f"access to attrs={','.join(PUBLIC)} by * read",
        "access to * by self read by * none",
        "overlay ppolicy",
        "ppolicy_hash_cleartext",  # otherwise a password that a user sets with ldapmodify would be stored as it is
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def render_rootpw(password: str, salt: bytes) -> str:
    """Return the part of slapd.conf with the hash of the administrator's password."""
    digest = hashlib.sha1(password.encode() + salt).digest()  # SSHA is sufficient for a long random password
    return f"rootpw {{SSHA}}{base64.b64encode(digest + salt).decode()}\n"


def slapd_args(layout: SlapdLayout, addresses: Sequence[str], user: str = "") -> list[str]:
    """Return the arguments of slapd. slapd stays in the foreground, logs to stderr, and runs as `user` if given."""
    urls = " ".join(f"{scheme}{address}/" for address in addresses for scheme in ("ldap://", "ldaps://"))
    as_user = ["-u", user, "-g", user] if user else []
    return ["-d", "stats", "-h", urls, "-f", layout.config, *as_user]


def ca_command(key: str, certificate: str, cluster: str) -> list[str]:
    """Return the openssl command that makes a CA for one cluster."""
    extensions = ["basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign"]
    return _openssl_req(key, certificate, f"/CN=Dal Segno CA of {cluster}", extensions)


def certificate_command(
    key: str, certificate: str, ca_key: str, ca_certificate: str, names: Sequence[str], addresses: Sequence[str]
) -> list[str]:
    """Return the openssl command that makes a server's certificate for its names and addresses."""
    known = ",".join([*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses)])
    extensions = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        "extendedKeyUsage=serverAuth",
        f"subjectAltName={known}",
    ]
    signed = ["-CA", ca_certificate, "-CAkey", ca_key]
    return [*_openssl_req(key, certificate, f"/CN={names[0]}", extensions), *signed]


def _openssl_req(key: str, certificate: str, subject: str, extensions: Sequence[str]) -> list[str]:
    return [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256",
        "-days", "3650", "-subj", subject, "-keyout", key, "-out", certificate,
        *(word for each in extensions for word in ("-addext", each)),
    ]  # fmt: skip
