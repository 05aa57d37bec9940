"""The service: the driver lends sample ids, actors publish, the job comes to its end.

Rows never pass through the driver, only ids and receipts. The only package that imports ray, and
the only place where a failure becomes a retry.
"""
