"""The OpenAI-compatible server: `radixcache serve`, or `create_app` of `radixcache.runtime.server.app`."""
