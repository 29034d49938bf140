"""Several servers behind one address, run by Ray Serve. See `docs/deploy/README.md`."""
