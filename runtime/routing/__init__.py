"""Which replica serves a request, where there are several. Needs the index alone."""
