"""The files of other tools: what is read from them, and what is written for them."""
