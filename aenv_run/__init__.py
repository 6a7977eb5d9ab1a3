"""aenv at run time: snapshots, catalog, drivers, sandboxes. Never imports aenv_build."""
