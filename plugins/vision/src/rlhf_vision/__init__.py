"""Rows with images: files and rows become texts with placeholders and inputs of the model."""

from rlhf.plugin import MediaPlugin

plugin = MediaPlugin(reader="rlhf_vision.reader:Images", values="rlhf_vision.values:known_values")
