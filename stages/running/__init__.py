"""What a run stands on. Standard library only at the top.

files     files that are whole or absent, their hashes, JSON lines that a kill leaves good
hub       models and data sets of the hub, each at one commit
inputs    the user's own files that a stage reads, and their hashes
machine   what a run was made with: code, libraries, device, memory
progress  how far a stage is, in lines of 80 columns, and signals that stop it
launch    a stage in several processes, through accelerate
"""
