"""aenv at build time: a recipe becomes committed snapshots."""
