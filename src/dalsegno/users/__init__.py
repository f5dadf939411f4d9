"""People: accounts in files or in LDAP, their homes and keys. What is wanted is compared with what is found."""
