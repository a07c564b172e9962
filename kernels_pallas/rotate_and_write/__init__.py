"""What lies between a layer's projection and its attention: norms and rotation of heads, K and V into their pages."""
