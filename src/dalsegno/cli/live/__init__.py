"""The full-screen view of `dalsegno top`.

`frame.py` and `panels.py` are pure: facts and the state of the view in, lines out. `terminal.py` draws the lines with a
few escape sequences that all common terminals understand. It does not use curses, which needs a terminfo entry for the
user's terminal on the head node. That entry is often missing over ssh, and frames drawn by curses could not be compared
as text.
"""
