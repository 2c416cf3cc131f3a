"""What a run stands on, whatever it is about. Standard library only.

files     files that are whole or absent, and their hashes
hub       models and data sets of the hub, each at one commit
locks     who works on a stage
machine   what a run was made with
progress  how far, and how long it will take
short_names  names for a narrow column, cut so that they stay different
stopping  signals: what is under way is finished first
terminal  lines of 80 columns
"""
