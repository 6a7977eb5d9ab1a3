"""The dumb byte store: named bytes, no meaning. The repository above it is the smart half."""

from aenv_run.store.protocol import KeyInfo, Store, StoreKey, Stray

__all__ = ["KeyInfo", "Store", "StoreKey", "Stray"]
