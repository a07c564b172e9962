"""Host halves of the ways to decode: speculation, block diffusion, bidirectional models, beams."""
