"""Settings of all tests."""

import os

# As in train.py: processes share the cores, and threads that spin would wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
