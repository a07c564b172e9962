"""Tool calls and reasoning in the text of an answer, found character by character."""
