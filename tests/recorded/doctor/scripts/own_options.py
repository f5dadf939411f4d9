import argparse

import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("total_epochs", type=int)
parser.add_argument("--batch-size", type=int, default=32)
arguments = parser.parse_args()
dist.init_process_group("gloo")
