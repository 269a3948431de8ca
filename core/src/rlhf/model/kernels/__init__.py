"""Layers that run faster or keep less: fused, compiled or recomputed.

Imported by `rlhf.model` and by the code that loads models.
"""
