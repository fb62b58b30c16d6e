"""A user's project: which folder it is, and the copy of it that a run keeps."""
