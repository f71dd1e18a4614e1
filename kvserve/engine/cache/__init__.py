"""The pool's tensors, and the device's arrays of running sequences."""
