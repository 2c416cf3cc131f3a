"""What a run stands on, whatever its stage. Standard library only.

files     files that are whole or absent, and their hashes
locks     who works on a stage
machine   what a run was made with
progress  how far, and how long it will take
kept      JSON lines that an interrupted stage goes on from
stopping  signals: what is under way is finished first
start     what starts a stage: its errors in one line, signals
status    what is finished, and what could be
"""
