"""The demo: a script, and what plays it."""
