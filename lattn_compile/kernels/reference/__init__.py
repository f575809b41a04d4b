"""Plain-torch kernels: what every other implementation is compared with, and what runs where there is no other.

`chunk` computes a whole run of tokens by matrix products, `replay` window by window likewise, `decode` token by token.
All take flat tokens and per-sequence `starts` and `lengths`, and hold their forward and their explicit backward
together.
"""
