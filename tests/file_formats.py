"""What stands in files of runs, said a second time: files of earlier versions are read only while this stays so."""

import hashlib
import json
import zlib


def record_line(record):
    """A line of records.jsonl: the JSON of a record, and the CRC-32 of that text as its last field."""
    line = json.dumps(record)
    return f'{line[:-1]}, "crc": "{zlib.crc32(line.encode()):08x}"}}\n'


def early_fingerprint(config):
    """What checkpoints carried before manifests had a fingerprint: a hash of the whole config, mesh and all."""
    return hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()
