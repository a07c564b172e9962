"""The residual stream between two layers: a result is added, and the sum is normalised for the next projection."""
