"""What only a card can show, in nine minutes.

parts  what is measured, each part in a process of its own
run    all parts, one after the other, and their page: the command `make card`
"""
