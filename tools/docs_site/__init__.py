"""The documentation site: pages that are generated from code, and links from the pages into the repository."""
