"""Freeing what nothing needs, without ever taking what somebody needs. docs/decisions/018-garbage.md is the proof.

One object of the repository, ``leases/gc``, says whether somebody deletes. It has another content after every
step of a collector, so whoever reads it twice and sees the same knows that nothing was deleted in between.
"""
