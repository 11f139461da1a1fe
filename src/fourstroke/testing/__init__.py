"""Fakes behind the real seams, and a virtual clock. They pass the contract suites that the real parts pass."""
