"""One file per verb: options in, Result out. This is the library API."""
