"""The folder of a run, and what a stage under way needs.

run       a stage under way: its folder, metrics, lock and manifest
manifest  where a stage lies, and whether a finished one is still as requested
files     files that are whole or absent, their hashes, JSON lines that survive a kill
hub       models and data sets of the hub, each at one commit
inputs    the user's own files that a stage reads, and their hashes
machine   what a run was made with: code, libraries, device, memory
progress  how far a stage is, and signals that stop it
"""
