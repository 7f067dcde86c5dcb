"""Checkpoints: what commits them, where they lie, which one a run resumes from.

``manifest`` publishes and loads, ``discovery`` chooses, ``claims`` numbers executions, ``adapter`` plugs all that into a controller,
``digests`` hashes, ``stores`` keeps. Imported by module; this package imports none of them, so that a worker can have the
digests alone.
"""
