"""The step loop: requests, what the next step computes, and the tokens that come of it."""
