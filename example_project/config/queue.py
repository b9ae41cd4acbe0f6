"""Where the example's jobs wait for a worker."""

from pathlib import Path


def broker(address: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Return the address of Celery's broker, and the options of its transport.

    Args:
        address: Of a broker; "": files, which are enough for one machine.
        folder: For those, and for what a beat keeps.
    """
    # Celery makes no folder itself. What one process writes to the first, another one reads there.
    messages, control = folder / "messages", folder / "control"
    for each in (messages, control):
        each.mkdir(parents=True, exist_ok=True)
    if address:
        return address, {}
    return "filesystem://", {
        "data_folder_in": str(messages),
        "data_folder_out": str(messages),
        "control_folder": str(control),
    }
