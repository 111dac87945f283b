"""What is kept: canonical encoding, object store, bundles, run records.

Knows bytes and hashes, not transformers. The format is in docs/format.md.
"""

from artifacts.attestation import Attestation, read_attestations, write_attestation
from artifacts.bundle import Bundle, load_bundle, save_bundle, verify_bundle
from artifacts.folder import folder_hash, import_folder, read_folder, write_folder
from artifacts.hashing import hash_bytes
from artifacts.record import (
    Record,
    find_records,
    read_digests,
    read_record,
    record_bundles,
    sources_digest,
    write_digests,
    write_record,
)
from artifacts.resolve import Resolved, resolve
from artifacts.runs import Run, RunInfo, list_runs, open_run, read_run
from artifacts.store import Store

__all__ = [
    "Attestation",
    "Bundle",
    "Record",
    "Resolved",
    "Run",
    "RunInfo",
    "Store",
    "find_records",
    "folder_hash",
    "hash_bytes",
    "import_folder",
    "list_runs",
    "load_bundle",
    "open_run",
    "read_attestations",
    "read_digests",
    "read_folder",
    "read_record",
    "read_run",
    "record_bundles",
    "resolve",
    "save_bundle",
    "sources_digest",
    "verify_bundle",
    "write_attestation",
    "write_digests",
    "write_folder",
    "write_record",
]
