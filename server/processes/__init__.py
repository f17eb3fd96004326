"""The threads and processes of a server, and how they hear of each other."""
