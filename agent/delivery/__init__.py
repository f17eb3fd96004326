"""From the training thread to the server: records, queue, spool, HTTP; never in the way."""
