"""`elman datasets`: what can be loaded by name, and where it comes from."""


def datasets() -> None:
    """List what can be loaded by name, and where from."""
