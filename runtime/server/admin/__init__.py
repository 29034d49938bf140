"""Routes about the cache: its tree, named prefixes, explanations, the page."""
