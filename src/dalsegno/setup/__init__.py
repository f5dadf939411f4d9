"""Set machines up: what each must hold (`node_plan.py`), the program that makes it so (`applier.py`), and how that
program is sent (`delivery.py`)."""
