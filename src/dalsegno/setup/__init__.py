"""Set up machines: the plan of a machine (`node_plan.py`), the program that carries it out (`applier.py`), and the code
that sends this program to the machine (`delivery.py`)."""
