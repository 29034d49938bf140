"""The step loop: schedules requests, computes a step, and processes its tokens."""
