"""Passwords and their bcrypt hashes."""

import ctypes

from dalsegno.system.passwords import bcrypt_hash, draw_password


def test_hash_is_the_bcrypt_hash_of_the_password():
    password = draw_password()
    found = bcrypt_hash(password)
    crypt = ctypes.CDLL("libcrypt.so.1").crypt
    crypt.restype = ctypes.c_char_p
    assert found.startswith("$2b$04$") and len(found) == 60
    assert crypt(password.encode(), found.encode()).decode() == found
    assert bcrypt_hash(password) != found
