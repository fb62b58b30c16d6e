"""Python environments of jobs: made once, stored as one archive, found again by what they were made from."""
