"""Set up machines: the plan of a machine (`node_plan.py`), the program that carries it out (`applier.py`), and the way
this program is sent (`delivery.py`)."""
