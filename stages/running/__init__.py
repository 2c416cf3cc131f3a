"""What starts a stage, what it goes on from, and what there is to see. Standard library only.

start   a stage's command line: errors in one line, signals
kept    JSON lines that an interrupted stage goes on from
status  what is done, stale, running, half done, failed, missing
"""
