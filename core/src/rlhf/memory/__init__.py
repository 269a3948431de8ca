"""The memory that a step needs on a device, and the choices that follow from it."""
