"""Check the protocol: `python -m tests.specification`."""

from .checking import report

if __name__ == "__main__":
    print(report())
