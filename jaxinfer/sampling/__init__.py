"""From logits to tokens, on the device."""
