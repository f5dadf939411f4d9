"""The first process of a host. It uses only the standard library to stay small, because every host runs one."""
