"""What detectors of several families share: no kind of alert is declared here."""
