"""Branches of one answer: who has which pages, how they stand in lanes, and what is made of them."""
