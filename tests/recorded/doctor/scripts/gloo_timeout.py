import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
grads = torch.ones(8)
dist.all_reduce(grads)
if dist.get_rank() == 1:
    time.sleep(8)
dist.all_reduce(grads)
