"""The server: takes what the ranks post, stores it, compares the ranks, opens alerts."""
