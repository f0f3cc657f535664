"""How bytes are kept, whatever the format: files, atomic publishing, safe unpickling."""
