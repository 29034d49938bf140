"""Bodies of requests and answers, as their APIs have them."""
