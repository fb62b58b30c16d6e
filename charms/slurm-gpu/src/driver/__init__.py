"""NVIDIA's driver: which one this machine should have, which it has, installation, upgrade."""
