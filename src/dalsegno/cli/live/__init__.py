"""The full-screen view of `dalsegno top`.

`frame.py` and `panels.py` are pure: facts and the state of the view in, lines out. `terminal.py` draws them with the
few escape sequences that all terminals in use share. It does not use curses: curses needs a terminfo entry for the
user's terminal on the head node, which is often missing over ssh, and its frames could not be compared as text.
"""
