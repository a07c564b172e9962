"""GPU kernels, one folder each: what it computes, when it runs, and the kernel itself."""
