"""The family of what is learned beside what is only remembered."""
