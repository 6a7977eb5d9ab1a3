"""Templates: what E2B's SDKs build, by aenv-build processes. A template's name is a name of the catalog."""
