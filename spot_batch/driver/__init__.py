"""The driver: lends sample ids to actors, records what they publish, brings the job to its end.

Rows never pass through here, only ids and receipts. The only package that imports ray, and the
only place where a failure becomes a retry.
"""
