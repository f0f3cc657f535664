"""On-disk formats. Formats never import each other's folders or a naming."""
