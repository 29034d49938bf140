"""The CPU kernels: attention over KV pages, linear layers on packed weights, a decoder's step.

They take float32 or bfloat16, sum in float32, and run on a pool of threads of their own. What they
give for a row depends, to the bit, on that row alone: not on the rows beside it, nor on threads.
"""
