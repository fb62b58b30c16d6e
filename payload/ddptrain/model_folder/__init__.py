"""The folder of a model that transformers saved, judged by its files."""
