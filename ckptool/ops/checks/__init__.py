"""What `verify` looks at: one file a kind of check, each of which returns findings and never raises for damage."""
