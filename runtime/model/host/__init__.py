"""The machine: its devices, its memory, and what a container may use of it."""
