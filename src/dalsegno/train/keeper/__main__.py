"""`python -m dalsegno.train.keeper AGENT`: where there is no warm parent to fork from."""

from __future__ import annotations

import sys

from dalsegno.train.keeper import serve

if __name__ == "__main__":
    serve(sys.argv[1])
