"""Many ranks that post as the agent does, from one process: what a server takes, at what cost."""
