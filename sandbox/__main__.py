"""`python -m sandbox`: what ./sandboxctl runs."""

from sandbox.cli import main

main()
