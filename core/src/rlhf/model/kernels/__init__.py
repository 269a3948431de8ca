"""Fused, compiled and recomputed layers."""
