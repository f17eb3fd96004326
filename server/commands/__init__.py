"""The commands that ask a server by its REST interface: one file each."""
