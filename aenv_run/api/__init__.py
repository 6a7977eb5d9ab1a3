"""``aenv serve``: the HTTP API of a node for everybody, as E2B's SDKs speak it. A client of the home's node.

It keeps nothing that matters in memory: a restart, or a kill -9, ends no sandbox and forgets none.
"""
