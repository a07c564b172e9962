"""The step between projection and attention: norms and rotation of heads, writes of K and V into their pages."""
