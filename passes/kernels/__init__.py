"""Triton kernels that the passes put in place of named ops, a file a kernel.

Importing one of the files needs Triton; importing this package does not.
"""
