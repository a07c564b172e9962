"""GPU kernels, one folder each: the reference in XLA, the kernel, and the choice between them."""
