"""The words of E2B's HTTP API: what comes in is checked to the last field, what goes out has the SDKs' names."""
