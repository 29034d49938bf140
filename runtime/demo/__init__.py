"""The demo: a script and its players."""
