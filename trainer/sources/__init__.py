"""Where training text comes from: each kind of source becomes a `Corpus`, documents of tokens on the disk."""
