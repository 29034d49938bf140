"""For who runs the server: the cache, named prefixes, explanations, the page."""
