"""A worker that only reports its start, to measure agents and generations without training."""

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    rank, size = os.environ["JAX_PROCESS_ID"], os.environ["JAX_NUM_PROCESSES"]
    with (Path(sys.argv[1]) / f"rank{rank}.steps").open("a") as steps:
        steps.write(f"{time.time():.6f} {os.getpid()}.{time.time_ns()} 0 {size}\n")
    while True:
        time.sleep(60)
