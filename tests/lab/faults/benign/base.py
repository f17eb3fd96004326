"""What all benign cases have in common."""

from tests.lab.faults.case import Expected


class Benign:
    """There must be no alert of severity warning or above."""

    def expected(self) -> Expected:
        """Nothing."""
        return Expected()
