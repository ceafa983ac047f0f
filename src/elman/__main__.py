"""`python -m elman` is the `elman` command."""

import signal


def main() -> None:
    """Load the command line and run it.

    Until it is loaded, and can say that it was interrupted, Ctrl-C ends the process as it ends
    those that know nothing of it: without a word, and without a traceback.
    """
    heeded = signal.getsignal(signal.SIGINT)
    if heeded is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from elman.cli import main as command

    signal.signal(signal.SIGINT, heeded)
    command()


if __name__ == "__main__":
    main()
