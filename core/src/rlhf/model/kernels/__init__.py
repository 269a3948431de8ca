"""Layers that run faster or keep less: fused, compiled, recomputed, or with inputs on the host.

Imported by `rlhf.model` and by the code that loads models.
"""
