"""What can be read off the process and the job it belongs to."""
