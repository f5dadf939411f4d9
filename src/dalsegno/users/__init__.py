"""Users and groups: accounts in files or in LDAP, home folders and keys."""
