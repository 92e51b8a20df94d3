"""Language models in numpy, for the demo, the examples and the tests.

The forward pass works on memory that it does not own, so that it runs alike in one process and on
the device memory of chip processes. Only ``split`` knows of chips, by the public API.
"""
