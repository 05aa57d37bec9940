"""The job directory is the job: segments in, parts out, everything rebuilt from files alone.

Pure pyarrow, numpy and the standard library.
"""
