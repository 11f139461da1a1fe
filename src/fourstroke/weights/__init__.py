"""Weights from trainer to engine: both ends of one protocol, through shared memory, proved by digest; no pickle.

``publish`` writes, ``receive`` verifies, ``manifest`` says what both mean by a tensor's and a version's digest.
"""
