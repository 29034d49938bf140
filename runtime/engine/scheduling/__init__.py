"""Decides what a step computes, and which memory it takes."""
