"""Names of snapshots: immutable versions, tags that move and remember, lineage.

``refs/names/<name>/<version>`` says which snapshot a version is and never changes. ``refs/tags/<name>/<tag>``
says which version a tag is now, and how it came there. ``refs/removed/<name>/<version>`` takes a version back for
ever: writing it is the one act of a removal, the rest is tidying, and the number is not given out again.
"""

from aenv_run.catalog.entries import Entry as Entry
from aenv_run.catalog.history import MAX_EVENTS as MAX_EVENTS
from aenv_run.catalog.history import Event as Event
from aenv_run.catalog.history import history as history
from aenv_run.catalog.labels import LabelsRecord as LabelsRecord
from aenv_run.catalog.labels import labels_key as labels_key
from aenv_run.catalog.names import Catalog as Catalog
from aenv_run.catalog.names import Resolved as Resolved
from aenv_run.catalog.records import Built as Built
from aenv_run.catalog.records import Move as Move
from aenv_run.catalog.records import MovesPage as MovesPage
from aenv_run.catalog.records import RemovedRecord as RemovedRecord
from aenv_run.catalog.records import TagRecord as TagRecord
from aenv_run.catalog.records import Version as Version
from aenv_run.catalog.records import VersionRecord as VersionRecord
from aenv_run.catalog.records import moves_key as moves_key
from aenv_run.catalog.records import removed_key as removed_key
from aenv_run.catalog.records import tag_key as tag_key
from aenv_run.catalog.records import version_key as version_key
from aenv_run.catalog.reference import Reference as Reference
from aenv_run.catalog.reference import require_publishable as require_publishable
from aenv_run.catalog.search import Hit as Hit
from aenv_run.catalog.search import search as search
from aenv_run.catalog.search import with_labels as with_labels
