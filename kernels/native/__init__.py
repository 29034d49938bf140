"""The CPU kernels: attention over KV pages, linear layers on packed weights, a decoder's step.

They take float32 or bfloat16, sum in float32, and run on their own pool of threads. A row's result
depends, to the bit, on that row alone: not on other rows, nor on the number of threads.
"""
