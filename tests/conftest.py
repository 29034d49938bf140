"""Settings of the whole test run."""

import os

# libgomp's threads spin while they wait for each other, which on shared cores takes up to 25 times
# as long as sleeping. Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
