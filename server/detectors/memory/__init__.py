"""Memory that the processes of a run use."""
