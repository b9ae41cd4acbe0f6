"""The ground: values, validation and decisions. No Django, no I/O, no clock of its own."""
