"""The promises of every lock backend, one file each."""
