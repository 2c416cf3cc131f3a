"""The folder of a run, and what a stage under way needs.

run       a stage under way: its folder, metrics, lock and manifest
manifest  where a stage's folder is, and whether a finished one is what a config asks for
inputs    the user's files that a stage reads, and their hashes
machine   what a run was made with: code, libraries, device, memory
files     files that are never half-written, their hashes, JSON lines that survive a kill
hub       models and data sets of the hub, each at one commit
progress  how far a stage is, and signals that stop it
"""
