"""What the ranks train on: batches that come twice, or are of unlike sizes."""
